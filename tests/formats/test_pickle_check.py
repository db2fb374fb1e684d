"""The quick look at a pickle never passes what the slow one would refuse, and passes what PyTorch writes."""

from __future__ import annotations

import random

import pytest

from fsdpckpt.errors import FsdpckptError, SourceCorruptError
from fsdpckpt.formats.pickle.check import check_pickle, fast_accept
from fsdpckpt.formats.pickle.cost import excessive_cost
from tests.fuzz.corpus import seeds
from tests.fuzz.mutations import mutated
from tests.hostile.opcodes import P2, P4, name, text, tuple_bomb
from tests.hostile.pickles import BOMBS


@pytest.mark.parametrize("kind", ["pickle", "dcp-metadata"])
def test_what_pytorch_wrote_is_neither_refused_nor_too_costly(kind: str) -> None:
    for data in seeds(kind):
        check_pickle(data, "it.pkl")
        assert excessive_cost(data) is None


# Opcodes without operands' texts: what ``fast_accept`` is given.
TAME = b"\x80\x02}q\x00(Sq\x01K\x05K\x03\x86q\x02cq\x03Sq\x04h\x01\x87q\x05Rq\x06h\x06u"


def test_texts_names_and_results_may_be_referred_back_to() -> None:
    assert fast_accept(TAME)
    assert fast_accept(b"\x80\x04\x95" + bytes(8) + b"}\x94(S\x94K\x05\x85\x94h\x01u")


@pytest.mark.parametrize(
    "more",
    [
        b"h\x02",  # a tuple
        b"h\x00",  # a dict
        b"j\x02\x00\x00\x00",
        b")Rq\x07h\x07",  # a container that a call made
        b")q\x07Rq\x08h\x08",
        b"(tRq\x07h\x07",
        b"2",
        b"0",
        b"?",
        b"]\x94",
        b"K\x01q\x07",
    ],
)
def test_whatever_else_is_referred_back_to_is_looked_at_closely(more: bytes) -> None:
    assert not fast_accept(TAME + more)


@pytest.mark.parametrize("deep", [b"\x85" * 30_000, b"S\x86" * 30_000, b"}(SSu\x86" * 30_000])
def test_tuples_nested_more_than_a_stack_bears_are_looked_at_closely(deep: bytes) -> None:
    assert not fast_accept(b"\x80\x02S" + deep)


EVIDENT = b"\x80\x02cq\x00)\x81}(Sq\x01h\x00K\x05K\x03\x86\x85Rq\x02Sq\x03(h\x01Sq\x04h\x02tub"


@pytest.mark.parametrize("put", [b"q\x05", b"r\x05\x00\x00\x00"])
@pytest.mark.parametrize("made", [b"K\x01K\x02\x86", b"(K\x01K\x02K\x03K\x04t", b"]", b"}", b")R"])
def test_a_container_in_a_pickle_without_any_other_may_be_stored_but_not_referred_to(made: bytes, put: bytes) -> None:
    assert fast_accept(EVIDENT)
    assert fast_accept(EVIDENT + made + put)
    assert not fast_accept(EVIDENT + made + put + b"h\x05")
    assert not fast_accept(EVIDENT + made + put + b"j\x05\x00\x00\x00")
    assert fast_accept(EVIDENT + made + put + b"j\x05\x01\x00\x00")


@pytest.mark.parametrize("numbers", [b"q\x01", b"r\x01\x00\x00\x00"])
def test_a_pickle_that_both_counts_and_numbers_what_it_memoises_is_looked_at_closely(numbers: bytes) -> None:
    assert fast_accept(b"\x80\x04S\x94Sh\x01")
    assert not fast_accept(b"\x80\x04S\x94S" + numbers + b"h\x01")
    assert not fast_accept(b"\x80\x02Sq\x00S\x94h\x00")


