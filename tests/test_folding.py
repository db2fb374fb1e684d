"""Keys that are folded stand for exactly the keys that were given."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest

from fsdpckpt.text import fold, numbers_text, shorten


def expanded(key: str) -> list[str]:
    """The keys that ``key`` stands for, by bash's rules for braces."""
    parts = re.split(r"\{([^}]*)\}", key)
    choices = [numbers(part) if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(words) for words in product(*choices)]


def numbers(text: str) -> list[str]:
    found = []
    for part in text.split(","):
        first, *rest = part.split("..")
        last, step = (*rest, "1")[:2] if rest else (first, "1")
        found += map(str, range(int(first), int(last) + 1, int(step)))
    return found


def folded(keys: list[str]) -> list[tuple[str, int]]:
    return [(one.key, len(one.members)) for one in fold((key, None) for key in keys)]


def test_layers_and_experts_are_one_key_each() -> None:
    keys = [f"layers.{n}.attention.wq.weight" for n in range(126)]
    keys += [f"layers.{n}.experts.{e}.w1" for n in range(4) for e in range(8)]
    assert folded(["embed", *keys, "norm"]) == [
        ("embed", 1),
        ("layers.{0..125}.attention.wq.weight", 126),
        ("layers.{0..3}.experts.{0..7}.w1", 32),
        ("norm", 1),
    ]


def test_gaps_are_written_and_never_filled() -> None:
    keys = [f"layers.{n}.experts.{e}.w1" for n in range(4) for e in range(8) if (n, e) != (1, 3)]
    assert folded(keys) == [("layers.{0,2..3}.experts.{0..7}.w1", 24), ("layers.1.experts.{0..2,4..7}.w1", 7)]
    assert folded([f"layers.{n}.mlp" for n in (0, 1, 2, 5, 9)]) == [("layers.{0..2,5,9}.mlp", 5)]
    assert folded([f"layers.{n}.mlp" for n in range(1, 20, 2)]) == [("layers.{1..19..2}.mlp", 10)]


def test_only_what_agrees_is_folded() -> None:
    rows = fold([("a.0.w", "float32"), ("a.1.w", "bfloat16"), ("a.2.w", "float32"), ("b.0.w", "float32")])
    assert [(one.key, one.members) for one in rows] == [("a.{0,2}.w", (0, 2)), ("a.1.w", (1,)), ("b.0.w", (3,))]


def test_numbers_within_words_and_with_leading_zeros_stay() -> None:
    assert folded(["ff.w1", "ff.w2", "step_010.0", "07.x", "08.x", "a\0b", "..", ""]) == [
        ("ff.w1", 1),
        ("ff.w2", 1),
        ("step_010.0", 1),
        ("07.x", 1),
        ("08.x", 1),
        ("a\0b", 1),
        ("..", 1),
        ("", 1),
    ]


def test_the_extras_of_ranks_are_one_key() -> None:
    assert folded([f"rank{rank}.rng_state.cpu" for rank in range(3)]) == [("rank{0..2}.rng_state.cpu", 3)]


@pytest.mark.parametrize("seed", range(20))
def test_random_keys_come_back_from_what_they_were_folded_into(seed: int) -> None:
    rng = random.Random(seed)
    keys = list({f"l.{rng.randrange(5)}.e.{rng.randrange(4)}.{rng.choice('ab')}.{rng.randrange(3)}" for _ in range(60)})
    rows = fold((key, None) for key in keys)
    assert sorted(at for one in rows for at in one.members) == list(range(len(keys)))
    for one in rows:
        assert sorted(expanded(one.key)) == sorted(keys[at] for at in one.members)


def test_one_number_has_no_braces() -> None:
    assert [numbers_text(each) for each in ((7,), (0, 1), (4, 9))] == ["7", "{0..1}", "{4,9}"]


def test_a_name_loses_its_middle_and_keeps_its_end() -> None:
    key = "model.layers.{0..125}.post_attention_layernorm.weight"
    assert shorten(key, len(key)) == key
    assert shorten(key, 49) == "model.layers.{0..125}.post_atten…layernorm.weight"
    assert shorten(key, 40) == "model.layers.{0..125}.post_…rnorm.weight"
    assert shorten(key, 32) == "model.….{0..125}.post…orm.weight"
    assert shorten("blocks.{0..3}.before.weight", 22) == "blocks.….before.weight"
    for width in range(1, len(key)):
        assert len(shorten(key, width)) <= width
        assert shorten(key, width).endswith("t") or width < 4
