"""Read DeepSpeed ZeRO checkpoints of stages 1, 2 and 3: the fp32 weights and the optimizer's states by name.

``engine.save_checkpoint`` writes a directory for each step, ``<tag>/``, and the file ``latest`` beside them with the
name of the last. In the directory of a step every data-parallel rank ``r`` has its part of the fp32 weights and of the
states in ``[bf16_|fp16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt``. The state dict of the module is in
``mp_rank_00_model_states.pt`` (stages 1 and 2), or in ``zero_pp_rank_<r>_mp_rank_00_model_states.pt`` of each rank
(stage 3) (``deepspeed/runtime/engine.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fsdpckpt.errors import SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.readers.protocol import Claim, FileTable, Part, ReadOptions, Tree
from fsdpckpt.storage.protocols import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import first_of

_OPTIM = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d{1,5})_mp_rank_(\d{1,5})_optim_states\.pt$")
_MODEL = re.compile(r"^(?:zero_pp_rank_(\d{1,5})_)?mp_rank_(\d{1,5})_model_states\.pt$")
_EXPERT = re.compile(r"^(?:layer_\d+_)?expert_\d+_.*_model_states\.pt$|^expp_rank_\d+_.*_optim_states\.pt$")
_LAYER = re.compile(r"^layer_\d+-model_\d+-model_states\.pt$")
_LATEST = "latest"
_SCRIPTS = frozenset({"zero_to_fp32.py", "zero_to_torch.py"})
_MAX_TAG_BYTES = 1024
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class ZeroFiles:
    """The files of one step. ``optim``: path of every data-parallel rank's states; ``model``: of the module states, by
    rank, or of rank 0 alone (ZeRO 1 and 2). ``directory`` names them in messages."""

    directory: str
    optim: Mapping[int, str]
    model: Mapping[int, str]


class DeepSpeedReader:
    """Directories that ``DeepSpeedEngine.save_checkpoint`` wrote with ZeRO."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        """Raises SourceIncompleteError: one file of ZeRO means nothing without those of the other ranks."""
        if not _OPTIM.match(file.name):
            return None
        raise SourceIncompleteError(
            f"{file.path} is one rank's part of a DeepSpeed ZeRO checkpoint",
            file=file.path,
            rank=int(_OPTIM.match(file.name)[1]),  # type: ignore[index]  # it matched above
            why="the parts of all ranks together hold the parameters",
            next_step="give the directory with the files of all ranks",
        )

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """The step in ``path``, or the one that ``latest`` names. Raises SourceIncompleteError naming missing files,
        SourceUnsupportedError for a model that is parallel in other ways as well."""
        if any(_OPTIM.match(name) for name in files):
            return _claim_step(path, files)
        tag = _latest(files, sources)
        if tag is None:
            return Claim()
        below = f"{path.rstrip('/')}/{tag}"
        inside = {entry.name: entry for entry in sources.list_directory(below) if not entry.directory}
        if not any(_OPTIM.match(name) for name in inside):
            return Claim()
        claim = _claim_step(below, inside)
        return Claim(claim.parts, {_LATEST, *(_SCRIPTS & files.keys())}, directories={tag})


def _latest(files: Mapping[str, Entry], sources: Sources) -> str | None:
    """The directory that ``latest`` names, None without one."""
    entry = files.get(_LATEST)
    if entry is None or not 0 < entry.nbytes <= _MAX_TAG_BYTES:
        return None
    tag = sources.open(entry.path).read(0, entry.nbytes).decode("utf-8", "replace").strip()
    if not tag or "/" in tag or "\\" in tag or tag.startswith(".") or not tag.isprintable():
        return None
    parent = entry.path.rpartition("/")[0]
    return tag if any(one.directory and one.name == tag for one in sources.list_directory(parent)) else None


def _claim_step(path: str, files: Mapping[str, Entry]) -> Claim:
    names = {name for name in files if any(one.match(name) for one in (_OPTIM, _MODEL, _EXPERT, _LAYER))}
    _require_data_parallel(path, names)
    optim = {int(match[1]): name for name in names if (match := _OPTIM.match(name))}
    model = {int(match[1] or 0): name for name in names if (match := _MODEL.match(name))}
    per_rank = any(name.startswith("zero_pp_rank_") for name in model.values())
    _require_all_ranks(path, optim, model, per_rank=per_rank)
    zero = ZeroFiles(
        path,
        {rank: files[name].path for rank, name in sorted(optim.items())},
        {rank: files[name].path for rank, name in sorted(model.items())},
    )

    def read(table: FileTable, sources: Sources) -> Tree:
        from fsdpckpt.readers.deepspeed.read import read_zero

        return read_zero(zero, table, sources)

    return Claim([Part(path, "deepspeed", read)], names | (_SCRIPTS & files.keys()))


def _require_data_parallel(path: str, names: set[str]) -> None:
    """Other kinds of parallelism cut the tensors in ways that these files do not say."""
    experts = sorted(name for name in names if _EXPERT.match(name))
    layers = sorted(name for name in names if _LAYER.match(name))
    others = sorted(
        name for name in names if (match := _OPTIM.match(name) or _MODEL.match(name)) is not None and int(match[2]) > 0
    )
    for kind, found in (("experts", experts), ("pipeline stages", layers), ("tensor parallel ranks", others)):
        if found:
            raise SourceUnsupportedError(
                f"{path} is a DeepSpeed checkpoint with files of {kind}, which fsdpckpt does not read",
                details=found[:_SHOWN],
                file=f"{path.rstrip('/')}/{found[0]}",
                why="how the tensors of these files belong together is in the code of the model, not in the files",
                next_step="convert it with the model's own script (ds_to_universal.py, or convert_*.py of the trainer)",
            )


def _require_all_ranks(path: str, optim: Mapping[int, str], model: Mapping[int, str], *, per_rank: bool) -> None:
    """Every rank 0 .. W - 1 has its files."""
    ranks = max(*optim, *(model if per_rank else (0,)), 0) + 1
    known = next(iter(optim.values()))
    missing = [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", known) for rank in range(ranks) if rank not in optim]
    if per_rank:
        example = next(name for name in model.values() if name.startswith("zero_pp_rank_"))
        missing += [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", example) for rank in range(ranks) if rank not in model]
    elif not model:
        missing.append("mp_rank_00_model_states.pt")
    if missing:
        raise SourceIncompleteError(
            f"{path}: {len(missing)} file{'s' * (len(missing) != 1)} of the DeepSpeed checkpoint "
            f"{'is' if len(missing) == 1 else 'are'} missing: {first_of(missing, _SHOWN)}",
            details=missing,
            file=f"{path.rstrip('/')}/{missing[0]}",
            why="the save or the copy did not finish, or these ranks wrote to the disks of other machines",
            next_step="copy the files of all ranks into one directory",
        )
