"""The check of a pickle does what the unpickler does, on numbers: it never takes a value for cheaper than it is."""

from __future__ import annotations

import io
import pickle
import random
import struct
import sys
from collections.abc import Callable

import pytest

from fsdpckpt.errors import FsdpckptError, SourceCorruptError
from fsdpckpt.formats.pickle import load
from fsdpckpt.formats.pickle.check import MAX_DEPTH, OpcodeWalk, check_pickle
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


@pytest.mark.parametrize("opcode", [b"g", b"p"])
def test_a_memo_number_of_thousands_of_digits_is_damage(opcode: bytes) -> None:
    assert refused(P2 + b"]" + opcode + b"1" * 5_000 + b"\n.") == repr(b"1" * 20)
    assert refused(P2 + b"]" + opcode + b"0" * 5_000 + b"\n.") == repr(b"0" * 20)


@pytest.mark.parametrize(
    "short", [b"t", b"u", b"R", b"b", b"q\x00", b"\x94", b"0", b"2", b"s", b"a", b"Q", b"d", b"\x90"]
)
def test_an_opcode_without_the_values_that_it_needs_is_damage(short: bytes) -> None:
    assert "without one" in refused(P2 + short + b"N.")


def test_what_is_no_opcode_is_damage_and_buffers_are_values() -> None:
    assert refused(P2 + b"\xff.") == "byte 0xff at 2"
    check_pickle(P4 + b"\x97\x980N.", "it.pkl")


def test_tuples_in_tuples_have_a_limit() -> None:
    check_pickle(P2 + b")" + b"\x85" * MAX_DEPTH + b".", "it.pkl")
    assert "deep" in refused(P2 + b")" + b"\x85" * (MAX_DEPTH + 1) + b".")


def test_a_frame_that_ends_after_the_pickle_is_damage() -> None:
    frame = b"\x95\x02" + bytes(7)
    check_pickle(P4 + frame + b"N.", "it.pkl")
    assert "byte 2" in refused(P4 + b"\x95\x03" + bytes(7) + b"N.")


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


def test_a_shared_tuple_of_a_training_script_is_read() -> None:
    check_pickle(
        P2 + b"}q\x00(" + text("a") + b"K\x01K\x02\x86q\x01" + text("b") + b"h\x01" + b"h\x01K\x07u.", "it.pkl"
    )


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
