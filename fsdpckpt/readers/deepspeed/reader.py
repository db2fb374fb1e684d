"""Reads DeepSpeed checkpoints with ZeRO: the fp32 weights and the optimizer's states by name.

``engine.save_checkpoint`` writes a directory for each step, ``<tag>/``, and the file ``latest`` beside them with the
name of the last. In the directory of a step every data-parallel rank ``r`` has its part of the fp32 weights and of the
states in ``[bf16_|fp16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt``. The state dict of the module is in
``mp_rank_00_model_states.pt`` (stages 1 and 2), or in ``zero_pp_rank_<r>_mp_rank_00_model_states.pt`` of each rank
(stage 3) (``deepspeed/runtime/engine.py``).

A *universal* checkpoint has the same files of module states, and in ``zero/<parameter>/`` a file for the whole weight
and for each whole state in the place of the parts. ``latest_universal`` names its directory
(``deepspeed/checkpoint/ds_to_universal.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.readers.deepspeed.required_files import (
    OPTIMIZER_STATE,
    WITH_ZERO_1,
    ZERO,
    ZERO_1_OR_2,
    ZERO_3,
    ExpertFile,
    require_one_save,
    required_grid,
    unsupported,
)
from fsdpckpt.readers.protocol import Claim, FileTable, Part, PartContents, ReadOptions, claim_latest
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources

_OPTIM = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d{1,5})_mp_rank_(\d{1,5})_optim_states\.pt$")
_MODEL = re.compile(r"^(?:zero_pp_rank_(\d{1,5})_)?mp_rank_(\d{1,5})_model_states\.pt$")
_EXPERT = re.compile(r"^(?:layer_(\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{1,5})_model_states\.pt$")
_EXPERT_STATES = re.compile(r"^expp_rank_(\d{1,5})_mp_rank_(\d{1,5})_optim_states\.pt$")  # without ZeRO
_LAYER = re.compile(r"^layer_(\d{1,6})(?:-model_(\d{1,5}))?-model_states\.pt$")  # without a model axis it is not there
_LATEST = ("latest", "latest_universal")
_SCRIPTS = frozenset({"zero_to_fp32.py", "zero_to_torch.py"})
_PRECISIONS = {"bf16_": "in bfloat16", "fp16_": "in float16", "": "in float16 or float32"}


class DeepSpeedReader:
    """Directories written by ``DeepSpeedEngine.save_checkpoint`` with ZeRO, and universal checkpoints."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        """Raises SourceIncompleteError for one file of ZeRO, which is useless without those of the other ranks: what
        ZeRO 3 calls a module has empty tensors. ``mp_rank_00_model_states.pt`` of ZeRO 1 and 2 is none: it has the
        whole module, unless other tensor-parallel ranks have files, too.
        """
        optim, model = _OPTIM.match(file.name), _MODEL.match(file.name)
        if model is not None and model[1] is None and int(model[2]) == 0:
            beside = file.path.removesuffix(file.name) + "mp_rank_01_model_states.pt"
            model = None if sources.stat(beside) is None else model
        match = optim or model
        if match is None:
            return None
        raise SourceIncompleteError(
            f"{file.path} is one rank's part of a DeepSpeed {'ZeRO ' if match[1] is not None else ''}checkpoint",
            file=file.path,
            rank=int(match[1] or match[2]),
            why="the parameters are divided among the files of all ranks",
            next_step="give the directory with the files of all ranks",
        )

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """Claim the step in ``path``, or the one that ``latest`` or ``latest_universal`` names. Raises
        SourceIncompleteError that lists missing files, SourceUnsupportedError for a model that is parallel in other
        ways as well.
        """
        claim = _claim_step(path, files, sources)
        for latest in _LATEST:
            if not claim.parts:
                claim = claim_latest(path, files.get(latest), sources, partial(_claim_step, sources=sources))
                claim.names.update(_SCRIPTS & files.keys() if claim.parts else ())
        return claim


def _claim_step(path: str, files: Mapping[str, Entry], sources: Sources) -> Claim:
    """Claim the step among ``files``, those of the directory ``path``; nothing if there is none."""
    above, _, name = path.rstrip("/").rpartition("/")
    if name == ZERO and OPTIMIZER_STATE in files:
        raise SourceIncompleteError(
            f"{path} has only the weights and states of a DeepSpeed universal checkpoint",
            file=path,
            why="the parameters and buffers are listed in the module states, one directory up",
            next_step=f"give {above or '..'}",
        )
    if any(_OPTIM.match(name) for name in files):
        return _claim_zero(path, files)
    layers = sorted(filter(_LAYER.match, files))
    if any(_MODEL.match(name) for name in files):
        zero = sources.stat(f"{path.rstrip('/')}/{ZERO}")
        if zero is not None and zero.directory:
            return _claim_universal(path, files)
    if "mp_rank_00_model_states.pt" in files and any(map(_EXPERT.match, files)):
        return _claim_experts(path, files)
    if layers:
        raise unsupported(
            path,
            "pipeline stages without the states of ZeRO, which would name them",
            layers,
            why="no file names the parameters of a layer, and each stage's optimizer numbers its own",
            next_step=WITH_ZERO_1,
        )
    if not files and sources.stat(f"{path.rstrip('/')}/{ZERO}/{OPTIMIZER_STATE}") is not None:
        required_grid(path, {}, {}, per_rank=False)
    return Claim()


def _claim_universal(path: str, files: Mapping[str, Entry]) -> Claim:
    matches = {name: match for name in files if (match := _MODEL.match(name))}
    whole = {name: match for name, match in matches.items() if match[1] is None}
    used = whole or matches  # if both exist, ZeRO 3 loads the second
    model = _by_ranks(_MODEL, {name: files[name] for name in used})
    required_grid(path, {}, model, per_rank=not whole)
    layers = _layers_in(files)
    names = {*matches, *filter(_LAYER.match, files), *(_SCRIPTS & files.keys())}

    def read(table: FileTable, sources: Sources) -> PartContents:
        from fsdpckpt.readers.deepspeed.universal import read_universal

        return read_universal(path, model, layers, table, sources)

    return Claim([Part(path, "deepspeed", read)], names, directories={ZERO})


def _layers_in(files: Mapping[str, Entry]) -> dict[int, str]:
    """The paths of a pipeline's layer files, by number."""
    return {int(match[1]): files[name].path for name in sorted(files) if (match := _LAYER.match(name))}


