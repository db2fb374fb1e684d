"""Runs ``fsdpckpt inspect``: a row for each key and a summary, which comes last on a terminal and first in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from fsdpckpt.cli.incomplete import show_incomplete
from fsdpckpt.cli.output import Colour, Line, Styled, cut_line, labelled, wrapped
from fsdpckpt.cli.run import show_run
from fsdpckpt.errors import SeveralCheckpointsError, SourceCorruptError, SourceIncompleteError, UsageError
from fsdpckpt.options.commands import InspectOptions, keywords_of
from fsdpckpt.text import count_text, dtypes_text, fold_notes, key_text, names_text, plural, setting_text, size_text

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Streams
    from fsdpckpt.describe import Description
    from fsdpckpt.ir.checkpoint import Checkpoint, Evidence
    from fsdpckpt.ir.values import Key, Value

EXAMPLES = """\b
Examples:
  fsdpckpt inspect runs/step-1000
  fsdpckpt inspect runs/step-1000 --section optim --keys '*.exp_avg'
  fsdpckpt inspect model.pt --names-only | grep embed
  fsdpckpt inspect runs/step-1000 --ranks --json > layout.json
  fsdpckpt inspect s3://bucket/runs/step-1000 --stats
  fsdpckpt inspect runs/step-1000 --stats --report report.html
