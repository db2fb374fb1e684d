"""Notes that differ only in a key are one line, with how many there are and some of the keys."""

from __future__ import annotations

from fsdpckpt.text import fold_notes


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
