"""The quick look at a pickle never passes what the slow one would refuse, and passes what PyTorch writes."""

from __future__ import annotations

import random

import pytest

from fsdpckpt.containers.pickle_scan import check_pickle
from fsdpckpt.containers.pickle_tame import is_tame
from fsdpckpt.containers.pickle_weight import weigh
from fsdpckpt.errors import FsdpckptError, SourceCorruptError
from tests.fuzz.corpus import seeds
from tests.fuzz.mutations import mutated
from tests.hostile.opcodes import P2, P4, name, text, tuple_bomb
from tests.hostile.pickles import BOMBS


@pytest.mark.parametrize("kind", ["pickle", "dcp-metadata"])
def test_what_pytorch_wrote_is_neither_refused_nor_too_heavy(kind: str) -> None:
    for data in seeds(kind):
        check_pickle(data, "it.pkl")
        assert weigh(data) is None


# Opcodes without operands' texts: what ``is_tame`` is given.
TAME = b"\x80\x02}q\x00(Sq\x01K\x05K\x03\x86q\x02cq\x03Sq\x04h\x01\x87q\x05Rq\x06h\x06u"


def test_texts_names_and_results_may_be_referred_back_to() -> None:
    assert is_tame(TAME)
    assert is_tame(b"\x80\x04\x95" + bytes(8) + b"}\x94(S\x94K\x05\x85\x94h\x01u")


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
    assert not is_tame(TAME + more)


@pytest.mark.parametrize("deep", [b"\x85" * 30_000, b"S\x86" * 30_000, b"}(SSu\x86" * 30_000])
def test_tuples_nested_more_than_a_stack_bears_are_looked_at_closely(deep: bytes) -> None:
    assert not is_tame(b"\x80\x02S" + deep)


def test_many_tuples_that_are_not_nested_are_tame() -> None:
    assert is_tame(
        b"\x80\x04}\x94(" + b"S\x94S\x94S\x86\x94S\x94(K\x01K\x02K\x03K\x04t\x94\x85\x94R\x94" * 30_000 + b"u"
    )


@pytest.mark.parametrize("title", [title for title, data in BOMBS.items() if len(data) < 2_000_000])
def test_bombs_that_weigh_too_much_are_not_tame(title: str) -> None:
    if weigh(BOMBS[title]) is not None:
        with pytest.raises(SourceCorruptError):
            check_pickle(BOMBS[title], "it.pkl")


def test_damage_never_makes_the_quick_look_pass_what_the_slow_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    monkeypatch.setattr(
        "fsdpckpt.containers.pickle_scan.is_tame", lambda opcodes: looked.append(is_tame(opcodes)) or True
    )
    generator = random.Random(3)
    pieces = [P2 + tuple_bomb(30) + b".", P4 + b"}N" + b"2\x86" * 60 + b"Ns.", *seeds("plain-pickle")]
    heavy = 0
    for _ in range(2000):
        data = mutated(generator, pieces)
        try:
            check_pickle(data, "it.pkl")
        except FsdpckptError:
            continue
        if weigh(data) is not None:
            heavy += 1
            assert not looked[-1]
    assert heavy > 25


def test_a_shared_tuple_of_a_training_script_is_read() -> None:
    shared = P2 + b"}q\x00(" + text("a") + b"K\x01K\x02\x86q\x01" + text("b") + b"h\x01" + b"h\x01K\x07u."
    assert weigh(shared) is None
    check_pickle(shared, "it.pkl")


def test_a_state_that_is_used_again_and_again_is_too_heavy() -> None:
    state = b"}q\x00(" + b"".join(text(f"k{n}") + b"N" for n in range(3000)) + b"u0"
    made = name("collections", "OrderedDict") + b")Rh\x00b"
    assert weigh(P2 + state + b"](" + made * 10 + b"e.") is None
    assert weigh(P2 + state + b"](" + made * 20_000 + b"e.") is not None
