"""Which files a DeepSpeed checkpoint has to have: those of all ranks, of one save."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError, to_copy
from fsdpckpt.readers.missing_ranks import ranks_missing
from fsdpckpt.readers.protocol import file_name
from fsdpckpt.text import is_or_are, numbers_text, plural

ZERO = "zero"  # the directory of a universal checkpoint's weights and states, and the file beside them:
OPTIMIZER_STATE = "optimizer_state.pt"
MAX_NAMES = 6
_MODEL = "mp_rank_00_model_states.pt"
_MODEL_OF_RANK = f"zero_pp_rank_0_{_MODEL}"
_IN_THE_CODE = "how to join the tensors of these files is defined in the model's code, not in the files"
IN_ITS_JOB = (
    "load it in the job that saved it, gather the weights there, and save them with torch.save. Megatron-DeepSpeed "
    "(tools/convert_checkpoint) and GPT-NeoX (tools/ckpts) have scripts for their own models"
)
WITH_ZERO_1 = (
    "load its weights into the same job with ZeRO 1 (load_checkpoint with load_optimizer_states=False), save it, and "
    "convert that: the optimizer then starts anew"
)
ZERO_1_OR_2, ZERO_3 = "with ZeRO 1 or 2", "with ZeRO 3"


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """Where the copies of one expert are. ``layer``: the number of the MoE layer, None in files of old versions."""

    layer: int | None
    expert: int
    path: str


def require_one_save(directory: str, files: Mapping[str, str]) -> None:
    """Raises SourceCorruptError that lists ``files``, names in ``directory`` each with how it was saved, by save, if
    there are several.
    """
    saves: dict[str, list[str]] = {}
    for name, how in files.items():
        saves.setdefault(how, []).append(name)
    if len(saves) > 1:
        raise SourceCorruptError(
            f"{directory} contains the files of {len(saves)} DeepSpeed saves",
            details=[f"saved {how}: {_joined(names)}" for how, names in saves.items()],
            file=directory,
            why="an earlier save left files behind, or not all files of the last one were written or copied",
            next_step="move the files of one save into another directory, or leave them out with "
            f"{flags.ignore_file('GLOB')}",
        )


def _joined(names: Sequence[str]) -> str:
    """All ``names``, those of ranks in one: ``zero_pp_rank_{0..3}_mp_rank_00_optim_states.pt``."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for name in names:
        number = re.search(r"(?<=zero_pp_rank_)\d+", name)
        begin, end = number.span() if number else (0, 0)
        ranks.setdefault((name[:begin], name[end:]), []).append(int(name[begin:end] or 0))
    return ", ".join(
        f"{head}{numbers_text(sorted(numbers)) if head else ''}{tail}" for (head, tail), numbers in ranks.items()
    )


def required_grid(
    path: str,
    optim: Mapping[int, Mapping[int, str]],
    model: Mapping[int, Mapping[int, str]],
    *,
    per_rank: bool,
    world_size: int = 1,
    model_ranks: int = 1,
    whole_module: bool = False,
) -> tuple[int, int]:
    """The numbers of data-parallel and of model-parallel ranks. Raises unless all have their files.

    ``optim``, ``model``: the names of files by model-parallel and data-parallel rank. ``per_rank``: whether each rank
    has module states. ``world_size``, ``model_ranks``: the smallest numbers that the files themselves allow.
    ``whole_module``: whether the file of module states has the whole weights, as the model computed with them.
    """
    used = [*optim.values(), *(model.values() if per_rank else ())]
    ranks = max([world_size - 1, *(rank for names in used for rank in names)]) + 1
    count = max([model_ranks - 1, *optim, *model]) + 1
    optim_name = next((file_name(path) for paths in optim.values() for path in paths.values()), "")
    missing: list[str] = []
    for model_rank in range(count):
        files, modules = optim.get(model_rank, {}), model.get(model_rank, {})
        if optim_name:
            missing += [_numbered(optim_name, rank, model_rank) for rank in range(ranks) if rank not in files]
        if per_rank:
            absent = [rank for rank in range(ranks) if rank not in modules]
            missing += [_numbered(_MODEL_OF_RANK, rank, model_rank) for rank in absent]
        elif not modules:
            missing.append(_numbered(_MODEL, 0, model_rank))
    if missing:
        raise ranks_missing(
            f"{path}: {plural(len(missing), 'file')} of the DeepSpeed checkpoint {is_or_are(len(missing))} missing",
            missing,
            most_shown=MAX_NAMES,
            files=[f"{path.rstrip('/')}/{name}" for name in missing],
            file=f"{path.rstrip('/')}/{missing[0]}",
            alternative=_module_alone(f"{path.rstrip('/')}/{file_name(model[0][0])}") if whole_module else None,
        )
    return ranks, count


def _numbered(name: str, data_rank: int, model_rank: int) -> str:
    """``name``, a file of one rank, as that of another is called."""
    return re.sub(r"mp_rank_\d+", f"mp_rank_{model_rank:02}", re.sub(r"pp_rank_\d+", f"pp_rank_{data_rank}", name))


def unsupported(
    path: str,
    kind: str,
    files: Sequence[str],
    expected: str | None = None,
    found: str | None = None,
    *,
    why: str = _IN_THE_CODE,
    next_step: str = IN_ITS_JOB,
) -> SourceUnsupportedError:
    """The error for a step with ``files`` that belong to a ``kind`` of parallelism."""
    names = [file_name(file) for file in files]
    return SourceUnsupportedError(
        f"{path} is a DeepSpeed checkpoint with files of {kind}, which fsdpckpt does not read",
        details=names[:MAX_NAMES],
        file=f"{path.rstrip('/')}/{names[0]}",
        expected=expected,
        found=found,
        why=why,
        next_step=next_step,
    )


def to_universal(step: str) -> str:
    """The next step for what DeepSpeed's own program joins. Its strict check stops at patterns of frozen weights."""
    program = "python -m deepspeed.checkpoint.ds_to_universal"
    command = f"{program} --input_folder {quote(step)} --output_folder universal --no_strict"
    return to_copy("let DeepSpeed join the ranks' parts, and give the directory that it makes", command)


def _module_alone(file: str) -> str:
    why = "the weights are also in the file of module states, in the dtype that the model computed with"
    return to_copy(why, flags.command("convert", file, "DST", flags.only("model")))
