"""The check of a pickle does what the unpickler does, on numbers: it never takes a value for cheaper than it is."""

from __future__ import annotations

import io
import pickle
import random
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from fsdpckpt.errors import FsdpckptError, SourceCorruptError
from fsdpckpt.formats.pickle import load
from fsdpckpt.formats.pickle.check import MAX_DEPTH, OpcodeWalk, check_expansion, check_pickle
from fsdpckpt.formats.torch import read_archive
from fsdpckpt.storage.local import MemoryFile
from tests.fuzz.corpus import seeds
from tests.fuzz.mutations import mutated
from tests.hostile.opcodes import P2, P4, name, text, tuple_bomb


@pytest.mark.parametrize("kind", ["pickle", "dcp-metadata"])
def test_what_pytorch_wrote_passes(kind: str) -> None:
    for data in seeds(kind):
        check_pickle(data, "it.pkl")


def refused(data: bytes) -> str:
    with pytest.raises(SourceCorruptError) as error:
        check_pickle(data, "it.pkl")
    return str(error.value.found)


DEEP = P2 + b")" + b"\x85" * MAX_DEPTH
DAMAGE = {
    **{f"{short!r} without its values": (P2 + short + b"N.", "without one")
       for short in (b"t", b"u", b"R", b"b", b"q\x00", b"\x94", b"0", b"2", b"s", b"a", b"Q", b"d", b"\x90")},
    # of thousands of digits
    **{f"{opcode!r} and a memo number of {digit!r}": (P2 + b"]" + opcode + digit * 5_000 + b"\n.", repr(digit * 20))
       for opcode in (b"g", b"p") for digit in (b"0", b"1")},
    "no opcode": (P2 + b"\xff.", "byte 0xff at 2"),
    "tuples in tuples without a limit": (DEEP + b"\x85.", "deep"),
    "a frame that ends after the pickle": (P4 + b"\x95\x03" + bytes(7) + b"N.", "byte 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_what_no_unpickler_can_read_is_damage(name: str) -> None:
    data, found = DAMAGE[name]
    assert found in refused(data)


def test_what_is_just_not_damage_passes() -> None:
    """Buffers are values; a shared tuple is that of a training script."""
    shared = P2 + b"}q\x00(" + text("a") + b"K\x01K\x02\x86q\x01" + text("b") + b"h\x01" + b"h\x01K\x07u."
    for data in (P4 + b"\x97\x980N.", DEEP + b".", P4 + b"\x95\x02" + bytes(7) + b"N.", shared):
        check_pickle(data, "it.pkl")


class PythonUnpickler(pickle._Unpickler):  # type: ignore[name-defined]  # the one of Python code: it shows its memo
    """The standard library's, which refuses names."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"{module}.{name}")


def items_of(value: object) -> int:
    """What ``check_pickle`` says of a value: one, and the items of a tuple or a frozen set, all references followed."""
    return 1 + sum(map(items_of, value)) if isinstance(value, (tuple, frozenset)) else 1


def test_the_check_remembers_what_the_unpickler_remembers_and_counts_no_fewer_items() -> None:
    generator = random.Random(11)
    opcodes = [bytes([opcode]) for opcode in b"N)]}(tule20as\x8f\x90\x91\x85\x86\x87\x94"]
    opcodes += [b"K\x01", b"M\x01\x02", b"q\x01", b"q\x02", b"r\x03\0\0\0", b"p4\n", b"p0\n", text("a")]
    opcodes += [b"h\x00", b"h\x01", b"h\x02", b"j\x03\0\0\0", b"g4\n", b"(K\x01h\x00t", b"I01\n"]
    loaded = 0
    for _ in range(40_000):
        data = P4 + b"".join(generator.choices(opcodes, k=generator.randint(1, 9))) + b"."
        unpickler = PythonUnpickler(io.BytesIO(data))
        try:
            value = unpickler.load()
        except (LookupError, TypeError, AttributeError, ValueError, pickle.UnpicklingError):
            continue
        loaded += 1
        walk = OpcodeWalk(data, "it.pkl", "holds damage")
        walk.run()
        assert [number for number, cost in enumerate(walk.memo) if cost] == sorted(unpickler.memo), data
        assert walk.stack[-1] & 0xFFFFFFFF >= items_of(value), data
        for number, remembered in unpickler.memo.items():
            assert walk.memo[number] & 0xFFFFFFFF >= items_of(remembered), data
    assert loaded > 2_000


def test_damage_is_refused_or_cheap() -> None:
    generator = random.Random(3)
    chunks = [P2 + tuple_bomb(30) + b".", P4 + b"}N" + b"2\x86" * 60 + b"Ns.", *seeds("plain-pickle")]
    results = {True: 0, False: 0}
    for _ in range(2000):
        try:
            check_pickle(mutated(generator, chunks), "it.pkl")
        except FsdpckptError:
            results[False] += 1
        else:
            results[True] += 1
    assert min(results.values()) > 100


def long1(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def long4(value: int) -> bytes:
    return b"\x8b" + struct.pack("<i", len(long1(value)) - 2) + long1(value)[2:]


@pytest.mark.parametrize("encode", [long1, long4, lambda value: b"L%dL\n" % value, lambda value: b"I%d\n" % value])
@pytest.mark.parametrize("wrapped", [b"", b"\x85", b"\x85\x85"])
def test_integers_of_one_hash_are_few_as_keys_and_any_number_as_values(
    encode: Callable[[int], bytes], wrapped: bytes
) -> None:
    """A dict compares all keys of one hash in pairs: 100,000 of them take minutes."""
    numbers = [encode(k * sys.hash_info.modulus << 64) + wrapped for k in range(1, 1_000)]
    assert len({hash(pickle.loads(P2 + number + b".")) for number in numbers[:9]}) == 1
    assert len(load(P2 + b"](" + b"".join(numbers) + b"e.", file="it.pkl")) == 999
    assert len(load(P2 + b"}(" + b"N".join(numbers[:64]) + b"Nu.", file="it.pkl")) == 64
    for data in (
        P2 + b"}(" + b"N".join(numbers) + b"Nu.",
        P4 + b"\x8f(" + b"".join(numbers) + b"\x90.",
        P2 + b"}" + b"".join(number + b"Ns" for number in numbers) + b".",
        P2 + b"(" + b"N".join(numbers) + b"Nd.",
        P4 + b"(" + b"".join(numbers) + b"\x91.",
        P2 + name("builtins", "set") + b"](" + b"".join(numbers) + b"e\x85R.",
    ):
        with pytest.raises(SourceCorruptError, match="with one hash"):
            load(data, file="it.pkl")
    narrow = [encode(2**64 - k) + wrapped for k in range(1, 5_000)]
    assert len(load(P2 + b"}(" + b"N".join(narrow) + b"Nu.", file="it.pkl")) == 4_999


HONEST_KEYS = [
    {(f"layer.{n}", n): n for n in range(300)},
    {(n % 17, -(n // 17)): n for n in range(300)},  # -1 and -2 have one hash
    {"pairs": {(n, n + 1) for n in range(300)}, "more": {((n,), -n) for n in range(300)}},
    {(n, (n, str(n)), b"x"): [n, {(n,): n}] for n in range(300)},
    [complex(n, -n) for n in range(300)],
    {complex(n % 7, n // 7): n for n in range(300)},
]


@pytest.mark.parametrize("value", HONEST_KEYS)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_many_keys_that_are_tuples_are_read_as_they_are(value: object, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol), file="it.pkl") == value


def test_complex_numbers_of_one_hash_are_few() -> None:
    chosen = [complex(-1_000_003 * n, n) for n in range(1, 200)]
    assert len(set(map(hash, chosen))) == 1
    load(pickle.dumps(dict.fromkeys(chosen[:60]), 2), file="it.pkl")
    with pytest.raises(SourceCorruptError, match="complex numbers with one hash"):
        load(pickle.dumps(dict.fromkeys(chosen), 2), file="it.pkl")


def state(count: int) -> bytes:
    return b"}q\x00(" + b"".join(text(f"k{n}") + b"N" for n in range(count)) + b"u0"


STATE = state(3000)
FILLED = name("collections", "OrderedDict") + b")Rh\x00b"


def test_a_state_that_is_used_again_and_again_is_too_costly() -> None:
    check_pickle(P2 + STATE + b"](" + FILLED * 10 + b"e.", "it.pkl")
    check_pickle(P2 + state(20_000) + b"](" + FILLED * 150 + b"e.", "it.pkl")  # a larger file may hold more
    assert "again and again" in refused(P2 + STATE + b"](" + FILLED * 20_000 + b"e.")


TUPLE = b"(" + b"K\x01" * 3000 + b"tq\x000"


@pytest.mark.parametrize(
    "used",
    [
        b"](" + (name("collections", "OrderedDict") + b"h\x00R") * 2000 + b"e.",  # arguments
        b"}(" + b"h\x00N" * 500 + b"u.",  # keys
    ],
)
def test_a_tuple_that_is_used_again_and_again_is_too_costly(used: bytes) -> None:
    assert "again and again" in refused(P2 + TUPLE + used)


def test_an_object_may_be_part_of_any_number_of_states() -> None:
    """ShardedTensor: every tensor of a model refers to one process group and one sharding specification."""
    shared = name("torch.distributed._shard.sharding_spec", "ChunkShardingSpec") + b")\x81q\x010"
    tensor = name("torch.distributed._shard.sharded_tensor.api", "ShardedTensor") + b")\x81h\x01h\x01\x86b"
    check_pickle(P2 + shared + b"](" + tensor * 20_000 + b"e.", "it.pkl")


# Back references that would keep every walk busy for ever


def test_ten_of_ten_of_ten_and_a_dict_that_holds_itself_are_refused_at_once() -> None:
    value: dict[str, object] = {"a": 1}
    for _ in range(40):
        value = {f"x{n}": value for n in range(10)}
    itself = b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."
    for pickled, words in ((pickle.dumps(value, 2), "never end"), (itself, "contains itself")):
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            archive.writestr("a/data.pkl", pickled)
            archive.writestr("a/version", "3\n")
        with pytest.raises(SourceCorruptError, match=words):
            read_archive(MemoryFile(data.getvalue(), "it.pt"), 0)


def test_a_chain_whose_links_were_all_seen_before_is_too_deep() -> None:
    links: list[object] = [["end"]]
    for _ in range(5000):
        links.append([links[-1]])
    with pytest.raises(SourceCorruptError, match="200 deep"):
        check_expansion(links, "chain.pt")  # type: ignore[arg-type]


def with_attribute(value: object) -> object:
    """PyTorch's ``_metadata`` is one of a state dict."""
    found = OrderedDict(a=1)
    found._metadata = value  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    "around",
    [lambda value: [value], lambda value: {"a": value}, lambda value: {value: 1}, with_attribute],
    ids=["list", "dict", "key", "attribute"],
)
def test_values_are_as_deep_as_what_is_deepest_in_them(around: Callable[[object], Any]) -> None:
    value: tuple[object, ...] = ("end",)
    for _ in range(MAX_DEPTH - 2):
        value = (value,)
    check_expansion(around(value), "deep.pt")
    with pytest.raises(SourceCorruptError, match="200 deep"):
        check_expansion(around((value,)), "deep.pt")


def test_honest_sharing_and_large_lists_pass() -> None:
    shared = {"betas": (0.9, 0.95), "params": list(range(100_000))}
    check_expansion({"a": shared, "b": [shared] * 3, "indices": list(range(3_000_000))}, "honest.pt")  # type: ignore[dict-item]
