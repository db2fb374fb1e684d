"""Which files a DeepSpeed checkpoint has to have: those of all ranks, of one save."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, to_copy
from fsdpckpt.text import numbers_text, plural, some_of

ZERO = "zero"  # the directory of a universal checkpoint's weights and states, and the file beside them:
OPTIMIZER_STATE = "optimizer_state.pt"
MAX_NAMES = 6
_MODEL_OF_RANK = "zero_pp_rank_0_mp_rank_00_model_states.pt"
ZERO_1_OR_2, ZERO_3 = "with ZeRO 1 or 2", "with ZeRO 3"


def require_one_save(directory: str, files: Mapping[str, str]) -> None:
    """Raises SourceCorruptError that lists ``files``, names in ``directory`` each with how it was saved, by save, if
    there are several.
    """
    saves: dict[str, list[str]] = {}
    for name, how in files.items():
        saves.setdefault(how, []).append(name)
    if len(saves) > 1:
        raise SourceCorruptError(
            f"{directory} holds the files of {len(saves)} saves of DeepSpeed",
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


def require_all_ranks(
    path: str,
    optim: Mapping[int, str],
    model: Mapping[int, str],
    *,
    per_rank: bool,
    world_size: int = 1,
    whole_module: bool = False,
) -> None:
    """Raises unless every rank 0 .. W - 1 has its files. ``world_size``: the smallest W that the files themselves
    allow. ``whole_module``: whether the file of module states has the whole weights, as the model computed with them.
    """
    ranks = max([world_size - 1, *optim, *(model if per_rank else ())]) + 1
    missing: list[str] = []
    if optim:
        example = next(iter(optim.values()))
        missing += [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", example) for rank in range(ranks) if rank not in optim]
    if per_rank:
        example = next((name for name in model.values() if name.startswith("zero_pp_rank_")), _MODEL_OF_RANK)
        missing += [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", example) for rank in range(ranks) if rank not in model]
    elif not model:
        missing.append("mp_rank_00_model_states.pt")
    if missing:
        raise SourceIncompleteError(
            f"{path}: {plural(len(missing), 'file')} of the DeepSpeed checkpoint "
            f"{'is' if len(missing) == 1 else 'are'} missing: {some_of(missing, MAX_NAMES)}",
            details=missing,
            files=[f"{path.rstrip('/')}/{name}" for name in missing],
            file=f"{path.rstrip('/')}/{missing[0]}",
            why="the save or the copy did not finish, or these ranks wrote to the disks of other machines",
            next_step="copy the files of all ranks into one directory",
            alternative=_module_alone(f"{path.rstrip('/')}/{model[0]}") if whole_module else None,
        )


def _module_alone(file: str) -> str:
    why = "the weights are also in the file of module states, in the dtype that the model computed with"
    return to_copy(why, flags.command("convert", file, "DST", flags.only("model")))
