"""Runs ``fsdpckpt convert``: any checkpoint in, full, sharded or flattened out."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fsdpckpt.cli.errors import Interruption, error_lines, ignore_signals, show_ended
from fsdpckpt.cli.output import wrapped
from fsdpckpt.errors import (
    FsdpckptError,
    FsdpckptWarning,
    SourceCorruptError,
    SourceIncompleteError,
    TargetUnwritableError,
    to_copy,
)
from fsdpckpt.options import ConvertOptions, EachOptions, Launcher, LaunchOptions
from fsdpckpt.process import process_role
from fsdpckpt.text import duration_text, fold_notes, is_or_are, plural, size_text

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Streams
    from fsdpckpt.converters import PlannedFile, Report
    from fsdpckpt.runs import Attempt

EXAMPLES = """\b
Examples:
  fsdpckpt convert runs/global_step_7/actor titan --flavor torchtitan \\
      --world-size 8
  fsdpckpt convert checkpoint-500 on-6-gpus --world-size 6
  fsdpckpt convert checkpoint-500 hf --flavor huggingface --reference base
  fsdpckpt convert runs/step-1000 full.pt
  fsdpckpt convert full.pt runs/resharded --to sharded --world-size 8
  fsdpckpt convert runs/step-1000 ranks --to sharded --container torch \\
      --world-size 3
  fsdpckpt convert runs/step-1000 ranks --to flattened --world-size 8 \\
      --units units.json
  fsdpckpt convert flat-ranks full.pt --unit 'layers.*' \\
      --reference model.pt --key-type name
  fsdpckpt convert runs/step-1000 weights --container safetensors \\
      --only model --dtype bfloat16
  fsdpckpt convert runs/step-1000 hub --map transformers-mixtral --inverse
  fsdpckpt convert runs/step-1000 full.pt --dry-run
  fsdpckpt convert runs on-6 --each 'checkpoint-*' --world-size 6
  fsdpckpt convert runs/step-1000 full.pt --nproc-per-node 4
  torchrun --nnodes 2 --nproc-per-node 8 ... \\
      -m fsdpckpt convert runs/step-1000 full.pt