def test_the_quick_look_says_what_a_slow_one_says_of_opcodes_in_any_order() -> None:
    generator = random.Random(11)
    one = [bytes([opcode]) for opcode in b"ScNR)]}(tbuQ20?\x81\x85\x86\x87\x94"]
    more = [b")R", b"K\x01", b"M\x01\x02", b"q\x01", b"q\x02", b"r\x03\0\0\0", b"h\x00", b"h\x01", b"h\x02"]
    chunks = [*one, *more, b"j\x03\0\0\0", b"Sq\x01", b"h\x03R", b"(K\x01h\x02t"]
    counts = {True: 0, False: 0}
    for _ in range(8_000):
        opcodes = b"".join(generator.choices(chunks, k=generator.randint(1, 9)))
        for protocol in (b"\x80\x02", b"\x80\x04"):
            expected = accepted_step_by_step(protocol + opcodes)
            assert fast_accept(protocol + opcodes) == expected, opcodes
            counts[expected] += 1
    assert min(counts.values()) > 500


def accepted_step_by_step(opcodes: bytes) -> bool:
    """``fast_accept`` opcode by opcode, for pickles of few tuples."""
    counted = opcodes[1] >= 4
    sizes = {**dict.fromkeys(b"Kh\x80q", 2), ord("M"): 3, **dict.fromkeys(b"Jjr", 5), **dict.fromkeys(b"G\x95", 9)}
    referred, containers, memoised = set(), set(), 0
    at = 0
    storable = empty_call = False  # whether the last opcode's result may be referred to, or is that of ``)R``
    before = b""
    while at < len(opcodes):
        opcode, operand = opcodes[at : at + 1], opcodes[at + 1 : at + sizes.get(opcodes[at], 1)]
        after = opcodes[at + len(operand) + 1 :]
        if opcode in b"20?" or (opcode == b"(" and after[:1] == b"t"):
            return False
        if opcode in b"qr\x94":
            if (opcode == b"\x94") != counted or before in (b"", b"put", b"("):
                return False
            if before in (b"K", b"M", b"h", b"j", b"\x80") or (before == b")"):
                return False
            if not storable or empty_call:
                containers.add(memoised if counted else int.from_bytes(operand, "little"))
            memoised += 1
            before = b"put"
        else:
            if opcode in b"hj":
                referred.add(int.from_bytes(operand, "little"))
            storable = opcode in b"ScR\x81"
            empty_call = opcode == b"R" and before == b")"
            before = opcode
        at += 1 + len(operand)
    return referred.isdisjoint(containers)


def test_many_tuples_that_are_not_nested_are_accepted_at_once() -> None:
    assert fast_accept(
        b"\x80\x04}\x94(" + b"S\x94S\x94S\x86\x94S\x94(K\x01K\x02K\x03K\x04t\x94\x85\x94R\x94" * 30_000 + b"u"
    )


@pytest.mark.parametrize("title", [title for title, data in BOMBS.items() if len(data) < 2_000_000])
def test_bombs_that_cost_too_much_are_not_accepted_at_once(title: str) -> None:
    if excessive_cost(BOMBS[title]) is not None:
        with pytest.raises(SourceCorruptError):
            check_pickle(BOMBS[title], "it.pkl")


def test_damage_never_makes_the_quick_look_pass_what_the_slow_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    monkeypatch.setattr(
        "fsdpckpt.formats.pickle.check.fast_accept", lambda opcodes: looked.append(fast_accept(opcodes)) or True
    )
    generator = random.Random(3)
    chunks = [P2 + tuple_bomb(30) + b".", P4 + b"}N" + b"2\x86" * 60 + b"Ns.", *seeds("plain-pickle")]
    costly = 0
    for _ in range(2000):
        data = mutated(generator, chunks)
        try:
            check_pickle(data, "it.pkl")
        except FsdpckptError:
            continue
        if excessive_cost(data) is not None:
            costly += 1
            assert not looked[-1]
    assert costly > 25


def test_a_shared_tuple_of_a_training_script_is_read() -> None:
    shared = P2 + b"}q\x00(" + text("a") + b"K\x01K\x02\x86q\x01" + text("b") + b"h\x01" + b"h\x01K\x07u."
    assert excessive_cost(shared) is None
    check_pickle(shared, "it.pkl")


def test_a_state_that_is_used_again_and_again_is_too_costly() -> None:
    state = b"}q\x00(" + b"".join(text(f"k{n}") + b"N" for n in range(3000)) + b"u0"
    made = name("collections", "OrderedDict") + b")Rh\x00b"
    assert excessive_cost(P2 + state + b"](" + made * 10 + b"e.") is None
    assert excessive_cost(P2 + state + b"](" + made * 20_000 + b"e.") is not None
