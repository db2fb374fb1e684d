"""One conversion: read, transform, lay out, plan, copy, check, commit."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdpckpt.comm.solo import Solo
from fsdpckpt.converters.check import check_output
from fsdpckpt.converters.delivery import deliver
from fsdpckpt.converters.lay_out import dtype_rule, lay_out
from fsdpckpt.converters.manifest import write_manifest
from fsdpckpt.converters.producer_form import adapt_to_form, export_weights
from fsdpckpt.converters.replaceable import require_replaceable
from fsdpckpt.converters.report import PlannedFile, Report
from fsdpckpt.converters.resumption import StagedRun
from fsdpckpt.converters.target_spec import TargetSpec, make_target_spec, writable_flavor
from fsdpckpt.converters.transform import TransformedCheckpoint, transform
from fsdpckpt.converters.without_subject import refuse_without_sections
from fsdpckpt.errors import TargetExistsError, UsageError
from fsdpckpt.execute.budget import MOST_THREADS, Budget, make_budget
from fsdpckpt.execute.executor import execute, is_written
from fsdpckpt.execute.job import Job
from fsdpckpt.garbage import set_aside, without_collection
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import Target
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options import ConvertOptions, VerifyLevel
from fsdpckpt.plan.plan import Plan, make_plan
from fsdpckpt.producers.forms import PLAIN
from fsdpckpt.progress import Progress
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.protocols import is_url
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import clear_leftover, free_bytes
from fsdpckpt.storage.target_checks import check_target

__all__ = ["Prepared", "check_options", "convert", "prepare", "report_of"]

# What people call them, and what torch does.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_SHORT |= {"fp64": "float64", "double": "float64", "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}


def convert(source: str, target: str, options: ConvertOptions, progress: Progress) -> Report:
    """Convert ``source`` to ``target``. DST appears complete or not at all; the source is never written to.

    Raises SourceError (3) for a source that is unreadable or incomplete, NeedsInformationError (4), UsageError (2) and
    TargetError (5). With ``options.dry_run`` everything is planned and nothing written.
    """
    begun = time.monotonic()
    check_options(options)
    if is_url(target):
        return deliver(source, target, options, progress, convert=convert)
    check_target(target, source, overwrite=options.overwrite, resume=options.resume)
    if options.overwrite:
        require_replaceable(target)
    threads = _threads(source) if options.threads is None else options.threads
    budget = make_budget(max_memory=options.max_memory, threads=threads)
    with Sources() as sources:
        prepared = prepare(source, target, options, sources, progress)
        if not options.dry_run:
            with set_aside():
                _write(prepared, target, options, budget, sources, progress)
    return report_of(prepared, target, options, budget, time.monotonic() - begun)


def _threads(source: str) -> int | None:
    """A store answers late and serves many at once, so that threads there wait, not work."""
    return MOST_THREADS if is_url(source) else None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A conversion of which nothing but the copying is left to do."""

    transformed: TransformedCheckpoint
    spec: TargetSpec
    output: Target
    plan: Plan


def prepare(source: str, target: str, options: ConvertOptions, sources: Sources, progress: Progress) -> Prepared:
    """Read ``source``, transform it, lay ``target`` out and plan the copies."""
    progress.begin("read", 0)
    with without_collection():
        opened = open_checkpoint(source, sources=sources, locate=True, only=options.only)
        spec = make_target_spec(target, options, opened.layout)
        refuse_without_sections(opened, options, spec)
        side_files: Mapping[str, Tensor] = {}
        if spec.flavor is not None and spec.form is not None:
            opened, side_files = adapt_to_form(
                opened, spec.flavor, spec.form, world_size=spec.world_size, sources=sources
            )
            options = replace(options, key_type=spec.form.key_type if opened.optim is not None else None)
        transformed = transform(opened, options, spec, sources)
        if spec.form is not None and spec.form.weights:
            transformed = replace(transformed, checkpoint=export_weights(transformed.checkpoint, sources))
        output = lay_out(transformed, spec, options, side_files)
        plan = make_plan(output)
    progress.end()
    return Prepared(transformed, spec, output, plan)


def check_options(options: ConvertOptions) -> None:
    if options.flavor is not None and options.flavor != PLAIN:
        writable_flavor(options.flavor)
    # float8_e8m0fnu has neither sign nor zero: it holds the scales of other tensors, never values.
    known = [name for name, dtype in DTYPES.items() if dtype.floating and dtype.numpy and name != "float8_e8m0fnu"]
    for option, name in (("--dtype", options.dtype), ("--optim-dtype", options.optim_dtype)):
        if name is not None and name not in known:
            meant = _SHORT.get(name, name.removeprefix("torch."))
            raise UsageError(
                f"{option} {name} is no floating dtype",
                expected=", ".join(known),
                found=name,
                next_step=f"{option} {meant if meant in known else 'bfloat16'}",
            )