"""
LOADS = "load it with: "
MAX_FILES = 20  # lines of a plan
PORT = 29500  # torchrun's default


def convert_command(
    output: Streams, source: str, target: str, options: ConvertOptions, launch: LaunchOptions, each: EachOptions
) -> int:
    """Convert a checkpoint to another layout, container or world size, with its optimizer state.

    SRC is never written to; DST appears complete or not at all.
    """
    local = launch.launcher is Launcher.LOCAL
    if local:
        process_role.worker = False
    _refuse_memory_url(target)
    if each != EachOptions():
        return _convert_each(output, source, target, options, launch, each)
    from fsdpckpt.api import convert

    alone = not local and launch.nproc_per_node is None and launch.nnodes == 1 and not process_role.worker
    with output.progress() as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", FsdpckptWarning)  # they are shown below
        try:
            report = convert(source, target, options, launch=launch, progress=progress)
        except BaseException as error:
            if process_role.lost:  # the launcher tells the other workers to stop: still show what happened
                ignore_signals()
            if isinstance(error, SourceIncompleteError) and alone:
                _suggest_torchrun(error, source)
            elif isinstance(error, SourceCorruptError):
                _suggest_verify(error, source)
            raise
    output.document(report.to_json, "convert")
    for warning in fold_notes(report.warnings):
        output.warning(warning)
    if options.dry_run:
        output.data(_wrapped_lines(plan_lines(report), output.columns))
        if report.disk_free is not None and not report.disk_suffices:
            from fsdpckpt.storage.target_checks import space_error

            lacking = space_error(report.target, report.disk_needed, report.disk_free)
            output.error(error_lines(lacking))
            return lacking.exit_code
    elif not output.quiet:
        output.data(_wrapped_lines(done_lines(report), output.columns))
    return 0


def _convert_each(
    output: Streams, run: str, out: str, options: ConvertOptions, launch: LaunchOptions, each: EachOptions
) -> int:
    """Convert the checkpoints of a run, say of each what came of it, and return the worst exit code."""
    from fsdpckpt.runs import convert_each

    attempts: list[Attempt] = []

    def document() -> dict[str, object]:
        return {"source": run, "target": out, "checkpoints": [attempt.to_json() for attempt in attempts]}

    def convert_all() -> None:
        with output.progress() as progress:
            for attempt in convert_each(run, out, each, options, launch, progress):
                attempts.append(attempt)
                show(attempt)

    warned: set[str] = set()

    def show(attempt: Attempt) -> None:
        if attempt.error is not None:
            output.error(error_lines(attempt.error))
        for warning in fold_notes(attempt.report.warnings if attempt.report is not None else ()):
            if warning not in warned:  # mostly all checkpoints of a run have the same
                output.warning(warning)
            warned.add(warning)
        if not output.quiet:
            output.data([_attempt_text(attempt)])

    try:
        convert_all()
    except (KeyboardInterrupt, Interruption, FsdpckptError) as error:
        if not attempts:
            raise
        # What was done until then is not lost: with --watch nothing but an interruption ends the command.
        return show_ended(output, error, document(), "each")
    failed = sum(attempt.error is not None for attempt in attempts)
    output.document(document, "each")
    if not output.quiet:
        done = f"{len(attempts) - failed} of {plural(len(attempts), 'checkpoint')}"
        planned = "can be converted" if options.dry_run else f"{is_or_are(len(attempts))} in {out}"
        output.data([f"{done} {planned}" + (f", {failed} failed" if failed else "")])
    return max((attempt.exit_code for attempt in attempts), default=0)


def _attempt_text(attempt: Attempt) -> str:
    report = attempt.report
    if report is None:
        return f"{attempt.name}: failed"
    if attempt.was_there:
        return f"{attempt.name}: already complete, compared"
    size = f"{plural(report.tensors, 'tensor')}, {size_text(report.tensor_bytes)}"
    return f"{attempt.name}: {_heading_text(report)}, {size}, {duration_text(report.seconds)}"


def _refuse_memory_url(target: str) -> None:
    if target.startswith("memory://"):
        raise TargetUnwritableError(
            f"{target} is the memory of this program: what is written there is gone when it ends",
            file=target,
            next_step="give a path, or the URL of an object store (s3://, gs://, abfs://)",
        )


def _suggest_torchrun(error: SourceIncompleteError, source: str) -> None:
    """Say how to run this command if the missing files are on the disks of other nodes."""
    if os.path.isfile(source) or error.alternative is not None:  # of one rank: it is not known where the others are
        return
    import socket

    command = ["torchrun", "--nnodes", "NODES", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{socket.gethostname()}:{PORT}", "-m", "fsdpckpt", *sys.argv[1:]]
    why = "if other nodes have the missing files, run this on each of the NODES"
    error.alternative = to_copy(why, shlex.join(command))


def _suggest_verify(error: SourceCorruptError, source: str) -> None:
    """Say how to list all damage: a conversion ends at the first."""
    command = f"fsdpckpt verify {shlex.quote(source)}"
    if error.next_step is None or command not in error.next_step:
        error.alternative = to_copy("to list all damage, run", command)


def _heading_text(report: Report) -> str:
    from fsdpckpt.producers import PLAIN

    ranks = f", {plural(report.world_size, 'rank')}" if report.world_size else ""
    flavor = f" ({report.flavor})" if report.flavor != PLAIN else ""
    return f"{report.target}: {report.layout}, {report.container}{flavor}{ranks}"


def _note_lines(report: Report) -> Iterator[str]:
    """The notes that are no warnings; those that differ only in a key are one line."""
    for message in fold_notes(note.message for note in report.notes if not note.warning):
        yield f"note: {message}"


def _files_written(report: Report) -> int:
    return sum(file.source is None for file in report.files)


def _linked_text(report: Report) -> Iterator[str]:
    """The files that are linked; the notes explain what that means."""
    links = [file for file in report.files if file.source is not None]
    if links:
        kind = {"hardlink": "hard link", "reflink": "reflink"}[report.link]
        yield f"{plural(len(links), kind)} to files of SRC, {size_text(sum(file.nbytes for file in links))} not copied"


def _workers_text(report: Report) -> str:
    threads = plural(report.threads, "thread")
    return f"{threads}, one process" if report.workers == 1 else f"{report.workers} processes, up to {threads} each"


def _wrapped_lines(lines: Iterable[str], columns: int | None) -> Iterator[str]:
    """``lines`` broken between words, but for how to load it, which is copied."""
    for line in lines:
        yield from [line] if line.startswith(LOADS) else wrapped(line, columns)


def done_lines(report: Report) -> Iterator[str]:
    yield _heading_text(report)
    rate = size_text(int(report.bytes_written / report.seconds)) if report.seconds > 0 else "-"
    # The first size is that of the values, as verify gives it: files have headers, too, and some may be links.
    yield f"  {plural(report.tensors, 'tensor')}, {size_text(report.tensor_bytes)}; verified: {report.verified}"
    done = "compared" if report.was_complete else "written"
    yield (
        f"  {plural(_files_written(report), 'file')} {done}, {size_text(report.bytes_written)}, "
        f"{duration_text(report.seconds)} ({rate}/s)"
    )
    for line in _linked_text(report):
        yield f"  {line}"
    if report.replaced:
        yield f"  replaced the checkpoint that was there: {_replaced_text(report)}"
    yield from _note_lines(report)
    if report.loads:
        yield f"{LOADS}{report.loads}"


def _replaced_text(report: Report) -> str:
    at = f" in {os.path.realpath(report.target)}" if os.path.islink(report.target) else ""
    return f"{plural(len(report.replaced), 'file')}{at}, {size_text(sum(file.nbytes for file in report.replaced))}"


def _disk_text(report: Report) -> str:
    if report.disk_free is None:
        return ""
    return f", {size_text(report.disk_free)} free" + ("" if report.disk_suffices else ": NOT ENOUGH")


def _file_lines(label: str, files: Sequence[PlannedFile], target: str) -> Iterator[str]:
    for file in files[:MAX_FILES]:
        same = f"  = {file.source}" if file.source is not None else ""
        yield f"  {label} {file.path or target}  {size_text(file.nbytes)}{same}"
    if len(files) > MAX_FILES:
        yield f"  and {len(files) - MAX_FILES} more files: --json lists them all"


def plan_lines(report: Report) -> Iterator[str]:
    yield f"plan: {report.source} -> {_heading_text(report)}"
    yield f"  read    {size_text(report.bytes_read)} of tensor data from {plural(report.source_files, 'file')}"
    written = f"{plural(_files_written(report), 'file')} of {size_text(report.bytes_written)}"
    yield f"  write   {plural(report.tensors, 'tensor')}, {size_text(report.tensor_bytes)}, in {written}"
    for line in _linked_text(report):
        yield f"  link    {line}"
    place = f"in {report.staged_in}" if report.staged_in is not None else f"beside {report.target}"
    if report.streamed:
        yield f"  disk    none needed: sent to {report.target} in parts"
    else:
        yield f"  disk    {size_text(report.disk_needed)} needed {place}{_disk_text(report)}"
    yield f"  memory  {size_text(report.peak_memory_planned)} of buffers"
    yield f"  workers {_workers_text(report)}"
    yield from _file_lines("file   ", report.files, report.target)
    if report.replaced:
        yield f"  replace {_replaced_text(report)}, deleted once the new checkpoint is complete:"
        yield from _file_lines("delete ", report.replaced, report.target)
    yield from _note_lines(report)
    yield "nothing was written (--dry-run)"
