"""What is wrong with shards and the record beside them, in words."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Problem, Section

__all__ = [
    "contradicting_record",
    "different_records",
    "incomplete",
    "misfit",
    "one_name",
    "own_parameters",
    "padded_otherwise",
    "several_records",
    "strange_shards",
    "unnamed_ids",
    "unrecorded_tensors",
    "without_record",
]

_SHOWN = 5
_ONE_SAVE = "give a directory with the files of one save"


def contradicting_record(file: str, key: str) -> SourceCorruptError:
    return SourceCorruptError(
        f"{file}: the record of the shards under {key} contradicts itself",
        file=file,
        key=key,
        expected="names, shapes and lengths that agree",
        why="another version of the library wrote it, or it was changed",
        next_step="save it again, or report it with the version of the library that saved it",
    )


def several_records(file: str, keys: Sequence[str]) -> SourceUnsupportedError:
    return SourceUnsupportedError(
        f"{file} has records of {len(keys)} models",
        details=keys,
        file=file,
        why="which shards belong to which of them is not recorded",
        next_step="save one model a file",
    )


def different_records(details: Sequence[str], file: str) -> SourceCorruptError:
    return SourceCorruptError(
        "the records beside the shards differ between ranks",
        details=details,
        file=file,
        why="files of different runs lie together",
        next_step=_ONE_SAVE,
    )


def incomplete(file: str, key: str, rank: int, *, ranks: int, chunks_of: int, elements: int) -> SourceIncompleteError:
    """``ranks`` files are here, with chunks of ``chunks_of`` elements of the ``elements`` of ``key``."""
    return SourceIncompleteError(
        f"ranks are missing: of {-(-elements // chunks_of)} pieces of {key} or more, {ranks} can be here",
        file=file,
        key=key,
        rank=rank,
        expected=f"{elements} elements",
        found=f"{ranks} pieces of {chunks_of}",
        why="each rank writes its own part, and every part is needed",
        next_step="copy the files of all ranks into one directory and give that directory",
    )


def misfit(file: str, key: str, rank: int, *, expected: str, found: str) -> SourceCorruptError:
    return SourceCorruptError(
        f"{file}: the shard {key} is not what the record beside it says",
        file=file,
        key=key,
        rank=rank,
        expected=expected,
        found=found,
        why="the record and the shards are of different models, or files of another run lie among them",
        next_step=_ONE_SAVE,
    )


def padded_otherwise(file: str, key: str, rank: int, *, expected: int, found: int) -> SourceCorruptError:
    return SourceCorruptError(
        f"{file} does not hold what rank {rank} has of {key}",
        file=file,
        key=key,
        rank=rank,
        expected=f"{expected} elements of padding",
        found=f"{found}",
        why="files were renamed, or copied from another rank or run, or the files of some ranks are missing",
        next_step="give every file the name it was saved as again, and all files of one save",
    )


def strange_shards(file: str, keys: Sequence[str]) -> SourceCorruptError:
    return SourceCorruptError(
        f"{file} has {len(keys)} shards that its own record does not have",
        details=keys[:_SHOWN],
        file=file,
        key=keys[0],
        why="the record is that of another model",
        next_step="save the record and the shards of one model in one file",
    )


def one_name(file: str, names: Sequence[str]) -> SourceCorruptError:
    return SourceCorruptError(
        f"{file} has two tensors of one name",
        details=names[:_SHOWN],
        file=file,
        key=names[0],
        why="the record and the state dict are of different models",
        next_step=_ONE_SAVE,
    )


def own_parameters(file: str, keys: Sequence[str]) -> SourceUnsupportedError:
    return SourceUnsupportedError(
        f"{file}: every rank has its own {keys[0]}" + (f", and {len(keys) - 1} more" if len(keys) > 1 else ""),
        details=keys[:_SHOWN],
        file=file,
        key=keys[0],
        why="its module was wrapped with no_broadcast_optim_state, as the experts of a mixture are",
        next_step="save the experts of each rank under names of their own in the job that trained them",
    )


def unnamed_ids(key: str, reason: str, file: str) -> Problem:
    """A fatal problem of the optimizer at ``key``."""
    return Problem(
        "flattened",
        f"{key}: its ids cannot be named: {reason}. An optimizer made with model.named_parameters() saves the names; "
        "--only model converts the rest",
        file=file,
        key=key,
        section=Section.OPTIM,
    )


def unrecorded_tensors(keys: Sequence[str], file: str) -> Problem:
    """A fatal problem of tensors that are neither recorded parameters nor buffers."""
    return Problem(
        "flattened",
        f"{keys[0]} is no recorded parameter and no buffer, so it may be one rank's shard"
        + (f"; {len(keys) - 1} more are like it" if len(keys) > 1 else "")
        + ": a parameter that shares another's storage is known only where the file shares it too",
        file=file,
        key=keys[0],
        section=Section.MODEL,
    )


def without_record(at: str, keys: Sequence[str], producer: str, call: str, file: str) -> Problem:
    """A fatal problem of shards in the dict ``at`` that nothing describes."""
    return Problem(
        "flattened",
        f"{at} has {len(keys)} shards of {producer}'s FSDP, first {keys[0]}, and no record of what is in them: save "
        f"model.{call} in the same file",
        file=file or None,
        key=keys[0],
    )
