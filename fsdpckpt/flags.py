"""Options in messages: ``--units FILE`` on the command line, ``units=FILE`` in Python.

A message is an f-string: ``f"add {flags.units('FILE')}, or drop {flags.to}"``. An f-string keeps only text, so an
option in it is written as both of its texts, between marks that no other text has: a character that Unicode reserves
for use inside a program, and digits that each process draws, since a name in a checkpoint may have any character.
``Message`` takes that apart again. It is text as the command line shows it; ``in_python`` is for callers of the API.
Errors, problems and notes make Messages of their fields, so whoever writes one need not. A command to copy is the same
for both: ``command`` makes it, or it stands in backticks.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fsdpckpt.credentials import without_credentials

_LOT = os.urandom(8).hex()
_BEGIN, _BETWEEN, _END = (f"{mark}{_LOT}" for mark in "\ufdd0\ufdd1\ufdd2")
_INSIDE = f"((?:(?!{_BEGIN}).)*?)"
_WORDING = re.compile(f"{_BEGIN}{_INSIDE}{_BETWEEN}{_INSIDE}{_END}", re.DOTALL)

# What stands for a value in help and in messages; Python shows all other values as literals.
PLACEHOLDERS = frozenset(
    {
        "DIR",
        "DTYPE",
        "FILE",
        "FLAVOR",
        "GLOB",
        "HOST:PORT",
        "MODULE:CLASS",
        "MODULE:NAME",
        "N",
        "NAME",
        "NAME=N",
        "NAME=SIZE",
    }
    | {"NAME=SIZE,...", "OLD=NEW", "PATH", "PREFIX", "SIZE", "SRC", "TYPE", "VERSION"}
)


@dataclass(frozen=True, slots=True)
class Wording:
    """What the command line and Python each call one thing. An f-string keeps both, ``str`` only the first."""

    command_line: str
    python: str

    def __str__(self) -> str:
        return self.command_line

    def __format__(self, _specification: str) -> str:
        return f"{_BEGIN}{self.command_line}{_BETWEEN}{self.python}{_END}"


@dataclass(frozen=True, slots=True)
class Flag(Wording):
    """An option: ``{flags.units}``. With a value, or a placeholder for one: ``{flags.units('FILE')}``."""

    @property
    def keyword(self) -> str:
        """The name of the keyword in Python."""
        return self.python.partition("=")[0]

    def __call__(self, value: object) -> Wording:
        return Wording(f"{self.command_line} {shlex.quote(str(value))}", f"{self.python}={_literal(value)}")


@dataclass(frozen=True, slots=True)
class Switch(Flag):
    """An option without a value: ``{flags.resume}``, and ``{flags.resume.off}`` for ``--no-resume``."""

    @property
    def off(self) -> Wording:
        return Wording(self.command_line.replace("--", "--no-", 1), f"{self.keyword}=False")


@dataclass(frozen=True, slots=True)
class PairFlag(Flag):
    """An option that takes ``OLD=NEW``, in Python a dict."""

    def __call__(self, value: object) -> Wording:
        old, _, new = str(value).partition("=")
        pair = f"{old}: {new}" if str(value) in PLACEHOLDERS else f"{old!r}: {new!r}"
        return Wording(f"{self.command_line} {shlex.quote(str(value))}", f"{self.python}={{{pair}}}")


@dataclass(frozen=True, slots=True)
class CommandFlag(Flag):
    """An option of the command line alone, which Python calls the same: it speaks of the command."""

    def __call__(self, value: object) -> Wording:
        typed = f"{self.command_line} {shlex.quote(str(value))}"
        return Wording(typed, typed)


def _literal(value: object) -> str:
    if isinstance(value, int | float):
        return str(value)
    text = str(value)  # of an enum's member, its value
    return text if text in PLACEHOLDERS else repr(text)


class Message(str):
    """Text as the command line shows it, without passwords and tokens. ``parts``: the same with its options as values,
    which an f-string keeps.
    """

    parts: tuple[str | Wording, ...]

    def __new__(cls, text: str) -> Message:
        if isinstance(text, Message):
            return cls.of_parts(text.parts)
        return cls.of_parts(_parts(text) if _BEGIN in text else (text,))

    @classmethod
    def of_parts(cls, parts: Iterable[str | Wording]) -> Message:
        """The message of these ``parts``."""
        parts = tuple(map(_shown, parts))
        message = super().__new__(cls, "".join(map(str, parts)))
        message.parts = parts
        return message

    def __format__(self, specification: str) -> str:
        return format("".join(map(format, self.parts)), specification)

    def __reduce__(self) -> tuple[object, ...]:
        return Message.of_parts, (self.parts,)

    def to_json(self) -> object:
        """For another process, which has other marks: the text, or its parts if it has options."""
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return self.parts[0]
        pairs = ([part.command_line, part.python] if isinstance(part, Wording) else part for part in self.parts)
        return {_PARTS: list(pairs)}


def on_command_line(text: str) -> str:
    """``text`` as the command line shows it, without passwords and tokens: quick for one without an option, such as
    most cells of a table.
    """
    return str(Message(text)) if _BEGIN in text else without_credentials(str(text))


def from_json(document: object) -> object:
    """The inverse of ``Message.to_json``; anything else stays as it is."""
    if not isinstance(document, dict) or document.keys() != {_PARTS}:
        return document
    return Message.of_parts(part if isinstance(part, str) else Wording(*part) for part in document[_PARTS])


_PARTS = "parts"


def _shown(part: str | Wording) -> str | Wording:
    if isinstance(part, str):
        return without_credentials(part)
    shown = Wording(without_credentials(part.command_line), without_credentials(part.python))
    return part if shown == part else shown


def _parts(text: str) -> Iterator[str | Wording]:
    begin = 0
    for match in _WORDING.finditer(text):
        if match.start() > begin:
            yield text[begin : match.start()]
        yield Wording(match[1], match[2])
        begin = match.end()
    if begin < len(text):
        yield text[begin:]


def in_python(text: str) -> str:
    """``text`` for a caller of the Python API: with keywords in place of options."""
    return "".join(part.python if isinstance(part, Wording) else part for part in Message(text).parts)


def command(*words: object) -> str:
    """A command to copy into a terminal, wherever it is shown: ``command("diff", path, "DST", "
    "flags.only("optim"))``."""
    quoted = (str(word) if isinstance(word, Wording) else shlex.quote(str(word)) for word in words)
    return " ".join(("fsdpckpt", *quoted))


def of_keyword(keyword: str, *, switch: bool = False) -> Flag:
    """The option of ``keyword``; a new one if no message here needs its name."""
    known = globals().get(keyword)
    if isinstance(known, Flag):
        return known
    return _switch(keyword) if switch else _flag(keyword)


def _flag(keyword: str) -> Flag:
    return Flag(_dashed(keyword), keyword)


def _switch(keyword: str) -> Switch:
    return Switch(_dashed(keyword), f"{keyword}=True")


def _command_flag(flag: str) -> CommandFlag:
    return CommandFlag(flag, flag)


def _dashed(keyword: str) -> str:
    return "--" + keyword.replace("_", "-")


UNNAMED = Flag("", "")

# convert
to = _flag("to")
container = _flag("container")
world_size = _flag("world_size")
mesh = _flag("mesh")
placements = _flag("placements")
like = _flag("like")
tensor = _flag("tensor")
torch_version = _flag("torch_version")
mesh_device = _flag("mesh_device")
key_type = _flag("key_type")
flavor = _flag("flavor")
max_shard_size = _flag("max_shard_size")
only = _flag("only")
include = _flag("include")
exclude = _flag("exclude")
ignore_file = _flag("ignore_file")
clean_names = _switch("clean_names")
strip_prefix = _flag("strip_prefix")
add_prefix = _flag("add_prefix")
rename = PairFlag("--rename", "rename")
map_ = _flag("map")
inverse = _switch("inverse")
map_value = PairFlag("--map-value", "map_value")
dtype = _flag("dtype")
optim_dtype = _flag("optim_dtype")
missing_state = _flag("missing_state")
no_weight_decay = _flag("no_weight_decay")
buffers = _flag("buffers")
units = _flag("units")
unit = _flag("unit")
use_orig_params = _switch("use_orig_params")
strategy = _flag("strategy")
param_dtype = _flag("param_dtype")
shard_size = _flag("shard_size")
reference = _flag("reference")
parameters = _flag("parameters")
dry_run = _switch("dry_run")
verify = _flag("verify")
link = _flag("link")
overwrite = _switch("overwrite")
resume = _switch("resume")
max_memory = _flag("max_memory")
threads = _flag("threads")
staging = _flag("staging")
# convert, with workers
launcher = _flag("launcher")
nproc_per_node = _flag("nproc_per_node")
nnodes = _flag("nnodes")
node_rank = _flag("node_rank")
rdzv_endpoint = _flag("rdzv_endpoint")
device = _flag("device")
backend = _flag("backend")
output_visibility = _flag("output_visibility")
fault_limit = _flag("fault_limit")
# convert, of a run
each = _command_flag("--each")
newer_than = _flag("newer_than")
watch = _command_flag("--watch")
# inspect
keys = _flag("keys")
section = _flag("section")
names_only = _command_flag("--names-only")
all_ = _command_flag("--all")
ranks = _switch("ranks")
stats = _switch("stats")
report = _command_flag("--report")
# diff
rtol = _flag("rtol")
atol = _flag("atol")
strict = _switch("strict")
# verify
for_ = Flag("--for", "flavor")
digests = _switch("digests")
finite = _switch("finite")
junit = _command_flag("--junit")
# units
from_ = _command_flag("--from")
model = _command_flag("--model")
config = _command_flag("--config")
transformers_version = _command_flag("--transformers-version")
wrap = _command_flag("--wrap")
ignore = _command_flag("--ignore")
output = _command_flag("--output")
# every command
json = _command_flag("--json")
quiet = _command_flag("--quiet")
fail_on = _command_flag("--fail-on")
