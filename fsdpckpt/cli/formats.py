"""Runs ``fsdpckpt formats``: what can be read and written, and with which versions it was tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from fsdpckpt.cli.output import GAP, Colour, Line, Styled, cut_line, table_lines
from fsdpckpt.producers import PLAIN

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Streams

EXAMPLES = """\b
Examples:
  fsdpckpt formats
  fsdpckpt formats --json

\b
A container is a file format, a flavor the file names and keys of a framework.
A map renames and rearranges parameters: convert --map.
"""


@dataclass(frozen=True, slots=True)
class Format:
    """A container, a flavor or a map. ``writes``: the layouts in which it is written; empty if it is not."""

    kind: str
    name: str
    title: str
    writes: tuple[str, ...]
    tested: str


CONTAINERS = (
    Format(
        "container",
        "torch",
        "torch.save files: one, or one per rank",
        ("full", "sharded", "flattened"),
        "torch 2.1 to 2.14",
    ),
    Format("container", "dcp", "torch.distributed.checkpoint directory", ("full", "sharded"), "torch 2.1 to 2.14"),
    Format("container", "safetensors", "one file, or shards with an index", ("full",), "safetensors 0.8"),
)


def formats_command(output: Streams) -> int:
    """List the containers, flavors and maps: the layouts that are written, and the versions that were tested."""
    formats = list(all_formats())
    output.document(lambda: {"formats": [asdict(each) for each in formats]}, "formats")
    output.data(_table(formats, output.columns))
    return 0


HEADINGS = ("kind", "name", "what it is", "written as", "tested with")
NARROWEST = 28  # columns of what a format is, beside the versions


def _table(formats: Sequence[Format], columns: int | None) -> Iterator[Line]:
    """One row for each. On a narrow terminal without the kind, and then without the versions: the rest must be read."""
    rows = [(each.kind, each.name, each.title, _written(each), each.tested or "-") for each in formats]
    fields = [list(column) for column in zip(HEADINGS, *rows, strict=True)]
    if columns is not None:
        fields = fields[1:]
        others = sum(max(map(len, column)) + GAP for column in (fields[0], *fields[2:]))
        if columns - others < NARROWEST:
            del fields[-1]
            others = sum(max(map(len, column)) + GAP for column in (fields[0], *fields[2:]))
        fields[1] = [cut_line(title, max(columns - others, NARROWEST)) for title in fields[1]]
    heading, *lines = table_lines(list(zip(*fields, strict=True)), right=(), columns=columns)
    yield Styled(heading, Colour.HEADING)
    kind = formats[0].kind
    for each, line in zip(formats, lines, strict=True):
        if columns is not None and each.kind != kind:
            yield ""  # containers, flavors and maps: the names of a kind are values of one option
        kind = each.kind
        yield line
    if columns is not None and len(fields) < len(HEADINGS) - 1:
        yield Styled(cut_line("the versions they were tested with: --json, or a wider terminal", columns), Colour.ASIDE)


def _written(each: Format) -> str:
    return ", ".join(each.writes) or ("-" if each.kind == "map" else "(read only)")


def all_formats() -> Iterator[Format]:
    """Every container, every flavor and every built-in map."""
    from fsdpckpt.maps import map_names, named_map
    from fsdpckpt.producers.recognition import all_flavors  # which imports numpy: not for --help
    from fsdpckpt.readers.registry import foreign_readers

    yield from CONTAINERS
    for foreign in foreign_readers():
        extension = foreign.extension
        yield Format("reader", extension.name, f"a format that {extension.origin} reads", (), extension.origin)
    yield Format("flavor", PLAIN, "no framework: what PyTorch's own calls save", ("full", "sharded", "flattened"), "")
    for flavor in sorted(all_flavors(), key=lambda flavor: (not flavor.forms, flavor.name)):
        layouts = tuple(dict.fromkeys(str(form.layout) for form in flavor.forms))
        yield Format("flavor", flavor.name, flavor.title, layouts, flavor.tested)
    for name in map_names():
        built_in = named_map(name)
        yield Format("map", name, built_in.description, (), built_in.tested)
