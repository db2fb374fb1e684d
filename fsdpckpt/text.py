"""Formats numbers, values and keys for people: pure functions from data to text.

``fold`` joins dotted keys that differ only in their numbers into one, with braces as in bash:
``layers.{0..125}.wq.weight``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from fsdpckpt.credentials import without_credentials

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


class JsonText(str):
    """JSON, to be printed as it is."""

    __slots__ = ()


def size_text(nbytes: int) -> str:
    """``1536`` -> ``1.5 KiB``; below 1024 whole bytes."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in _UNITS:
        value /= 1024
        if value < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def bytes_text(nbytes: int) -> str:
    """A length that may differ from another by few bytes: ``1,234 bytes``, ``3.6 GiB (3,843,594,918 bytes)``."""
    exact = plural(nbytes, "byte")
    return exact if nbytes < 10_000 else f"{size_text(nbytes)} ({exact})"


def duration_text(seconds: float) -> str:
    """``3.2 s``, ``6 min 36 s``, ``2 h 5 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def remaining_text(seconds: float) -> str:
    """``3 s left``: an estimate has no tenths."""
    return f"{round(max(seconds, 1.0))} s left" if seconds < 59.5 else f"{duration_text(seconds)} left"


def count_text(count: int) -> str:
    """``1234567`` -> ``1,234,567``."""
    return f"{count:,}"


def key_text(key: object) -> str:
    """A key, in quotes if it is empty: nothing could be seen of it."""
    return str(key) or "''"


def printable(text: str) -> str:
    """``text`` on one line, with line breaks and control sequences of the terminal escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char if "\ud800" <= char <= "\udfff" else repr(char)[1:-1]  # lone surrogates are bytes of a file name


def step_text(step: float) -> str:
    """A step of an optimizer with all its digits: ``1,234,567``; ``2.5``."""
    return count_text(int(step)) if step.is_integer() else str(step)


def rate_text(rate: float) -> str:
    """A learning rate with as many digits as one reads: ``0.0003``, not ``0.00029999999999999997``."""
    return f"{rate:.6g}"


_OF_RATES = re.compile(r"(?:^|[._])lrs?(?:\.\d+)*$")  # lr, initial_lr; _last_lr.0, base_lrs.0
_FLOAT = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)")


def setting_text(key: object, text: str) -> str:
    """``text``, which is about the value at ``key``, or about two of them: learning rates as ``rate_text`` has them,
    unless two that differ would look alike.
    """
    if _OF_RATES.search(str(key)) is None:
        return text
    shown = _FLOAT.sub(lambda match: rate_text(float(match[0])), text)
    first, _, second = shown.partition(" vs ")
    return text if first == second else shown


_SINGULAR = {"are": "is", "have": "has", "were": "was", "do": "does"}  # all others get an s


def plural(count: int, word: str, verb: str = "") -> str:
    """``3 tensors``, ``1 tensor``; with the ``verb`` "are" ``3 tensors are``, ``1 tensor is``."""
    if count == 1:
        return f"1 {word} {_SINGULAR.get(verb, f'{verb}s')}" if verb else f"1 {word}"
    words = f"{word[:-1]}ies" if word.endswith("try") else f"{word}s"
    return f"{count_text(count)} {words} {verb}".rstrip()


def is_or_are(count: int) -> str:
    """The verb after ``count`` things that a text names apart from their number: ``2 of 3 files are``."""
    return "is" if count == 1 else "are"


def shape_text(shape: Iterable[int]) -> str:
    """``(3, 4)`` -> ``[3, 4]``, as PyTorch shows shapes."""
    return "[" + ", ".join(map(str, shape)) + "]"


def dtypes_text(dtypes: Mapping[str, int]) -> str:
    """``float32 81, int64 1``; the name alone if there is one dtype."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{name} {count}" for name, count in dtypes.items())


_SCALARS = (str, int, float, complex, bytes, bytearray, type(None))
_MAX_LENGTH = 80  # characters
_MAX_BITS = 1 << 12  # of an int that Python writes as text


def first_lines(keys: Sequence[str], most: int) -> list[str]:
    """The first ``most`` of ``keys``, and a last line that says how many more there are."""
    return [*keys[:most], *([f"... and {len(keys) - most} more"] if len(keys) > most else [])]


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A sort key with numbers in the order of their values: ``step-900`` before ``step-1000``."""
    words = re.split(r"(\d{1,18})", name)
    return [(word.isdecimal(), int(word), word) if word.isdecimal() else (False, 0, word) for word in words]


def some_of(values: Sequence[object], most: int = 4) -> str:
    """The first ``most`` of ``values``, separated by commas, and how many more there are: ``a, b, c, d and 3 more``."""
    return ", ".join(map(str, values[:most])) + (f" and {len(values) - most} more" if len(values) > most else "")


