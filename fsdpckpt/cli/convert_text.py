"""What ``convert`` says of a conversion that was done or planned, in lines for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdpckpt.text import plural, size_text

if TYPE_CHECKING:
    from fsdpckpt.converters.report import Report

__all__ = ["done_lines", "plan_lines"]

MOST_FILES = 20


def _heading(report: Report) -> str:
    ranks = f", {plural(report.world_size, 'rank')}" if report.world_size else ""
    return f"{report.target}: {report.layout}, {report.container}{ranks}"


def _notes(report: Report) -> Iterator[str]:
    return (f"note: {note.message}" for note in report.notes)


def _written(report: Report) -> str:
    return f"{size_text(report.bytes_written)} in {plural(len(report.files), 'file')}"


def _workers(report: Report) -> str:
    threads = plural(report.threads, "thread")
    return f"{threads}, one process" if report.workers == 1 else f"{report.workers} processes, up to {threads} each"


def done_lines(report: Report) -> Iterator[str]:
    yield _heading(report)
    rate = size_text(int(report.bytes_written / report.seconds)) if report.seconds > 0 else "-"
    yield (
        f"  {plural(report.tensors, 'tensor')}, {_written(report)}, "
        f"{report.seconds:.1f} s ({rate}/s), verified: {report.verified}"
    )
    yield from _notes(report)


def _room(report: Report) -> str:
    if report.disk_free is None:
        return ""
    return f", {size_text(report.disk_free)} free" + ("" if report.disk_suffices else ": NOT ENOUGH")


def plan_lines(report: Report) -> Iterator[str]:
    yield f"plan: {report.source} -> {_heading(report)}"
    yield f"  read    {size_text(report.bytes_read)} of tensor data from {plural(report.source_files, 'file')}"
    yield f"  write   {_written(report)}, {plural(report.tensors, 'tensor')}"
    place = f"in {report.staged_in}" if report.staged_in is not None else f"beside {report.target}"
    yield f"  disk    {size_text(report.disk_needed)} needed {place}{_room(report)}"
    yield f"  memory  {size_text(report.peak_memory_planned)} of buffers"
    yield f"  workers {_workers(report)}"
    for file in report.files[:MOST_FILES]:
        yield f"  file    {file.path or report.target}  {size_text(file.nbytes)}"
    if len(report.files) > MOST_FILES:
        yield f"  and {len(report.files) - MOST_FILES} more files: --json lists them all"
    yield from _notes(report)
    yield "nothing was written (--dry-run)"