def _write(
    prepared: Prepared, target: str, options: ConvertOptions, budget: Budget, sources: Sources, progress: Progress
) -> None:
    transformed, spec, output, plan = prepared.transformed, prepared.spec, prepared.output, prepared.plan
    checkpoint = transformed.checkpoint
    if options.resume and not options.overwrite and os.path.lexists(os.path.realpath(target)):
        output.notes.append(_require_written(target, prepared, budget, sources, progress))
        return
    run = StagedRun(
        target, plan, options, directory=spec.directory, files=checkpoint.files, budget=budget, sources=sources
    )
    staging = run.staging
    with run:
        staging.require_space(plan.bytes_written, files=len(plan.files))
        finished = run.recorder.finished
        crcs = execute(
            Solo(),
            Job.of_one(plan, checkpoint.files, checkpoint.checksums, budget, finished),
            sources=sources,
            locate=staging.locate,
            threads=budget.threads,
            progress=progress,
            recorder=run.recorder,
            finished=finished,
        )
        staging.require_files(file.path for file in plan.files)
        if spec.directory:  # before the check, which reads what the manifest adds to it
            write_manifest(staging, output, transformed, spec, crcs=crcs, digests={})
        if options.verify is not VerifyLevel.NONE:
            digests = check_output(
                checkpoint,
                staging.visible,
                units=transformed.units,
                dtypes=dtype_rule(options),
                level=options.verify,
                sources=sources,
                progress=progress,
                max_memory=options.max_memory,
            )
            if spec.directory and digests:
                write_manifest(staging, output, transformed, spec, crcs=crcs, digests=digests)
        sources.require_unchanged()
        if options.overwrite:  # what came there while this ran is nobody's to delete
            require_replaceable(target)
        staging.commit()
    if run.note is not None:  # not earlier: a resumed run's fsdpckpt.json is an undisturbed one's
        output.notes.append(run.note)


def _require_written(target: str, prepared: Prepared, budget: Budget, sources: Sources, progress: Progress) -> Note:
    """An existing DST that ``--resume`` meets has to be what would be written: a finished run's. Nothing is written."""
    spec, checkpoint = prepared.spec, prepared.transformed.checkpoint
    real = os.path.realpath(target)
    complete = (not spec.directory or os.path.isfile(os.path.join(real, MANIFEST))) and is_written(
        Job.of_one(prepared.plan, checkpoint.files, checkpoint.checksums, budget),
        sources=sources,
        locate=lambda path: os.path.join(real, path) if path else real,
        threads=budget.threads,
        progress=progress,
    )
    if not complete:
        raise TargetExistsError(
            f"{target} exists, and is not what this command writes",
            file=target,
            why="--resume goes on with an interrupted run, and leaves what another one made alone",
            next_step="give another DST, or add --overwrite to replace it once the new one is complete",
        )
    clear_leftover(target)
    return Note("resumed", f"{target} was complete already: every byte was compared, nothing was written")


def report_of(
    prepared: Prepared,
    target: str,
    options: ConvertOptions,
    budget: Budget,
    seconds: float,
    *,
    workers: int = 1,
) -> Report:
    """What was done, or with ``options.dry_run`` would be. ``budget``: that of each of the ``workers``."""
    checkpoint, spec, output, plan = prepared.transformed.checkpoint, prepared.spec, prepared.output, prepared.plan
    return Report(
        source=checkpoint.source,
        target=target,
        layout=spec.layout,
        container=spec.container,
        world_size=spec.world_size,
        tensors=sum(1 for _ in checkpoint.tensors()),
        parameters=len(checkpoint.model.params) if checkpoint.model is not None else 0,
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        peak_memory_planned=budget.nbytes,
        threads=budget.threads,
        workers=workers,
        seconds=seconds,
        dry_run=options.dry_run,
        verified="none" if options.dry_run else options.verify,
        notes=(*checkpoint.notes, *output.notes),
        files=tuple(PlannedFile(file.path, file.nbytes) for file in output.files),
        source_files=len(checkpoint.files),
        evidence=tuple(map(str, checkpoint.evidence)),
        disk_free=free_bytes(target) if options.dry_run else None,
    )
