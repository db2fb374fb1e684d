"""What is wrong with a Megatron-LM checkpoint, as problems and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnsupportedError, damaged
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import Problem, Section
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.megatron_torch.names import StateDict
from fsdpckpt.readers.megatron_torch.optimizer import MASTERS
from fsdpckpt.readers.megatron_torch.places import BUFFERS_FILE
from fsdpckpt.readers.torch_ranks.rank_files import RankFile
from fsdpckpt.text import shape_text, some_of

MAX_SHOWN = 6
COPY_AGAIN = "copy the checkpoint again"


def no_states(file: RankFile) -> Problem:
    message = (
        f"the optimizer in {file.archive.path} has no states: the distributed optimizer keeps them as Megatron's "
        "buffers (distrib_optim.pt), and only the model's code says which elements belong to which parameter: save "
        "with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable"
    )
    return Problem("flattened", message, file=file.archive.path, section=Section.OPTIM)


def no_places(file: RankFile) -> Problem:
    message = (
        f"cannot tell where each parameter is in Megatron's buffers in {file.archive.path}: its float32 weights do not "
        "round to the model's copies in the order of the model. Save with --ckpt-format torch_dist and "
        "--dist-ckpt-optim-fully-reshardable"
    )
    return Problem("flattened", message, file=file.archive.path, section=Section.OPTIM)


def without_states(directory: str, names: Sequence[str]) -> Problem:
    message = (
        f"no {BUFFERS_FILE} in {directory} has the states of {some_of(names, MAX_SHOWN)}: it was not copied, or the "
        "parameters were frozen"
    )
    return Problem("flattened", message, file=directory, section=Section.OPTIM)


def unknown_order(file: RankFile, *, mastered: bool = True) -> Problem:
    why = f"its float32 weights ({MASTERS}) do not tell them apart"
    if not mastered:
        why = f"it numbers them, and has no float32 weights ({MASTERS}), as of a model in float32, that would name them"
    message = (
        f"cannot tell which parameter each optimizer state in {file.archive.path} belongs to: {why}. What Megatron-LM "
        "saves with --ckpt-format torch_dist has them by name"
    )
    return Problem("parameter-order", message, file=file.archive.path, section=Section.OPTIM)


def not_split_like_weight(
    file: RankFile, name: str, state: str, leaf: StoredTensor, shape: tuple[int, ...]
) -> SourceUnsupportedError:
    return SourceUnsupportedError(
        f"{file.archive.path}: the state {state} of {name} is not split like the weight",
        file=file.archive.path,
        key=name,
        rank=file.rank,
        expected=shape_text(shape),
        found=shape_text(leaf.shape),
        why="the optimizer factors or quantizes its states",
        next_step=f"convert the weights alone with {flags.only('model')}",
    )


def mapping(value: object, file: RankFile, what: str) -> StateDict:
    if not isinstance(value, dict):
        raise damaged(
            file.archive.path,
            f"{what} is {'missing' if value is None else 'no dict'}",
            "a file that Megatron-LM saved",
            f"a {type(value).__name__}",
            why="the file was changed, or a version of Megatron-LM that is not known wrote it",
            next_step=COPY_AGAIN,
        )
    return cast(StateDict, cast("dict[Key, Value]", value))
