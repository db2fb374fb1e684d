"""Runs ``fsdpckpt inspect``: a summary, then one line per key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from fsdpckpt.options import InspectOptions
from fsdpckpt.text import count_text, dtypes_text, plural, shape_text, size_text

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Output
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


def inspect_command(output: Output, source: str, options: InspectOptions) -> int:
    """Show what a checkpoint holds: every key with section, shape, dtype, bytes and how it is sharded.

    Reads headers and metadata only, unless --stats.
    """
    from fsdpckpt.api import inspect

    if options.report is not None:  # before an hour of --stats, not after it
        from fsdpckpt.report.page import check_report

        check_report(options.report, source)
    # Without --stats there is nothing to wait for, and a bar costs its import.
    with output.progress() if options.stats else nullcontext() as progress:
        description = inspect(
            source,
            keys=options.keys,
            section=options.section,
            ranks=options.ranks,
            stats=options.stats,
            units=options.units,
            threads=options.threads,
            progress=progress,
        )
    if options.report is not None:
        from fsdpckpt.report.page import write_report

        nbytes = write_report(description, options.report)
        output.message(f"{options.report}: {size_text(nbytes)}")
    output.document(lambda: description.to_json(ranks=options.ranks), "inspect")
    if options.names_only:
        output.data(named.key for named in description.tensors)
        return 0
    output.data(_summary(description))
    _list_tensors(description, output, ranks=options.ranks)
    if not description.tensors and (options.keys or options.section is not None):
        output.message("no key matches --keys and --section")
    return 0


def _summary(description: Description) -> Iterator[str]:
    checkpoint = description.checkpoint
    ranks = plural(checkpoint.world_size, "rank")
    yield f"{checkpoint.source}: {checkpoint.layout}, {checkpoint.container} ({checkpoint.flavor}), {ranks}"
    for line in checkpoint.evidence:
        yield f"  recognised: {line}"
    for section, sums in description.sections.items():
        parts = [plural(sums.tensors, "tensor"), f"{count_text(sums.elements)} elements", size_text(sums.nbytes)]
        if section == "optim":
            parts.insert(0, f"keys: {description.key_type}")
        yield f"{section}: {', '.join(parts)}, {dtypes_text(sums.dtypes)}"
    if checkpoint.optim is not None:
        yield from _groups(checkpoint.optim.param_groups)
    yield from _extras(description)
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


def _extras(description: Description) -> Iterator[str]:
    from fsdpckpt.ir.values import walk
    from fsdpckpt.verify.compare import value_text

    extra = description.checkpoint.extra
    leaves = [(".".join(map(str, path)), leaf) for path, leaf in walk(extra)] if extra else []
    if leaves:
        yield f"extra: {plural(len(leaves), 'value')}"
        yield from (f"  {key} = {value_text(leaf)}" for key, leaf in leaves[:MOST_EXTRAS])
        if len(leaves) > MOST_EXTRAS:
            yield f"  and {len(leaves) - MOST_EXTRAS} more: --json lists them all"
    if description.checkpoint.rank_extra:
        yield f"extra of each rank: {plural(len(description.checkpoint.rank_extra), 'rank')}"


def _list_tensors(description: Description, output: Output, *, ranks: bool) -> None:
    headings = ["section", "key", "dtype", "shape", "bytes", "placement"]
    measured = description.stats is not None
    if measured:
        headings += ["min", "max", "mean", "std", "norm", "NaN", "Inf"]
    if ranks:
        headings += ["rank", "box", "file", "offset"]
    right = frozenset({"bytes", "min", "max", "mean", "std", "norm", "NaN", "Inf", "rank", "offset"})
    output.table(headings, _rows(description, ranks=ranks), right=right)


def _rows(description: Description, *, ranks: bool) -> Iterator[list[str]]:
    source = description.checkpoint.source.rstrip("/")
    paths = [_below(file.path, source) for file in description.checkpoint.files]
    for number, named in enumerate(description.tensors):
        tensor = named.tensor
        row = [
            str(named.section),
            named.key,
            tensor.dtype.name,
            shape_text(tensor.shape),
            size_text(tensor.nbytes),
            tensor.placement,
        ]
        if description.stats is not None:
            row += _stats_cells(description.stats[number])
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
