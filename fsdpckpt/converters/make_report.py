"""Makes the report of a conversion that was planned or done."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpckpt.converters.prepare import Prepared
from fsdpckpt.converters.report import PlannedFile, Report, encode_manifest, how_to_load
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.execute.job import Budget
from fsdpckpt.ir import Layout, Section
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.files import require_stored
from fsdpckpt.ir.stored_once import bytes_stored_once
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.staging import free_bytes


def make_report(
    prepared: Prepared,
    target: str,
    *,
    budget: Budget,
    workers: int,
    manifest: bytes,
    notes: Sequence[Note],
    replaced: tuple[PlannedFile, ...],
    was_complete: bool,
    seconds: float,
) -> Report:
    """The report of what was done or, with ``--dry-run``, would be. ``budget``: that of each of the ``workers``.

    ``manifest``: the content of ``fsdpckpt.json``, empty in a dry run. ``notes``: on the run itself. They are not in
    ``fsdpckpt.json``, which is the same for a resumed run.
    """
    checkpoint, decision = prepared.transformed.checkpoint, prepared.decision
    options, output, plan = decision.options, prepared.output, prepared.plan
    linked = [(link.path, require_stored(checkpoint.files[link.source])) for link in output.links]
    files = [PlannedFile(path, file.nbytes, source=file.path) for path, file in linked]
    files += [PlannedFile(file.path, file.nbytes) for file in output.files]
    link = prepared.linking.mode
    if decision.directory:
        if not manifest:  # of a dry run: as long as the real one, except for digests
            crcs = {file.path: 0 for file in files}
            manifest = encode_manifest(output, prepared.transformed, decision, link=link, crcs=crcs, digests={})
        files.append(PlannedFile(MANIFEST, len(manifest)))
    kept = checkpoint.world_size if decision.layout is Layout.SHARDED else None
    return Report(
        source=checkpoint.source,
        target=target,
        layout=decision.layout,
        container=decision.container,
        flavor=decision.flavor_name,
        world_size=decision.world_size if decision.world_size is not None else kept,
        tensors=sum(1 for _ in checkpoint.leaves()),
        parameters=len(checkpoint.params),
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        peak_memory_planned=budget.nbytes,
        threads=budget.threads,
        workers=workers,
        seconds=seconds,
        dry_run=options.dry_run,
        verified="none" if options.dry_run else options.verify,
        notes=(*checkpoint.notes, *output.notes, *notes),
        files=tuple(files),
        link=link,
        source_files=len(checkpoint.files),
        evidence=tuple(map(str, checkpoint.evidence)),
        disk_free=free_bytes(target) if options.dry_run else None,
        replaced=replaced,
        was_complete=was_complete,
        loads=_loads(decision, checkpoint, target),
        tensor_bytes=bytes_stored_once(list(checkpoint.leaves())),
    )


def _loads(decision: Decision, checkpoint: Checkpoint, target: str) -> str:
    """How a user of the target's framework loads it; "" for a plain target, and for a model without its optimizer."""
    if decision.flavor is None or decision.form is None or decision.form.not_loaded:
        return ""
    whole = checkpoint.has(Section.MODEL) and not checkpoint.lacking
    resumes = whole and (decision.form.optim is None or checkpoint.has(Section.OPTIM))
    return how_to_load(decision.flavor, target) if resumes else ""
