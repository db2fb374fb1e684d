"""One conversion: read, rewrite, lay out, plan, copy, check, commit."""

from __future__ import annotations

import time
from contextlib import ExitStack

from fsdpckpt.containers.collection import set_aside, without_collection
from fsdpckpt.converters.check import check_output
from fsdpckpt.converters.goal import Goal, settle_goal
from fsdpckpt.converters.layout import dtype_rule, lay_out
from fsdpckpt.converters.manifest import write_manifest
from fsdpckpt.converters.options import ConvertOptions, VerifyLevel
from fsdpckpt.converters.report import PlannedFile, Report
from fsdpckpt.errors import UsageError
from fsdpckpt.executor.budget import Budget, make_budget
from fsdpckpt.executor.local import execute
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Note, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.invariants import fatal
from fsdpckpt.ir.targets import Target
from fsdpckpt.planner.copies import make_plan
from fsdpckpt.planner.management import Evidence, decide_managed
from fsdpckpt.planner.plan import Plan
from fsdpckpt.planner.selection import rename, select_keys, select_section, with_own_tensors
from fsdpckpt.progress import Progress
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import Staging, check_target

__all__ = ["convert"]

# What people call them, and what torch does.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_SHORT |= {"fp64": "float64", "double": "float64", "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}


def convert(source: str, target: str, options: ConvertOptions, progress: Progress) -> Report:
    """Convert ``source`` to ``target``. DST appears complete or not at all; the source is never written to.

    Raises SourceError (3) for a source that is unreadable or incomplete, NeedsInformationError (4), UsageError (2) and
    TargetError (5). With ``options.dry_run`` everything is planned and nothing written.
    """
    begun = time.monotonic()
    _check_options(options)
    check_target(target, source, overwrite=options.overwrite)
    budget = make_budget(max_memory=options.max_memory, threads=options.threads)
    with Sources() as sources:
        progress.begin("read", 0)
        with without_collection():
            opened = open_checkpoint(source, sources=sources, locate=True)
            goal = settle_goal(target, options, opened.layout)
            checkpoint = _rewrite(opened, options, goal, sources)
            output = lay_out(checkpoint, goal, options)
            plan = make_plan(output)
        progress.end()
        if not options.dry_run:
            with set_aside():
                _write(checkpoint, goal, output, plan, target, options, budget, sources, progress)
    return _report(checkpoint, goal, output, plan, target, options, budget, time.monotonic() - begun)


def _check_options(options: ConvertOptions) -> None:
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


def _rewrite(checkpoint: Checkpoint, options: ConvertOptions, goal: Goal, sources: Sources) -> Checkpoint:
    """The passes, in the order in which a user thinks of them: what to take, how to name it, how it is sharded."""
    checkpoint = select_section(checkpoint, options.only)
    _refuse(checkpoint)
    checkpoint = select_keys(checkpoint, include=options.include, exclude=options.exclude)
    checkpoint = rename(
        checkpoint, strip_prefix=options.strip_prefix, add_prefix=options.add_prefix, pairs=options.rename
    )
    if options.dtype is not None or options.optim_dtype is not None:
        checkpoint = with_own_tensors(checkpoint)
    if goal.layout is not Layout.SHARDED:
        return checkpoint
    reference = None
    if options.reference is not None:
        model = open_checkpoint(options.reference, sources=sources, locate=False).model
        reference = {name: getattr(leaf, "managed", None) for name, leaf in model.params.items()} if model else {}
    evidence = Evidence(buffers=options.buffers, reference=reference)
    # A cut that a DCP loader does not expect costs nothing; a DTensor where the model has a buffer does not load.
    return decide_managed(checkpoint, evidence, strict=goal.container == "torch")


def _refuse(checkpoint: Checkpoint) -> None:
    """Raises a SourceError that lists every fatal problem of the sections that are taken."""
    extra = checkpoint.extra or checkpoint.rank_extra
    there = {Section.MODEL: checkpoint.model, Section.OPTIM: checkpoint.optim, Section.EXTRA: extra or None}
    present = {None, *(section for section, held in there.items() if held is not None)}
    wrong = [problem for problem in checkpoint.problems if problem.fatal and problem.section in present]
    if wrong:
        raise fatal(wrong, source=checkpoint.source)


def _write(
    checkpoint: Checkpoint,
    goal: Goal,
    output: Target,
    plan: Plan,
    target: str,
    options: ConvertOptions,
    budget: Budget,
    sources: Sources,
    progress: Progress,
) -> None:
    staging = Staging(target, directory=goal.directory, overwrite=options.overwrite)
    if staging.leftover:
        output.notes.append(Note("cleared", f"what an interrupted run had left in {staging.path} was removed"))
    with ExitStack() as undo:
        undo.callback(staging.close)
        undo.callback(staging.discard)
        staging.require_space(plan.bytes_written)
        crcs = execute(
            plan,
            files=checkpoint.files,
            checksums=checkpoint.checksums,
            sources=sources,
            locate=staging.locate,
            budget=budget,
            progress=progress,
        )
        if goal.directory:  # before the check, which reads what the manifest adds to it
            write_manifest(staging, output, checkpoint, goal, crcs=crcs, digests={})
        if options.verify is not VerifyLevel.NONE:
            digests = check_output(
                checkpoint,
                staging.visible,
                dtypes=dtype_rule(options),
                level=options.verify,
                sources=sources,
                progress=progress,
            )
            if goal.directory and digests:
                write_manifest(staging, output, checkpoint, goal, crcs=crcs, digests=digests)
        staging.commit()


def _report(
    checkpoint: Checkpoint,
    goal: Goal,
    output: Target,
    plan: Plan,
    target: str,
    options: ConvertOptions,
    budget: Budget,
    seconds: float,
) -> Report:
    return Report(
        source=checkpoint.source,
        target=target,
        layout=goal.layout,
        container=goal.container,
        world_size=goal.world_size,
        tensors=sum(1 for _ in checkpoint.tensors()),
        parameters=len(checkpoint.model.params) if checkpoint.model is not None else 0,
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        peak_memory_planned=budget.nbytes,
        threads=budget.threads,
        seconds=seconds,
        dry_run=options.dry_run,
        verified="none" if options.dry_run else options.verify,
        notes=(*checkpoint.notes, *output.notes),
        files=tuple(PlannedFile(file.path, file.nbytes) for file in output.files),
        source_files=len(checkpoint.files),
        evidence=checkpoint.evidence,
    )
