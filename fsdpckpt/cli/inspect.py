"""``fsdpckpt inspect``: a summary, then one line a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpckpt.cli.boundary import guarded
from fsdpckpt.cli.options import AsJson, Quiet, SectionChoice, Source, Threads, UnitsFile
from fsdpckpt.cli.output import Output
from fsdpckpt.text import count_text, dtypes_text, plural, shape_text, size_text

if TYPE_CHECKING:
    from fsdpckpt.describe import Description, Json
    from fsdpckpt.ir.checkpoint import NamedTensor

__all__ = ["inspect_command"]

EXAMPLES = """\b
Examples:
  fsdpckpt inspect runs/step-1000
  fsdpckpt inspect runs/step-1000 --section optim --keys '*.exp_avg'
  fsdpckpt inspect model.pt --names-only | grep embed
  fsdpckpt inspect runs/step-1000 --ranks --json > layout.json
  fsdpckpt inspect s3://bucket/runs/step-1000 --stats
  fsdpckpt inspect runs/step-1000 --stats --report report.html
"""

HYPER_PARAMETERS_SHOWN = 12
MOST_EXTRAS = 20


def inspect_command(
    source: Source,
    *,
    keys: Annotated[
        list[str] | None, typer.Option("--keys", metavar="GLOB", help="Only keys that match; may be given again.")
    ] = None,
    section: Annotated[
        SectionChoice | None, typer.Option("--section", help="Only this section.", show_default=False)
    ] = None,
    names_only: Annotated[bool, typer.Option("--names-only", help="Only the keys, one a line, for pipes.")] = False,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Who holds which piece: rank, file, byte offset, box.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the data: min, max, mean, std, norm, NaN and Inf of each tensor.")
    ] = False,
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Also draw it, as one self-contained page: who holds what, sizes by module, the optimizer's health.",
            show_default=False,
        ),
    ] = None,
    units: UnitsFile = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Show what a checkpoint holds: every key with section, shape, dtype, bytes and how it is sharded.

    Reads headers and metadata only, unless --stats.
    """
    output = Output(as_json=as_json, quiet=quiet)

    def body() -> int:
        from fsdpckpt.api import inspect

        if report is not None:  # before an hour of --stats, not after it
            from fsdpckpt.report.file import check_report

            check_report(report, source)
        # Without --stats there is nothing to wait for, and a bar costs its import.
        with output.progress() if stats else nullcontext() as progress:
            found = inspect(
                source,
                keys=keys or (),
                section=section.value if section is not None else None,
                ranks=ranks,
                stats=stats,
                units=units,
                threads=threads,
                progress=progress,
            )
        if report is not None:
            from fsdpckpt.report.file import write_report

            nbytes = write_report(found, report)
            output.talk(f"{report}: {size_text(nbytes)}")
        output.document(lambda: found.to_json(ranks=ranks), "inspect")
        if names_only:
            output.data(named.key for named in found.tensors)
            return 0
        output.data(_summary(found))
        _list_tensors(found, output, ranks=ranks)
        if not found.tensors and (keys or section is not None):
            output.talk("no key matches --keys and --section")
        return 0

    return guarded(output, body)


def _summary(found: Description) -> Iterator[str]:
    checkpoint = found.checkpoint
    ranks = plural(checkpoint.world_size, "rank")
    yield f"{checkpoint.source}: {checkpoint.layout}, {checkpoint.container} ({checkpoint.flavor}), {ranks}"
    for line in checkpoint.evidence:
        yield f"  recognised: {line}"
    for section, sums in found.sections.items():
        parts = [plural(sums.tensors, "tensor"), f"{count_text(sums.elements)} elements", size_text(sums.nbytes)]
        if section == "optim":
            parts.insert(0, f"keys: {found.key_type}")
        yield f"{section}: {', '.join(parts)}, {dtypes_text(sums.dtypes)}"
    if checkpoint.optim is not None:
        yield from _groups(checkpoint.optim.param_groups)
    yield from _extras(found)
    for note in checkpoint.notes:
        yield f"note: {note.message}"
    yield from (f"problem: {problem.message}" for problem in checkpoint.problems)
    yield f"problems: {len(checkpoint.problems) or 'none'}"
    yield ""


