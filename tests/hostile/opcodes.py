"""Pickles written by hand, opcode by opcode: what no pickler would write."""

from __future__ import annotations

import struct

__all__ = ["P2", "P4", "call_forms", "integer", "name", "text", "tuple_bomb"]

P2, P4 = b"\x80\x02", b"\x80\x04"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def stack_global(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def call_forms(module: str, attribute: str, *arguments: bytes) -> dict[str, bytes]:
    """Every way in which a pickle can have a name called, each as a whole pickle."""
    given, named = b"".join(arguments), name(module, attribute)
    return {
        "REDUCE": P2 + named + b"(" + given + b"tR.",
        "INST": P2 + b"(" + given + b"i" + named[1:] + b".",
        "OBJ": P2 + b"(" + named + given + b"o.",
        "NEWOBJ": P2 + named + b"(" + given + b"t\x81.",
        "NEWOBJ_EX": P4 + named + b"(" + given + b"t}\x92.",
        "STACK_GLOBAL": P4 + stack_global(module, attribute) + b"(" + given + b"tR.",
        "names from the memo": b"".join(
            (P4, text(module), b"\x940", text(attribute), b"\x940h\x00h\x01\x93(", given, b"tR.")
        ),
        "BUILD": P2 + named + b"(" + given + b"t}" + text("__setstate__") + named + b"sb.",
        "in a dict of a state": P2 + b"}" + text("model") + b"}" + text("w") + named + b"(" + given + b"tRss.",
        "called twice": P2 + named + b")R(" + given + b"tR.",
    }


def tuple_bomb(levels: int) -> bytes:
    """A tuple that holds one twice, which holds one twice, ...: on the stack, and in the memo as ``levels``."""
    data = b"Nq\x00"
    for level in range(levels):
        data += b"0h%ch%c\x86q%c" % (level, level, level + 1)
    return data
