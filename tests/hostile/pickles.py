"""Hostile pickles: every one has to end in exit code 3, within seconds and a bound on memory, and to run nothing."""

from __future__ import annotations

import struct
import zipfile
from itertools import product
from pathlib import Path

from tests.hostile.opcodes import P2, P4, integer, name, text, tuple_bomb

__all__ = ["ATTACKS", "BOMBS", "GADGETS", "dcp_directory", "torch_file"]

_TOUCH = "touch CANARY"
GADGETS: dict[tuple[str, str], tuple[bytes, ...]] = {
    ("os", "system"): (text(_TOUCH),),
    ("posix", "system"): (text(_TOUCH),),
    ("nt", "system"): (text(_TOUCH),),
    ("os", "popen"): (text(_TOUCH),),
    ("subprocess", "Popen"): (text(_TOUCH), integer(-1), b"N", b"N", b"N", b"N", b"N", b"\x88", b"\x88"),
    ("subprocess", "check_output"): (b"]" + text("touch") + b"a" + text("CANARY") + b"a",),
    ("builtins", "eval"): (text("open('CANARY', 'w')"),),
    ("builtins", "exec"): (text("open('CANARY', 'w')"),),
    ("builtins", "compile"): (text("1"), text("x"), text("eval")),
    ("builtins", "__import__"): (text("os"),),
    ("builtins", "open"): (text("CANARY"), text("w")),
    ("builtins", "getattr"): (name("os", "path"), text("os")),
    ("builtins", "map"): (name("os", "system"), b"]" + text(_TOUCH) + b"a"),
    ("builtins", "type"): (text("T"), b")", b"}"),
    ("builtins", "input"): (),
    ("runpy", "run_path"): (text("CANARY"),),
    ("runpy", "_run_code"): (text("open('CANARY', 'w')"), b"}"),
    ("importlib", "import_module"): (text("antigravity"),),
    ("pty", "spawn"): (text("sh"),),
    ("pdb", "run"): (text("open('CANARY', 'w')"),),
    ("timeit", "timeit"): (text("open('CANARY', 'w')"),),
    ("code", "interact"): (),
    ("pickle", "loads"): (b"C\x01N",),
    ("functools", "partial"): (name("os", "system"), text(_TOUCH)),
    ("operator", "methodcaller"): (text("system"), text(_TOUCH)),
    ("operator", "attrgetter"): (text("system"),),
    ("ctypes", "CDLL"): (text("libc.so.6"),),
    ("socket", "socket"): (),
    ("shutil", "rmtree"): (text("CANARY"),),
    ("webbrowser", "open"): (text("http://localhost/"),),
    ("numpy", "load"): (text("CANARY"),),
    ("numpy.testing._private.utils", "runstring"): (text("open('CANARY', 'w')"), b"}"),
    ("torch", "load"): (text("CANARY"),),
    ("torch", "save"): (b"N", text("CANARY")),
    ("torch.hub", "load"): (text("CANARY"), text("x")),
    ("torch.hub", "_load_local"): (text("CANARY"), text("x")),
    ("torch.serialization", "load"): (text("CANARY"),),
    ("torch.serialization", "os.system"): (text(_TOUCH),),
    ("torch", "serialization.os.system"): (text(_TOUCH),),
    ("torch.storage", "_load_from_bytes"): (b"C\x01N",),
    ("torch._utils", "_import_dotted_name"): (text("os.system"),),
    ("torch._utils", "_rebuild_tensor_v2.__globals__"): (),
    ("torch.jit", "load"): (text("CANARY"),),
    ("torch.package", "PackageImporter"): (text("CANARY"),),
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__"): (),
    ("collections", "OrderedDict.__reduce__"): (),
    ("__main__", "anything"): (),
}


def joined(*parts: bytes) -> bytes:
    return b"".join(parts)


_NAMESPACE = name("argparse", "Namespace")
_METADATA = name("torch.distributed.checkpoint.metadata", "Metadata")
_ORDERED = name("collections", "OrderedDict")