def _groups(groups: Iterable[dict[object, object]] | object) -> Iterator[str]:
    from fsdpckpt.verify.compare import value_text

    if not isinstance(groups, list):
        yield "param groups: none in this checkpoint"
        return
    yield f"param groups: {len(groups)}"
    for number, group in enumerate(groups):
        params = group.get("params")
        count = len(params) if isinstance(params, (list, tuple)) else 0
        hyper = [f"{key}={value_text(value)}" for key, value in group.items() if key not in ("params", "param_names")]
        shown = ", ".join(hyper[:HYPER_PARAMETERS_SHOWN])
        more = f", and {len(hyper) - HYPER_PARAMETERS_SHOWN} more" if len(hyper) > HYPER_PARAMETERS_SHOWN else ""
        yield f"  {number}: {plural(count, 'parameter')}; {shown}{more}"


def _extras(found: Description) -> Iterator[str]:
    from fsdpckpt.ir.values import walk
    from fsdpckpt.verify.compare import value_text

    extra = found.checkpoint.extra
    leaves = [(".".join(map(str, path)), leaf) for path, leaf in walk(extra)] if extra else []
    if leaves:
        yield f"extra: {plural(len(leaves), 'value')}"
        yield from (f"  {key} = {value_text(leaf)}" for key, leaf in leaves[:MOST_EXTRAS])
        if len(leaves) > MOST_EXTRAS:
            yield f"  and {len(leaves) - MOST_EXTRAS} more: --json lists them all"
    if found.checkpoint.rank_extra:
        yield f"extra of each rank: {plural(len(found.checkpoint.rank_extra), 'rank')}"


def _list_tensors(found: Description, output: Output, *, ranks: bool) -> None:
    headings = ["section", "key", "dtype", "shape", "bytes", "placement"]
    measured = found.stats is not None
    if measured:
        headings += ["min", "max", "mean", "std", "norm", "NaN", "Inf"]
    if ranks:
        headings += ["rank", "box", "file", "offset"]
    right = frozenset({"bytes", "min", "max", "mean", "std", "norm", "NaN", "Inf", "rank", "offset"})
    output.table(headings, _rows(found, ranks=ranks), right=right)


def _rows(found: Description, *, ranks: bool) -> Iterator[list[str]]:
    source = found.checkpoint.source.rstrip("/")
    paths = [_below(file.path, source) for file in found.checkpoint.files]
    for number, named in enumerate(found.tensors):
        tensor = named.tensor
        row = [
            str(named.section),
            named.key,
            tensor.dtype.name,
            shape_text(tensor.shape),
            size_text(tensor.nbytes),
            tensor.placement,
        ]
        if found.stats is not None:
            row += _stats_cells(found.stats[number])
        if not ranks:
            yield row
            continue
        blank = [""] * len(row)
        chunks = list(_chunk_cells(named, paths)) or [["", "", "", ""]]
        for index, cells in enumerate(chunks):
            yield (blank if index else row) + cells


def _below(path: str, source: str) -> str:
    """The path of a file as seen from the source, which the summary names already."""
    return path.removeprefix(source + "/") if path != source else path.rpartition("/")[2]


def _stats_cells(stats: dict[str, Json] | None) -> list[str]:
    if stats is None:
        return ["-"] * 7
    values = [stats[name] for name in ("min", "max", "mean", "std", "norm")]
    numbers = [f"{value:.5g}" if isinstance(value, (int, float)) else "-" for value in values]
    return [*numbers, str(stats["nan"]), str(stats["inf"])]


def _chunk_cells(named: NamedTensor, paths: list[str]) -> Iterator[list[str]]:
    from fsdpckpt.ir.coverage import box_text

    chunks = named.tensor.chunks
    columns = (chunks.rank, chunks.start, chunks.size, chunks.file, chunks.offset)
    for rank, start, size, file, offset in zip(*(column.tolist() for column in columns), strict=True):
        path = paths[file] if 0 <= file < len(paths) else "?"
        yield [str(rank), box_text(start, size), path, str(offset)]
