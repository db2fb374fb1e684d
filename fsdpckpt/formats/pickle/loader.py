"""Reads a pickle without executing anything of it: names become inert stubs, calls become records.

The C unpickler does the parsing, or Python's own where keys may have been chosen to collide (``collisions``).
Everything it could act on is replaced: ``find_class`` never imports, and what it returns instead is called, filled and
extended by the unpickler. REDUCE and NEWOBJ make ``ir.values.Object`` records; BUILD, APPENDS and SETITEMS land in
those records, or in a ``StubInstance`` for the classes that DTensor, ShardedTensor and DCP's metadata are made of
(``stubs``); extension codes are refused. Only plain containers, ``collections.OrderedDict``, ``set``, ``complex``,
``bytes`` and ``bytearray`` become themselves. Names outside ``allowlist`` are collected while the rest is parsed and
refused all at once. No class or name can be changed by a pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import cast

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.formats.pickle.allowlist import canonical, unsafe_error
from fsdpckpt.formats.pickle.check import check_pickle
from fsdpckpt.formats.pickle.collisions import FREE_KEYS, CountingUnpickler
from fsdpckpt.formats.pickle.load_state import THREAD, Load, Swallow, TensorResolver
from fsdpckpt.formats.pickle.stubs import stub_for
from fsdpckpt.ir.values import Value

_FREE_COPIES = 1_000_000  # items and bytes that calls may copy or hash in any pickle; this takes no noticeable time


class _Resolving:
    """What both unpicklers make of names and persistent ids."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        module, name = canonical(module_name, global_name)
        stub = THREAD.load.stubs(module, name)
        if stub is None:
            THREAD.load.refused[f"{module}.{name}"] = None
            return Swallow
        return stub

    def persistent_load(self, persistent_id: object) -> object:
        tensors = THREAD.load.tensors
        if tensors is None:
            raise pickle.UnpicklingError("unexpected persistent id")
        return tensors.storage(persistent_id)


class _Unpickler(_Resolving, pickle.Unpickler):
    """The C unpickler."""


class _CountingUnpickler(_Resolving, CountingUnpickler):
    """Python's own unpickler, for a pickle whose keys may have been chosen to have one hash."""


# Everything the C unpickler raises on bytes that are not a pickle; nothing in the file runs, so there are no others.
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


def load(
    data: bytes,
    *,
    file: str,
    tensors: TensorResolver | None = None,
    stubs: Callable[[str, str], object | None] = stub_for,
    what: str = "holds a pickle that cannot be read",
) -> Value:
    """The value in the pickle ``data``, as ir values; ``file`` and ``what``: what messages say of damage.

    With ``tensors``, this resolver handles storages and rebuild calls of ``torch``, and its results are part of the
    value. ``stubs`` returns what stands for an importable name, None for one outside the closed set. Raises
    SourceUnsafeError that lists every such name, SourceCorruptError for bytes that are not a whole pickle.
    """
    chosen_keys = check_pickle(data, file, what)
    unpickler = _CountingUnpickler if chosen_keys > FREE_KEYS else _Unpickler
    outer = THREAD.load
    current = THREAD.load = Load(tensors, stubs, _FREE_COPIES + 16 * len(data))
    # The C unpickler reads a buffered stream fastest: it asks a plain BytesIO for every few bytes.
    stream = io.BufferedReader(cast(io.RawIOBase, io.BytesIO(data)), min(len(data) + 1, 1 << 17))
    try:
        value = cast(Value, unpickler(stream, encoding="utf-8").load())
        if current.refused:
            raise unsafe_error(file, current.refused)
        current.finish()
    except _DAMAGE as error:
        if current.refused:
            raise unsafe_error(file, current.refused) from None
        raise SourceCorruptError(
            f"{file} {what}",
            file=file,
            found=f"{type(error).__name__}: {error}".rstrip(": "),
            why="the file is damaged, truncated or still being written, or PyTorch did not write it",
            next_step="save or copy the checkpoint again",
        ) from None
    finally:
        THREAD.load = outer
    return value