# Uses of names that may be read, in ways in which they may not be used; and opcodes that lie.
ATTACKS: dict[str, bytes] = {
    "EXT1": P2 + b"\x82\x01.",
    "EXT2": P2 + b"\x83\x01\x01.",
    "EXT4": P2 + b"\x84\x01\x00\x00\x00.",
    "PERSID in text": P2 + b"Pos.system\n.",
    "BINPERSID of a name": P2 + name("torch", "FloatStorage") + b"Q.",
    "BINPERSID of another tuple": P2 + b"(" + text("storage") + text("os") + text("0") + text("cpu") + b"K\x01tQ.",
    "BINPERSID of a list": P2 + b"]Q.",
    "a storage with a negative size": joined(
        P2, b"(", text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), integer(-1), b"tQ."
    ),
    "a tensor without arguments": P2 + name("torch._utils", "_rebuild_tensor_v2") + b")R.",
    "a tensor of text": P2 + name("torch._utils", "_rebuild_tensor_v2") + b"(" + text("a") * 6 + b"tR.",
    "a tensor of a type that is called": joined(
        P2,
        name("torch._tensor", "_rebuild_from_type_v2"),
        b"(",
        name("torch._utils", "_rebuild_wrapper_subclass"),
        name("torch", "Tensor"),
        b")",
        b"NtR.",
    ),
    "a storage type that is called": P2 + name("torch", "FloatStorage") + b"K\x05\x85R.",
    "getattr of a module": P2 + name("builtins", "getattr") + name("torch", "Tensor") + text("__globals__") + b"\x86R.",
    "a dtype with a state": P2 + name("torch", "float32") + b"}" + text("module") + text("os") + b"sb.",
    "a class with a state": P2 + _NAMESPACE + b"}" + text("function") + text("os") + b"sb.",
    "a class with slots": P2 + _METADATA + b"N}" + text("__new__") + name("torch", "Size") + b"s\x86b.",
    "a dictionary without its methods": P2 + _ORDERED + b")R}" + text("items") + b"Nsb.",
    "a dictionary of another class": P2 + _ORDERED + b")RN}" + text("__class__") + _NAMESPACE + b"s\x86b.",
    "a list with a state": P2 + b"]}" + text("__class__") + text("x") + b"sb.",
    "bytes that are a number": P2 + name("builtins", "bytes") + integer(0x7FFFFFFF) + b"\x85R.",
    "bytearray that is a number": P2 + name("builtins", "bytearray") + integer(0x7FFFFFFF) + b"\x85R.",
    "a list as a key": P2 + b"}]Ns.",
    "a dict as an item of a set": P4 + b"\x8f(}\x90.",
    "a frozen set of lists": P4 + b"(]\x91.",
    "a protocol that is not yet": b"\x80\xff.",
    "a frame longer than the file": P4 + b"\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "text of 2^63 bytes": P4 + b"\x8d" + struct.pack("<Q", 1 << 63) + b".",
    "bytes of 2^64 - 1 bytes": P4 + b"\x8e" + struct.pack("<Q", (1 << 64) - 1) + b".",
    "an integer of 2 GB": P2 + b"\x8b" + struct.pack("<i", 0x7FFFFFFF) + b".",
    "an integer of negative length": P2 + b"\x8b" + struct.pack("<i", -1) + b".",
    "an integer of 5000 digits": P2 + b"}" + text("a") + b"\x8b" + struct.pack("<i", 3000) + b"\x7f" * 3000 + b"s.",
    "an integer of 100,000 digits": P2 + b"L" + b"9" * 100_000 + b"L\n.",
    "a memo number of 2^31": P2 + b"]r\xff\xff\xff\x7f.",
    "a memo number of 2^32 - 1": P2 + b"]r\xff\xff\xff\xff.",
    "a memo number in text": P2 + b"]p4294967296\n.",
    "a reference to nothing": P2 + b"h\x63.",
    "no STOP": P2 + b"}",
    "nothing on the stack": P2 + b".",
    "nothing but a mark": P2 + b"(.",
    "an unknown opcode": P2 + b"\xff.",
    "a buffer out of band": b"\x80\x05\x97.",
}


def _copies_of_a_state(count: int) -> bytes:
    """A state of many attributes, set on many objects."""
    state = b"}q\x00(" + b"".join(text(f"k{n}") + b"N" for n in range(count)) + b"u0"
    return P2 + state + b"](" + (_ORDERED + b")Rh\x00b") * count + b"e."


def _copies_by_calls(count: int) -> bytes:
    numbers = b"]q\x00(" + b"".join(integer(n) for n in range(count)) + b"e0"
    return P2 + numbers + name("builtins", "set") + b"q\x010" + b"](" + b"h\x01h\x00\x85R" * count + b"e."


def _laughs(opening: bytes, closing: bytes, levels: int) -> bytes:
    """A container that holds one ten times, which holds one ten times, ..."""
    data = b"Nq\x00"
    for level in range(levels):
        data += opening + b"(" + b"h%c" % level * 10 + closing + b"q%c" % (level + 1)
    return data


_DICTS = b"Nq\x00" + b"".join(
    b"}(" + b"".join(text(f"x{n}") + b"h%c" % level for n in range(10)) + b"uq%c" % (level + 1) for level in range(40)
)
_REDUCED = b"Nq\x00" + b"".join(
    name("torch", "device") + b"h%ch%c\x86Rq%c" % (level, level, level + 1) for level in range(60)
)