def _claim_zero(path: str, files: Mapping[str, Entry]) -> Claim:
    names = _matching(files, (_OPTIM, _MODEL, _EXPERT, _LAYER))
    _refuse_others(path, names)
    optimizers, models = sorted(filter(_OPTIM.match, names)), sorted(filter(_MODEL.match, names))
    require_one_save(path, {name: _PRECISIONS[name.partition("zero_pp_rank_")[0]] for name in optimizers})
    require_one_save(path, {name: ZERO_1_OR_2 if name.startswith("mp_") else ZERO_3 for name in models})
    optim_paths, model_paths = _by_ranks(_OPTIM, files), _by_ranks(_MODEL, files)
    layers, experts = _layers_in(files), _experts_in(files)

    def read(table: FileTable, sources: Sources) -> PartContents:
        from fsdpckpt.readers.deepspeed.read import read_zero

        return read_zero(path, optim_paths, model_paths, layers, experts, table, sources)

    return Claim([Part(path, "deepspeed", read)], names | (_SCRIPTS & files.keys()))


def _experts_in(files: Mapping[str, Entry]) -> list[ExpertFile]:
    """The files of experts, in the order of their layers."""
    matches = {name: match for name in files if (match := _EXPERT.match(name))}
    experts = [
        ExpertFile(None if match[1] is None else int(match[1]), int(match[2]), files[name].path)
        for name, match in matches.items()
    ]
    return sorted(experts, key=lambda expert: (expert.layer or 0, expert.expert))


def _claim_experts(path: str, files: Mapping[str, Entry]) -> Claim:
    """Claim a step with experts that was saved without ZeRO."""
    names = _matching(files, (_MODEL, _EXPERT, _EXPERT_STATES, _LAYER))
    _refuse_others(path, names)
    experts, module = _experts_in(files), files["mp_rank_00_model_states.pt"].path

    def read(table: FileTable, sources: Sources) -> PartContents:
        from fsdpckpt.readers.deepspeed.without_zero import read_without_zero

        return read_without_zero(path, module, experts, table, sources)

    left_out = sorted(filter(_EXPERT_STATES.match, names))
    return Claim([Part(path, "deepspeed", read)], names, left_out)


def _matching(files: Iterable[str], patterns: Sequence[re.Pattern[str]]) -> set[str]:
    return {name for pattern in patterns for name in files if pattern.match(name)}


def _by_ranks(pattern: re.Pattern[str], files: Mapping[str, Entry]) -> dict[int, dict[int, str]]:
    """The paths of the files whose names match ``pattern``, by model-parallel and data-parallel rank."""
    paths: dict[int, dict[int, str]] = {}
    for name in sorted(files):
        match = pattern.match(name)
        if match is not None:
            paths.setdefault(int(match[2]), {})[int(match[1] or 0)] = files[name].path
    return paths


def _refuse_others(path: str, names: set[str]) -> None:
    """Refuse kinds of parallelism that cut tensors in ways that these files do not record: the tensor-parallel ranks of
    a pipeline, and experts beside those or in a pipeline.
    """
    layers = sorted(name for name in names if _LAYER.match(name))
    cut = any((match := _LAYER.match(name)) is not None and int(match[2] or 0) > 0 for name in layers)
    if cut or len({match[1] for name in layers if (match := _LAYER.match(name))}) < len(layers):
        raise unsupported(path, "pipeline stages", layers, "one file for each layer", "those of tensor-parallel ranks")
    experts = sorted(name for name in names if _EXPERT.match(name))
    zero = any(map(_OPTIM.match, names))
    ranks = [match[2] for name in names if (match := _MODEL.match(name)) is not None]
    if experts and (layers or (not zero and any(map(int, ranks)))):
        found = "layer files of pipeline stages, too" if layers else "other model-parallel ranks, too"
        raise unsupported(path, "experts", experts, "experts alone", found)
