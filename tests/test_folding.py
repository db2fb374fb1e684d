"""Keys that are folded stand for exactly the keys that were given."""

from __future__ import annotations

import random
import re
import time
from itertools import product

import pytest

from fsdpckpt.cli.output import Name, table_lines
from fsdpckpt.text import SHORTEST_WORD, fold, fold_notes, names_text, numbers_text, shorten


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
    assert [numbers_text(each) for each in ((7,), (0, 1), (4, 9))] == ["7", "{0..1}", "{4,9}"]
    assert folded([f"layers.{n}.mlp" for n in range(1, 20, 2)]) == [("layers.{1..19..2}.mlp", 10)]


def test_only_what_agrees_is_folded() -> None:
    rows = fold([("a.0.w", "float32"), ("a.1.w", "bfloat16"), ("a.2.w", "float32"), ("b.0.w", "float32")])
    assert [(one.key, one.members) for one in rows] == [("a.{0,2}.w", (0, 2)), ("a.1.w", (1,)), ("b.0.w", (3,))]


def test_numbers_within_words_and_with_leading_zeros_stay() -> None:
    keys = ["ff.w1", "ff.w2", "step_010.0", "07.x", "08.x", "a\0b", "..", ""]
    assert folded(keys) == [(key, 1) for key in keys]


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


def test_numbers_of_thousands_of_digits_and_of_other_scripts_are_words() -> None:
    huge = "9" * 5000
    keys = [f"l.{huge}.w", "l.1٢.w", "l.12.w", "l.١٢.w"]
    assert folded(keys) == [(key, 1) for key in keys]
    assert names_text([f"rng_{huge}.pth", "rng_1٢.pth"], 5) == f"rng_{huge}.pth, rng_1٢.pth"


@pytest.mark.parametrize("key", ["x." * 8000 + "weight", "k" * 1_000_000, "ab." * 300_000 + "k" * 100_000])
@pytest.mark.parametrize("width", [8, 30, 70])
def test_a_huge_key_is_cut_at_once(key: str, width: int) -> None:
    started = time.process_time()
    short = shorten(key, width)
    assert time.process_time() - started < 1
    assert len(short) <= width
    assert "…" in short
    assert short[-1] == key[-1]


def test_the_columns_of_a_table_with_huge_keys_are_narrowed_at_once() -> None:
    rows = [[Name("k" * 1_000_000), "float32", Name("p" * 900_000)], [Name("short"), "int8", Name("q")]]
    started = time.process_time()
    lines = table_lines(rows, right=(), columns=80)
    assert time.process_time() - started < 2
    assert [len(line) <= 80 for line in lines] == [True, True]


@pytest.mark.parametrize("seed", range(30))
def test_words_lose_letters_evenly(seed: int) -> None:
    """The same as shortening the longest word, the first of equals, by one letter again and again."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 40))) for _ in range(rng.randrange(2, 7))]
    words[rng.randrange(len(words))] = "{0,7}"
    key = ".".join(words)
    for width in range(len(key)):
        lengths = list(map(len, words))
        while sum(lengths) + len(words) - 1 > width:
            at = max(range(len(words)), key=lambda at: (not words[at].startswith("{"), lengths[at]))
            if lengths[at] <= SHORTEST_WORD or words[at].startswith("{"):
                break
            lengths[at] -= 1
        else:
            assert list(map(len, shorten(key, width).split("."))) == lengths


def test_equal_notes_that_differ_in_a_key_are_one_with_a_count_and_examples() -> None:
    notes = [f"layers.{n}.norm.weight is cast to bfloat16" for n in range(7)]
    assert fold_notes(["the order is that of the model", *notes, "the order is that of the model"]) == [
        "the order is that of the model (2 times)",
        "layers.0.norm.weight is cast to bfloat16 (and 6 more like this: layers.1.norm.weight, layers.2.norm.weight, "
        "layers.3.norm.weight and 3 more)",
    ]


def test_what_differs_in_words_stays_apart_and_keeps_its_order() -> None:
    notes = ["a.b is copied", "a.c is left out", "rank 3 has no file", "rank 4 has no file", "see docs/x.md."]
    assert fold_notes(notes) == [
        "a.b is copied",
        "a.c is left out",
        "rank 3 has no file (and 1 more like this: 4)",
        "see docs/x.md.",
    ]