# -1 and -2, which are in the memo, have one hash, and so have all tuples of so many of them.
_ONE_HASH = [b"(" + b"".join(each) + b"t" for each in product((b"h\x00", b"h\x01"), repeat=15)]
_MEMO = integer(-1) + b"q\x000" + integer(-2) + b"q\x010"

# Small files that would fill the memory or go on for ever.
BOMBS: dict[str, bytes] = {
    "a key of 2^60 items": P2 + b"}" + tuple_bomb(60) + b"Ns.",
    "a member of a set of 2^60 items": P4 + b"\x8f(" + tuple_bomb(60) + b"\x90.",
    "a member of a frozen set of 2^60 items": P4 + b"(" + tuple_bomb(60) + b"\x91.",
    "a tuple of 2^60 items": P2 + tuple_bomb(60) + b".",
    "a size of 2^60 items": P2 + name("torch", "Size") + tuple_bomb(60) + b"\x85R.",
    "an attribute of 2^60 items": P2 + _NAMESPACE + b")\x81}" + text("a") + tuple_bomb(60) + b"sb.",
    "a storage's name of 2^60 items": P2 + tuple_bomb(60) + b"Q.",
    "a key a million tuples deep": P2 + b"}N" + b"\x85" * 1_000_000 + b"Ns.",
    "a key 100,000 tuples deep with marks": P2 + b"}" + b"(" * 100_000 + b"t" * 100_000 + b"Ns.",
    "a tuple a million deep": P2 + b"N" + b"\x85" * 1_000_000 + b".",
    "a list 100,000 deep": P2 + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a dict 100,000 deep": P2 + b"}" + b"Nq\x000" + b"K\x01}" * 100_000 + b"s" * 100_000 + b".",
    "an object 100,000 deep": joined(
        P2, _NAMESPACE + b")\x81", b"".join([_NAMESPACE + b")\x81"] * 20_000), b"b" * 20_000, b"."
    ),
    "DUP doubles": P2 + b"}N" + b"2\x86" * 100 + b"Ns.",
    "ten lists of ten lists": P2 + _laughs(b"]", b"e", 40) + b".",
    "ten tuples of ten tuples": P2 + _laughs(b"", b"t", 40) + b".",
    "ten dicts of ten dicts": P2 + _DICTS + b".",
    "calls of calls": P2 + _REDUCED + b".",
    "lists and tuples in turn": joined(
        P2, b"Nq\x00", b"".join(b"](h%ch%ceh%c\x86q%c" % (n, n, n, n + 1) for n in range(90)), b"."
    ),
    "a list in itself": P2 + b"]q\x00h\x00a.",
    "a dict in itself": P2 + b"}q\x00" + text("a") + b"h\x00s.",
    "an object in itself": P2 + _NAMESPACE + b")\x81q\x00}" + text("a") + b"h\x00sb.",
    "sets of 224 bytes an opcode": P4 + b"(" + b"\x8f" * 1_500_000 + b"t.",
    "lists of 64 bytes an opcode": P4 + b"(" + b"]" * 9_000_000 + b"t.",
    "32,768 keys of one hash": P2 + _MEMO + b"}(" + b"N".join(_ONE_HASH) + b"Nu.",
    "32,768 keys of one hash, set one by one": P2 + _MEMO + b"}" + b"".join(key + b"Ns" for key in _ONE_HASH) + b".",
    "a set of 32,768 of one hash": P4 + _MEMO + b"\x8f(" + b"".join(_ONE_HASH) + b"\x90.",
    "a set made of 32,768 of one hash": joined(
        P2, _MEMO, name("builtins", "set"), b"](" + b"".join(_ONE_HASH) + b"e\x85R."
    ),
    "a frozen set of 32,768 of one hash": P4 + _MEMO + b"(" + b"".join(_ONE_HASH) + b"\x91.",
    "an ordered dict of 32,768 of one hash": P2 + _MEMO + _ORDERED + b")R(" + b"N".join(_ONE_HASH) + b"Nu.",
    "a state copied 100,000 times": _copies_of_a_state(30_000),
    "a list copied 100,000 times": _copies_by_calls(100_000),
    "a large key hashed 100,000 times": joined(
        P2, b"}q\x00(", b"N" * 200_000, b"tq\x01", b"Ns", b"h\x01Ns" * 100_000, b"."
    ),
    "a large size used 100,000 times": joined(
        P2, b"(", b"K\x01" * 100_000, b"tq\x000](", (name("torch", "Size") + b"h\x00\x85R") * 20_000, b"e."
    ),
}


def torch_file(path: Path, data: bytes) -> Path:
    """A torch file with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/version", "3\n")
        archive.writestr("a/data/0", bytes(64))
    return path


def dcp_directory(path: Path, data: bytes) -> Path:
    """A DCP directory with this metadata."""
    path.mkdir()
    (path / ".metadata").write_bytes(data)
    (path / "__0_0.distcp").write_bytes(b"x")
    return path
