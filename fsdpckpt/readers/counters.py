"""Recognises numbers in file names that count the parts of one model: ranks, pipeline stages, experts, shards."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fsdpckpt.text import natural

SHARDS = "shards"
RANKS = "ranks"

# The words before a number that say which part of one model a file holds. The first that fits names the kind.
_COUNTERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("experts", re.compile(r"(?:^|[^a-z])(?:experts?|exp|ep|expp)[-_=.]?(?:rank)?[-_=.]?$", re.IGNORECASE)),
    ("pipeline stages", re.compile(r"(?:^|[^a-z])(?:pp|pipe|pipeline|stage)[-_=.]?(?:rank)?[-_=.]?$", re.IGNORECASE)),
    ("tensor-parallel ranks", re.compile(r"(?:^|[^a-z])(?:tp|tensor|mp)[-_=.]?(?:rank)?[-_=.]?$", re.IGNORECASE)),
    ("tensor-parallel ranks or pipeline stages", re.compile(r"(?:^|[^a-z])mp_rank_\d+_(?:\d+_)?$", re.IGNORECASE)),
    (SHARDS, re.compile(r"(?:^|[^a-z])(?:shard|part|partition)[-_=.]?$|-of-$", re.IGNORECASE)),
    (RANKS, re.compile(r"(?:^|[^a-z])(?:rank|dp|cp|node|worker)[-_=.]?(?:rank)?[-_=.]?$", re.IGNORECASE)),
)
_NUMBERS = re.compile(r"\d+")
_OF_A_TOTAL = re.compile(r"^-of-\d+")


def counted_parts(paths: Iterable[str]) -> tuple[str, list[str]] | None:
    """What those of ``paths`` are that differ only in numbers which count parts of one model, and which they are.

    ``model_tp-rank-0-of-2.pt`` and ``model_tp-rank-1-of-2.pt`` are tensor-parallel ranks. None if there are no two.
    """
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(_NUMBERS.sub("#", path), []).append(path)
    for group in alike.values():
        numbers = [_NUMBERS.findall(path) for path in group]
        for position, match in enumerate(_NUMBERS.finditer(group[0])):
            kind = kind_of_number(group[0], match.span())
            if kind is not None and len({each[position] for each in numbers}) > 1:
                return kind, sorted(group, key=natural)
    return None


def kind_of_number(path: str, place: tuple[int, int]) -> str | None:
    """What the number at ``place`` in ``path`` counts; None if the words around it do not say."""
    begin, end = place
    kind = next((kind for kind, word in _COUNTERS if word.search(path[:begin])), None)
    return kind or (SHARDS if _OF_A_TOTAL.match(path[end:]) else None)


_RANK_OF = re.compile(
    r"(?:^|[^a-z])(?P<word>tp|pp|ep|exp|mp)[-_](?:rank[-_])?(?P<number>\d+)[-_]of[-_](?P<total>\d+)", re.IGNORECASE
)
_WORDS = {"tp": "tensor-parallel ranks", "pp": "pipeline stages", "mp": "model-parallel ranks"}


def counted_in_name(path: str) -> tuple[str, int] | None:
    """What the counters in ``path`` count, and how many there are: nanotron writes each weight to a file of its own,
    ``model_weight_pp-rank-0-of-2_tp-rank-1-of-4.safetensors``. The largest counts; None without any.
    """
    found = [(int(match["total"]), match["word"].lower()) for match in _RANK_OF.finditer(path)]
    if not found:
        return None
    total, word = max(found)
    return _WORDS.get(word, "experts"), total