"""

MAX_HYPER_PARAMETERS = 12
MAX_GROUPS = 3  # on a terminal
MAX_PROBLEMS = 20


def inspect_command(output: Streams, source: str, options: InspectOptions) -> int:
    """Show what a checkpoint holds: every key with section, shape, dtype, bytes and how it is sharded.

    Reads headers and metadata only, unless --stats. On a terminal, repeated layers share a row: --all lists every key.
    If SRC is a run, it has a row for each of its checkpoints. If SRC is incomplete, what can be read is shown.
    """
    from fsdpckpt.api import inspect
    from fsdpckpt.readers.steps import with_final_model

    if options.names_only:
        for flag, is_given in (("--json", output.as_json), ("--all", options.all_keys), ("--ranks", options.ranks)):
            if is_given:
                raise UsageError(
                    f"--names-only cannot be combined with {flag}", next_step=f"drop --names-only or {flag}"
                )
    if options.report is not None:  # before an hour of --stats, not after it
        from fsdpckpt.report import check_report

        check_report(options.report, source)
    try:
        # Without --stats there is nothing to wait for, and importing the bar takes time.
        with output.progress() if options.stats else nullcontext() as progress:
            description = inspect(source, **keywords_of(inspect, options), progress=progress)
    except SeveralCheckpointsError as error:
        if _needs_one_checkpoint(options):
            raise
        return show_run(output, source, error)
    except (SourceIncompleteError, SourceCorruptError) as error:
        return show_incomplete(output, source, error, options)
    if description.checkpoint.origin.steps and not _needs_one_checkpoint(options):
        return show_run(output, source, with_final_model(description.checkpoint.origin))
    if options.report is not None:
        from fsdpckpt.report import write_report

        nbytes = write_report(description, options.report)
        output.message(f"{options.report}: {size_text(nbytes)}")
    if not description.tensors and options.section is not None:
        output.message(f"{source} has no tensors in section {options.section}")
    _show(output, description, options)
    return 0


def _show(output: Streams, description: Description, options: InspectOptions) -> None:
    from fsdpckpt.cli.listing import listing

    if output.as_json:
        output.document(lambda: description.document(ranks=options.ranks), "inspect")
        return
    if options.names_only:
        output.data(named.key for named in description.tensors)
        return
    columns = output.columns
    unfold = options.all_keys or columns is None
    lines, headings = listing(description, ranks=options.ranks, unfold=unfold, columns=columns)
    table: list[Line] = list(lines)
    for at in headings:
        table[at] = Styled(lines[at], Colour.HEADING)
    if columns is None:
        output.data([*(() if output.quiet else (*_summary(description, None), "")), *table])
    else:  # the summary last: it is what stays on the screen
        folded = len(description.tensors) - (len(lines) - len(headings))
        hint = "repeated keys are folded: --all lists each" if folded > 0 and not options.ranks else ""
        if description.tensors:
            output.data([*table, Styled(hint, Colour.ASIDE)])
        output.data(() if output.quiet else _summary(description, columns))


def _needs_one_checkpoint(options: InspectOptions) -> bool:
    """Whether what is asked for is about the tensors of one checkpoint, and not of a run."""
    asked = (options.keys, options.section, options.names_only, options.ranks, options.stats, options.report)
    return any(asked)


def _summary(description: Description, columns: int | None) -> Iterator[Line]:
    """``columns``: of the terminal. In a pipe, lines are not cut, and everything is listed."""
    from fsdpckpt.ir.optimizer import Optimizer
    from fsdpckpt.transform.meshes import source_meshes

    checkpoint = description.checkpoint
    ranks = plural(checkpoint.world_size, "rank")
    title = f"{checkpoint.source}: {checkpoint.layout}, {checkpoint.container} ({checkpoint.flavor}), {ranks}"
    meshes = [str(mesh) for mesh in source_meshes(checkpoint) if mesh.names is not None]
    title += f", mesh {' and '.join(meshes)}" if meshes else ""
    yield from wrapped(title, columns)
    for line in _recognised_text(checkpoint.evidence):
        yield from wrapped(f"  recognised: {line.replace(f'{checkpoint.source}/', '')}", columns)
    named_optimizers = {
        named.label: named.content for named in checkpoint.named if isinstance(named.content, Optimizer)
    }
    key_types = {label: optim.key_type for label, optim in named_optimizers.items()}
    for section, totals in description.sections.items():
        parts = [plural(totals.tensors, "tensor"), f"{count_text(totals.elements)} elements", size_text(totals.nbytes)]
        if section == "optim" or section in key_types:
            parts.insert(0, f"keyed by {key_types.get(section, description.key_type)}")
        yield cut_line(f"{section}: {', '.join(parts)}, {dtypes_text(totals.dtypes)}", columns)
    if checkpoint.optim is not None:
        yield from _groups(checkpoint.optim.param_groups, columns)
    for label, optim in named_optimizers.items():
        yield from _groups(optim.param_groups, columns, f"{label}: ")
    yield from _extra_texts(checkpoint, columns)
    left_out = [each for each in checkpoint.origin.left_out if each.names]
    for each in left_out:  # what convert does not copy
        yield from wrapped(f"other files: {names_text(each.names, 6)}", columns)
    said = {each.message for each in left_out}
    for label, warns in (("warning", True), ("note", False)):
        notes = [note.message for note in checkpoint.notes if note.warning is warns and note.message not in said]
        for message in fold_notes(notes):
            yield from wrapped(f"{label}: {message}", columns)
    problems = checkpoint.problems
    for problem in problems if columns is None else problems[:MAX_PROBLEMS]:
        yield from labelled("problem:", problem.message, Colour.BAD, columns)
    if columns is not None and len(problems) > MAX_PROBLEMS:
        yield f"  and {len(problems) - MAX_PROBLEMS} more: fsdpckpt verify lists them all"
    yield f"problems: {len(problems)}" if problems else Styled("problems: none", Colour.GOOD, len("problems: "))


def _recognised_text(evidence: Iterable[Evidence]) -> Iterator[str]:
    """The evidence for the flavor (for plain files, the container) and the layout; --json has all evidence."""
    from fsdpckpt.ir.checkpoint import EvidenceKind

    by_kind: dict[EvidenceKind, list[str]] = {}
    for item in evidence:
        by_kind.setdefault(item.kind, []).append(item.message)
    yield from (by_kind.get(EvidenceKind.FLAVOR) or by_kind.get(EvidenceKind.CONTAINER, []))[:1]
    yield from by_kind.get(EvidenceKind.LAYOUT, [])
    yield from by_kind.get(EvidenceKind.READER, [])


def _groups(groups: list[dict[Key, Value]] | None, columns: int | None, of: str = "") -> Iterator[str]:
    """``of``: the optimizer, if there are several."""
    if groups is None:
        yield f"{of}param groups: none in this checkpoint"
        return
    if len(groups) != 1 or columns is None:
        yield f"{of}param groups: {len(groups)}"
    for number, group in enumerate(groups[: None if columns is None else MAX_GROUPS]):
        label = f"{of}param group" if len(groups) == 1 and columns is not None else " "
        yield cut_line(f"{label} {number}: {_group_text(group, short=columns is not None)}", columns)
    if columns is not None and len(groups) > MAX_GROUPS:
        yield f"  and {len(groups) - MAX_GROUPS} more: --json lists them all"


def _group_text(group: dict[Key, Value], *, short: bool) -> str:
    """``short``: without the settings that are None or False."""
    from fsdpckpt.ir.values import value_text

    params = group.get("params")
    count = len(params) if isinstance(params, (list, tuple)) else 0
    hyper = [
        f"{key!s}={setting_text(key, value_text(value))}"
        for key, value in group.items()
        if key not in ("params", "param_names") and not (short and (value is None or value is False))
    ]
    shown = ", ".join(hyper[:MAX_HYPER_PARAMETERS])
    more = f", and {len(hyper) - MAX_HYPER_PARAMETERS} more" if len(hyper) > MAX_HYPER_PARAMETERS else ""
    return f"{plural(count, 'parameter')}; {shown}{more}".removesuffix("; ")


def _extra_texts(checkpoint: Checkpoint, columns: int | None) -> Iterator[str]:
    """The extras, one text for each top-level key: its value, or how many it has."""
    from fsdpckpt.ir.values import value_text, walk

    if checkpoint.extra:
        texts = []
        for name, value in checkpoint.extra.items():
            key = key_text(name)
            inner = isinstance(value, (dict, list, tuple)) and bool(value)
            text = setting_text(name, value_text(value))
            texts.append(f"{key}: {plural(len(list(walk(value))), 'value')}" if inner else f"{key} = {text}")
        heading = f"extra: {plural(len(list(walk(checkpoint.extra))), 'value')}"
        if columns is None:
            yield heading
            yield from (f"  {text}" for text in texts)
        else:
            yield cut_line(f"extra: {', '.join(sorted(texts, key=lambda text: ' = ' not in text))}", columns)
    if checkpoint.rank_extra:
        yield f"extra: each of {plural(len(checkpoint.rank_extra), 'rank')} has its own"