def truncate(value: object) -> str:
    """A scalar, or a short tuple or list of scalars, in at most 80 characters; for any other value its type and length.

    ``repr`` would visit nested values, and a file may nest them so that this takes exponential time.
    """
    if isinstance(value, (tuple, list)) and len(value) <= 8 and all(isinstance(item, _SCALARS) for item in value):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return _cut(opening + ", ".join(map(_scalar, value)) + closing)
    if isinstance(value, _SCALARS):
        return _cut(_scalar(value))
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list, dict, set)) else "")


def _scalar(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "a huge number"
    if isinstance(value, str):
        return repr(without_credentials(value)[:_MAX_LENGTH])  # in this order: half of a password is one
    return repr(value[:_MAX_LENGTH]) if isinstance(value, (bytes, bytearray)) else repr(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 3] + "..."


# A whole segment of a key: rank0 is how the extras of ranks begin. Python makes no number of thousands of digits.
_NUMBER = re.compile(r"(rank)?(0|[1-9]\d{0,17})", re.ASCII)
_Template: TypeAlias = tuple[str | tuple[str], ...]
_Box: TypeAlias = tuple[tuple[int, ...], ...]  # the numbers of each numbered segment


@dataclass(frozen=True, slots=True)
class Folded:
    """``key`` stands for exactly the keys at the positions ``members`` of the folded list."""

    key: str
    members: tuple[int, ...]


def fold(items: Iterable[tuple[str, Hashable]]) -> list[Folded]:
    """Fold items of (dotted key, what must be equal), in the order in which the first of each appears.

    Keys are folded over any number of segments that are numbers. A folded key stands for the product of its numbers: if
    these have gaps that no product describes, there are several folded keys.
    """
    groups: dict[tuple[_Template, Hashable], dict[_Box, list[int]]] = {}
    for at, (key, equal) in enumerate(items):
        template, numbers = _split(key)
        boxes = groups.setdefault((template, equal), {})
        boxes.setdefault(tuple((number,) for number in numbers), []).append(at)
    folded = [
        Folded(_joined(template, box), tuple(members))
        for (template, _), boxes in groups.items()
        for box, members in _merged(boxes).items()
    ]
    return sorted(folded, key=lambda keys: keys.members[0])


def _split(key: str) -> tuple[_Template, tuple[int, ...]]:
    """The segments of ``key``, with the text before the number for those that end in one, and the numbers."""
    words: list[str | tuple[str]] = []
    numbers = []
    for word in key.split("."):
        matched = _NUMBER.fullmatch(word)
        words.append((matched[1] or "",) if matched else word)
        if matched:
            numbers.append(int(matched[2]))
    return tuple(words), tuple(numbers)


def _joined(template: _Template, box: _Box) -> str:
    numbers = iter(box)
    return ".".join(word if isinstance(word, str) else word[0] + numbers_text(next(numbers)) for word in template)


def _merged(boxes: dict[_Box, list[int]]) -> dict[_Box, list[int]]:
    """Join boxes that differ in only one segment, segment by segment, the last one first."""
    for segment in reversed(range(len(next(iter(boxes))))):
        by_rest: dict[_Box, list[_Box]] = {}
        for box in boxes:
            by_rest.setdefault(box[:segment] + box[segment + 1 :], []).append(box)
        merged = {}
        for rest, parts in by_rest.items():
            numbers = tuple(sorted({number for box in parts for number in box[segment]}))
            members = sorted(at for box in parts for at in boxes[box])
            merged[(*rest[:segment], numbers, *rest[segment:])] = members
        boxes = merged
    return boxes


def numbers_text(numbers: Sequence[int]) -> str:
    """Ascending numbers in bash's braces: ``{0..3}``, ``{1..9..2}``, ``{0..3,7}``; a single one without braces."""
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{{{numbers[0]}..{numbers[-1]}..{steps.pop()}}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return braces(["..".join(map(str, run)) for run in runs], always=True)


def braces(words: Sequence[str], *, always: bool = False) -> str:
    """``{a,b}``; a single word unchanged, unless ``always``."""
    return words[0] if len(words) == 1 and not always else f"{{{','.join(words)}}}"


def listed(numbers: Sequence[int]) -> str:
    """Ascending numbers in a sentence: ``0, 2, 3``; more than eight as runs, ``1..1023``."""
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else numbers_text(numbers).strip("{}").replace(",", ", ")


_LAST_NUMBER = re.compile(r"(.*?)(0|[1-9]\d{0,17})(\D*)", re.ASCII)


def names_text(names: Sequence[str], most: int) -> str:
    """``most`` of ``names``, with those of ranks joined: ``scheduler.pt, rng_state_{0..5}.pth and 2 more``."""
    groups: dict[tuple[str, str], list[int | None]] = {}
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        before, number, after = match.groups() if match is not None else (name, None, "")
        groups.setdefault((before, after), []).append(None if number is None else int(number))
    shown: list[tuple[str, int]] = []
    for (before, after), numbers in groups.items():
        known = sorted(number for number in numbers if number is not None)
        shown.append((before + (numbers_text(known) if known else "") + after, len(numbers)))
    more = sum(count for _, count in shown[most:])
    return ", ".join(text for text, _ in shown[:most]) + (f" and {count_text(more)} more" if more else "")


SHORTEST_WORD = 6  # characters of a word that was shortened


def shorten(key: str, width: int) -> str:
    """``key`` in at most ``width`` characters: its longest words lose their middle, ``layers.0.post_at…rm.weight``.

    If that is not enough, words after the first one go too: the end distinguishes keys.
    """
    if len(key) <= width:
        return key
    words = _words(key)
    least = [len(word) if word.startswith("{") else min(len(word), SHORTEST_WORD) for word in words]
    shortest = sum(least) + len(words) - 1
    dropped = 0
    while shortest > width and dropped < len(words) - 2:
        dropped += 1
        shortest += (2 if dropped == 1 else 0) - least[dropped] - 1  # each with its dot
    if shortest > width or len(words) == 1:
        tail = max((3 * width) // 4 - 1, 0)
        return (key[: max(width - tail - 1, 0)] + "…" + key[len(key) - tail :])[:width]
    if dropped:
        words, least = [words[0], "…", *words[1 + dropped :]], [least[0], 1, *least[1 + dropped :]]
    lengths = shrink(list(map(len, words)), least, width - len(words) + 1)
    return ".".join(map(_without_middle, words, lengths))


_DOT_OR_BRACES = re.compile(r"\{[^{}]*\}|\.")


def _words(key: str) -> list[str]:
    """``key`` split at its dots, except those within braces."""
    dots = [match.start() for match in _DOT_OR_BRACES.finditer(key) if match[0] == "."]
    return [key[before + 1 : dot] for before, dot in pairwise([-1, *dots, len(key)])]


def shrink(lengths: Sequence[int], least: Sequence[int], total: int) -> list[int]:
    """``lengths`` cut to the sum ``total``, or as near to it as ``least`` allows: the longest lose most."""

    def at_most(level: int) -> list[int]:
        return [max(min(length, level), bound) for length, bound in zip(lengths, least, strict=True)]

    level = bisect_right(range(max(lengths, default=0)), total, key=lambda level: sum(at_most(level))) - 1
    shrunk, higher = at_most(level), at_most(level + 1)
    rest = max(total - sum(shrunk), 0)
    for at in [at for at, length in enumerate(shrunk) if higher[at] > length][::-1][:rest]:
        shrunk[at] += 1
    return shrunk


def _without_middle(word: str, length: int) -> str:
    if len(word) <= length:
        return word
    head = length // 2
    return f"{word[:head]}…{word[len(word) - (length - head - 1) :]}"


_KEY_IN_TEXT = re.compile(r"[^\s,:;()]*[\w\]*][./_][^\s,;:()]*[^\s,;:().]|\d+")
_EXAMPLES = 3


def fold_notes(messages: Iterable[str]) -> list[str]:
    """``messages`` with one in place of those that differ only in a key, a path or a number: the first, with how many
    more there are, and the first word in which some of them differ.
    """
    alike: dict[str, list[str]] = {}
    for message in messages:
        alike.setdefault(_KEY_IN_TEXT.sub("\0", message), []).append(message)
    folded = []
    for group in alike.values():
        first, *others = dict.fromkeys(group)
        if others:
            examples = some_of([_first_difference(first, other) for other in others], _EXAMPLES)
            folded.append(f"{first} (and {len(group) - 1} more like this: {examples})")
        else:
            folded.append(f"{first} ({len(group)} times)" if len(group) > 1 else first)
    return folded


def _first_difference(first: str, other: str) -> str:
    """The first key, path or number of ``other`` that ``first`` does not have at this place."""
    words = zip(_KEY_IN_TEXT.findall(first), _KEY_IN_TEXT.findall(other), strict=True)
    return str(next(word for expected, word in words if word != expected))


def reused_ranks(ranks: int, world_size: int) -> tuple[str, str]:
    """``("ranks 4 and 5 reuse", "ranks 0 and 1")``: which ranks of ``world_size`` get what others of ``ranks`` have."""
    new = list(range(ranks, world_size))
    old = list(dict.fromkeys(rank % ranks for rank in new))
    return f"{_ranks_text(new)} {'reuses' if len(new) == 1 else 'reuse'}", _ranks_text(old)


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    between = "and" if len(ranks) == 2 else "to"
    return f"ranks {ranks[0]} {between} {ranks[-1]}"
