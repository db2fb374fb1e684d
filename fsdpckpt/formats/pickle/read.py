"""Read a pickle without executing anything of it: names become inert stand-ins, calls become records.

The C unpickler does the parsing. Everything it could act on is replaced: ``find_class`` never imports, REDUCE and
NEWOBJ make ``ir.values.Object`` records, BUILD, APPENDS and SETITEMS land in those records, extension codes are
refused. Only plain containers, ``collections.OrderedDict``, ``set``, ``complex``, ``bytes`` and ``bytearray`` become
themselves. Names outside ``containers.allowlist`` are collected while the rest is parsed and refused all at once.
"""

from __future__ import annotations

import io
import pickle
from typing import cast

from fsdpckpt.errors import SourceCorruptError, SourceUnsafeError
from fsdpckpt.formats.pickle.check import check_pickle
from fsdpckpt.formats.pickle.stubs import RUN, TensorResolver, finish, resolve
from fsdpckpt.ir.values import Value

__all__ = ["TensorResolver", "buffered", "load"]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> object:
        return resolve(module_name, global_name)

    def persistent_load(self, persistent_id: object) -> object:
        if RUN.tensors is None:
            raise pickle.UnpicklingError("a storage is named where no storages are")
        return RUN.tensors.storage(persistent_id)


# Everything the C unpickler raises on bytes that are no pickle; nothing of the file runs, so no other can come.
_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
    ImportError,
)


def buffered(data: bytes) -> io.BufferedReader:
    """``data`` as the stream the C unpickler reads fastest: it asks a plain BytesIO for every few bytes."""
    return io.BufferedReader(cast(io.RawIOBase, io.BytesIO(data)), 1 << 17)


def load(data: bytes, *, file: str, tensors: TensorResolver | None = None) -> Value:
    """The value that the pickle ``data`` holds, as ir values; ``file`` names it in messages.

    With ``tensors``, storages and rebuild calls of ``torch`` go to that resolver and its results stand in the
    value. Raises SourceUnsafeError naming every name outside the closed set, SourceCorruptError for bytes that
    are not a whole pickle.
    """
    check_pickle(data, file)
    outer = dict(vars(RUN))
    RUN.objects, RUN.names, RUN.dicts, RUN.refused, RUN.tensors = [], [], [], {}, tensors
    RUN.copied, RUN.most_copied = 0, 16 * len(data)
    try:
        value = cast(Value, _Unpickler(buffered(data), encoding="utf-8").load())
        if RUN.refused:
            raise _unsafe(file)
        finish()
    except _DAMAGE as error:
        if not RUN.refused:
            raise SourceCorruptError(
                f"{file} holds a pickle that cannot be read",
                file=file,
                found=f"{type(error).__name__}: {error}",
                why="the file is damaged, or was not written by torch.save",
                next_step="save or copy the checkpoint again",
            ) from None
        raise _unsafe(file) from None
    finally:
        vars(RUN).clear()
        vars(RUN).update(outer)
    return value


def _unsafe(file: str) -> SourceUnsafeError:
    names = sorted(RUN.refused)
    return SourceUnsafeError(
        f"{file} names {len(names)} thing{'s' * (len(names) != 1)} outside the closed set that fsdpckpt reads",
        details=names,
        file=file,
        found=", ".join(names),
        why="a pickle can run code; fsdpckpt reads only types it knows to be data, and runs nothing",
        next_step="save the checkpoint again without these objects (tensors, numbers, text, lists and dicts are fine)",
    )
