"""Extras that repeat a file's rank and the number of ranks: compared with the files, and not carried as values.

They are what the names of the files say. Kept as extras they would go stale on other ranks; a writer states them anew.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.ir.checkpoint import Checkpoint, Problem
from fsdpckpt.ir.values import Key, Value, equal
from fsdpckpt.producers import Form
from fsdpckpt.producers.recognition import flavor_named


def without_rank_facts(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` without the extras that its framework's form calls ``rank_facts``; a problem for each that differs
    from what the files are.
    """
    forms = getattr(flavor_named(checkpoint.flavor), "forms", ())
    names = {name for form in forms for name, _ in form.rank_facts}
    if not names:
        return checkpoint
    form = next(form for form in forms if form.rank_facts)
    problems: list[Problem] = []
    for rank, extra in enumerate(checkpoint.rank_extra or (checkpoint.extra,)):
        for name, expected in rank_facts(form, rank, checkpoint.world_size).items():
            if name in extra and extra[name] != expected:
                message = f"{name!s} of rank {rank} is {extra[name]!r}, and its files say {expected!r}"
                problems.append(Problem("rank-mismatch", message, fatal=False, key=str(name), rank=rank))
    left = checkpoint.with_extras(lambda extra: {key: value for key, value in extra.items() if key not in names})
    if all(equal(each, left.rank_extra[0]) for each in left.rank_extra):
        left = replace(left, rank_extra=())  # the ranks differed in these facts alone
    return left.with_problems(*problems)


def rank_facts(form: Form, rank: int, world_size: int) -> dict[Key, Value]:
    """The facts of ``rank``, as ``form`` states them."""
    values = {"rank": rank, "world_size": world_size}
    return {name: values[fact] for name, fact in form.rank_facts}
