"""Words errors for callers of the Python API: there ``--world-size 3`` is ``world_size=3``.

Messages are written with the options of the command line, which shows an error's fields (``cli.errors``). Python shows
``str(error)``, and that is the one place where they are worded anew.
"""

from __future__ import annotations

import re

from fsdpckpt.command_options import DiffOptions, InspectOptions, VerifyOptions
from fsdpckpt.option_fields import Parameter, parameters
from fsdpckpt.option_values import DTYPE, FLAG, INTEGER, NUMBER, PAIRS, PATH, SIZE, TEXTS, TOGGLE
from fsdpckpt.options import ConvertOptions, LaunchOptions

_OPTIONS = {
    one.flag: one
    for record in (ConvertOptions, LaunchOptions, InspectOptions, DiffOptions, VerifyOptions)
    for one in parameters(record)
}
# A command for a terminal stays one. Else an option, and the word behind it, which may be its value.
_MENTION = re.compile(
    r"(?:fsdpckpt (?:inspect|convert|diff|verify|units)|torchrun|curl|pip)\b[^`#\n]*"
    r"|(?P<flag>--[a-z][a-z-]*[a-z])(?: (?P<value>'[^']*'|(?:[^\s,;:()`?]|,(?=\w))*[^\s,;:()`.?]))?(?: \(repeatable\))?"
)


def in_python(text: str) -> str:
    """``text`` with the options of the command line as keywords of the Python API."""
    return _MENTION.sub(_worded, text)


def _worded(mention: re.Match[str]) -> str:
    flag, value = mention["flag"], mention["value"]
    one = _OPTIONS.get(flag) or _OPTIONS.get(f"--{flag.removeprefix('--no-')}") if flag else None
    if one is None:
        return mention[0]
    if one.kind in (FLAG, TOGGLE):
        return f"{one.name}={flag == one.flag}" + mention[0].removeprefix(flag)
    if value is None or not _is_value(one, value):
        return one.name + mention[0].removeprefix(flag)
    return f"{one.name}={_literal(one, value)}"


def _is_value(one: Parameter, word: str) -> bool:
    """Whether ``word`` is a value of the option, and no word of the sentence."""
    kinds = {
        INTEGER: r"\d+",
        NUMBER: r"[\d.]+",
        SIZE: r"\d\S*",
        PATH: r".*[./].*",
        DTYPE: r"[a-z]+\d\w*",
        TEXTS: r"none|\d+|(?:\w+=\d+,?)+",
        PAIRS: ".+=.+",
    }
    known = word in one.choices or word in one.option.completion
    return known or word[0] == "'" or word.isupper() or re.fullmatch(kinds.get(one.kind, "(?!)"), word) is not None


def _literal(one: Parameter, word: str) -> str:
    if one.kind == PAIRS:
        old, _, new = word.partition("=")
        return f"{{{old}: {new}}}" if word.isupper() else f"{{{old!r}: {new!r}}}"
    bare = word[0] == "'" or word.isupper() or (word.isdigit() and one.kind != TEXTS) or one.kind == NUMBER
    return word if bare else f"{word!r}"
