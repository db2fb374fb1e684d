"""Offers the Python API: ``inspect``, ``convert``, ``diff``, ``verify``, ``open``, and for training
``save_parameter_order``.

The commands are thin wrappers of these. Only ``save_parameter_order``, ``model_units`` and ``convert`` with workers
import torch.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from fsdpckpt import flags
from fsdpckpt.command_options import (
    DiffOptions,
    InspectOptions,
    KnowledgeOptions,
    UnitsOptions,
    VerifyOptions,
    takes_options,
    with_keywords,
)
from fsdpckpt.errors import (
    FsdpckptError,
    FsdpckptWarning,
    SeveralCheckpointsError,
    UsageError,
    require_torch,
)
from fsdpckpt.flags import in_python
from fsdpckpt.ir import Layout, Section, SectionName, Strategy, section_of
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.invariants import problems
from fsdpckpt.option_fields import OptionRecord, Scope, options_of, refuse_unused
from fsdpckpt.options import ConvertOptions, EachOptions, LaunchOptions
from fsdpckpt.progress import NO_PROGRESS, Progress
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from fsdpckpt.converters import Report
    from fsdpckpt.describe import Description, Incomplete, Run
    from fsdpckpt.flat.units.request import ResolvedUnits, UnitsRequest
    from fsdpckpt.ir import Container, Section
    from fsdpckpt.ir.units import Units
    from fsdpckpt.lazy import LazyCheckpoint
    from fsdpckpt.options import Launcher, LinkMode, MissingState, OutputScope, TensorForm, VerifyLevel
    from fsdpckpt.runs import Attempt
    from fsdpckpt.verify.difference import Difference
    from fsdpckpt.verify.integrity import Verification

    class ConvertKeywords(TypedDict, total=False):
        """The keywords of ``convert`` for type checkers and editors. Written by ``scripts/keywords``."""

        to: Layout | Literal["full", "sharded", "flattened"] | None
        container: Container | Literal["torch", "dcp", "safetensors"] | None
        world_size: int | None
        mesh: str | Iterable[str]
        placements: str | os.PathLike[str] | None
        like: str | os.PathLike[str] | None
        tensor: TensorForm | Literal["dtensor", "sharded-tensor"]
        torch_version: str | None
        mesh_device: str | None
        key_type: Literal["name", "id"] | None
        flavor: str | None
        max_shard_size: int | str
        only: Section | str | None
        include: str | Iterable[str]
        exclude: str | Iterable[str]
        ignore_file: str | Iterable[str]
        clean_names: bool
        strip_prefix: str | None
        add_prefix: str | None
        rename: Mapping[str, str] | Iterable[tuple[str, str]]
        map: str | os.PathLike[str] | None
        inverse: bool
        map_value: Mapping[str, str] | Iterable[tuple[str, str]]
        dtype: str | torch.dtype | None
        optim_dtype: str | torch.dtype | None
        missing_state: MissingState | Literal["error", "zeros", "skip"] | None
        no_weight_decay: str | Iterable[str]
        buffers: str | Iterable[str]
        units: str | os.PathLike[str] | None
        unit: str | Iterable[str]
        use_orig_params: bool | None
        strategy: Strategy | Literal["full-shard", "shard-grad-op", "hybrid-shard", "no-shard"] | None
        param_dtype: str | torch.dtype | None
        shard_size: int | None
        reference: str | os.PathLike[str] | None
        parameters: str | os.PathLike[str] | None
        dry_run: bool
        verify: VerifyLevel | Literal["none", "structure", "full"]
        link: LinkMode | Literal["copy", "auto", "hardlink", "reflink"]
        overwrite: bool
        resume: bool | None
        max_memory: int | str
        threads: int | None
        staging: str | os.PathLike[str] | None
        launcher: Launcher | Literal["auto", "local", "torchrun"]
        nproc_per_node: int | str | None
        nnodes: int
        node_rank: int | None
        rdzv_endpoint: str | None
        device: Literal["auto", "cpu", "cuda"]
        backend: Literal["auto", "nccl", "gloo"]
        output_visibility: OutputScope | Literal["shared", "node"]
        fault_limit: float


KNOWLEDGE = tuple(option.name for option in options_of(KnowledgeOptions))


class UnitsKeywords(TypedDict, total=False):
    """The keywords of ``KnowledgeOptions``."""

    unit: Iterable[str]
    reference: str | os.PathLike[str] | None
    parameters: str | os.PathLike[str] | None
    buffers: Iterable[str]
    use_orig_params: bool | None
    strategy: Strategy | str | None
    param_dtype: str | None
    shard_size: int | None


@takes_options(KnowledgeOptions)
def inspect(
    source: str | os.PathLike[str],
    *,
    keys: Iterable[str] = (),
    section: str | None = None,
    ranks: bool = False,
    stats: bool = False,
    ignore_file: Iterable[str] = (),
    units: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    **how: Unpack[UnitsKeywords],
) -> Description:
    """Describe the checkpoint at ``source``: its layout, container, flavor, tensors, param groups, problems.

    Reads headers and metadata only, unless ``stats``. ``ranks`` locates every chunk in its file. ``keys``: globs over
    dotted keys; ``ignore_file``: globs of files of the source to leave out. ``.to_json(ranks=...)`` returns the
    document of ``fsdpckpt inspect --json``. Flattened shards are shown by name if ``units`` (a file), or units beside
    the source, name them. Raises SourceError, UsageError for a glob that matches nothing.
    """
    from fsdpckpt.describe import describe

    options = InspectOptions.of(
        keys=keys,
        section=section,
        ranks=ranks,
        stats=stats,
        ignore_file=ignore_file,
        units=units,
        threads=threads,
        **how,
    )
    with Sources() as sources:
        locate = Locate.ALL if options.ranks or options.stats else Locate.NOTHING
        (opened,) = _open_all([source], sources, options.units, options.ignore_file, locate=locate)
        checkpoint = _name_slices(opened, sources, options)
        if checkpoint is not opened:
            checkpoint = checkpoint.with_problems(*problems(checkpoint))
        description = describe(checkpoint, options.keys, options.section)
        if options.stats:
            from fsdpckpt.verify.measures import stats_of

            measured = stats_of(
                checkpoint,
                description.tensors,
                sources=sources,
                threads=options.threads,
                progress=progress or NO_PROGRESS,
            )
            description = dataclasses.replace(description, stats=tuple(measured))
        stored = opened.optim.key_type if opened.optim is not None else None
        return dataclasses.replace(description, key_type=stored)


def inspect_run(source: str | os.PathLike[str], several: SeveralCheckpointsError) -> Run:
    """The checkpoints of a run: a row for each, read from headers and metadata alone.

    ``several``: what ``inspect(source)`` raised.
    """
    from fsdpckpt.describe import describe_run

    with Sources() as sources:
        return describe_run(os.fsdecode(source), several, sources)


def inspect_incomplete(source: str | os.PathLike[str], error: FsdpckptError) -> Incomplete | None:
    """What is left of a checkpoint: which rank has which file, and which sections can be read alone.

    ``error``: what ``inspect(source)`` raised. None if it is not about the files of a directory.
    """
    from fsdpckpt.describe import describe_incomplete

    with Sources() as sources:
        return describe_incomplete(os.fsdecode(source), error, sources)


@takes_options(ConvertOptions, LaunchOptions)
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    launch: LaunchOptions | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Report:
    """Convert ``source`` to ``target``. Options have the names of the command line: ``to="full"``, ``world_size=3``.

    ``options`` and ``launch`` hold all options of the conversion and of the processes that run it; single options, such
    as ``nproc_per_node=4``, replace their fields. Under torchrun or srun every rank calls this and gets the same
    report. Issues an FsdpckptWarning for each of ``report.warnings``. Raises UsageError for an option that does not
    exist, and the errors of ``fsdpckpt convert``.
    """
    from fsdpckpt.worker import convert as run

    if options is not None and not isinstance(options, ConvertOptions):
        raise UsageError(
            "options are given by name, as in convert(source, target, world_size=6)",
            found=repr(options),
            next_step="help(fsdpckpt.convert) lists them",
        )
    records = (ConvertOptions() if options is None else options, LaunchOptions() if launch is None else launch)
    chosen, launched = with_keywords(records, keywords)
    report = run(os.fsdecode(source), os.fsdecode(target), chosen, launched, progress or NO_PROGRESS)
    for message in report.warnings:
        warnings.warn(in_python(message), FsdpckptWarning, stacklevel=2)
    return report


@takes_options(ConvertOptions, LaunchOptions)
def convert_each(
    run: str | os.PathLike[str],
    target: str | os.PathLike[str],
    glob: str,
    *,
    newer_than: str | None = None,
    launch: LaunchOptions | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> list[Attempt]:
    """Convert each checkpoint of ``run`` that matches ``glob``, to one of the same name in ``target``.

    A checkpoint that cannot be converted does not stop the others: its ``Attempt.error`` says why. Those that are
    there and complete are compared (``Attempt.was_there``). ``newer_than``: only those after this name. The keywords
    are those of ``convert``. Raises SourceMissingError if nothing matches, UsageError.
    """
    from fsdpckpt.runs import convert_each as attempts

    records = (ConvertOptions(), LaunchOptions() if launch is None else launch)
    chosen, launched = with_keywords(records, keywords)
    each = EachOptions(each=glob, newer_than=newer_than)
    source, goal = os.fsdecode(run), os.fsdecode(target)
    return list(attempts(source, goal, each, chosen, launched, progress or NO_PROGRESS))


@takes_options(KnowledgeOptions)
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    only: str | None = None,
    strict: bool = False,
    ignore_file: Iterable[str] = (),
    units: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    **how: Unpack[UnitsKeywords],
) -> Difference:
    """Compare two checkpoints logically, whatever their layouts, containers, key types and world sizes.

    Every byte counts; with ``rtol`` or ``atol`` numbers are compared as ``torch.allclose`` does. ``only`` compares one
    section. ``strict`` counts extras of ranks (random states) that only one of them has. ``units``: a units file for
    flattened shards on either side; without one, what the other side records, or its names and shapes. Raises
    NeedsInformationError if id and name keys, or slices and whole tensors, cannot be matched, SourceError.
    """
    from fsdpckpt.verify.compare import compare, only_section
    from fsdpckpt.verify.elements import Tolerance, without_repeats

    options = DiffOptions.of(
        rtol=rtol,
        atol=atol,
        only=only,
        strict=strict,
        ignore_file=ignore_file,
        units=units,
        threads=threads,
        **how,
    )
    exact = options.rtol is None and options.atol is None
    with Sources() as sources:
        opened = _open_all([a, b], sources, options.units, options.ignore_file)
        opened = [without_repeats(checkpoint, sources) for checkpoint in opened]
        named, unused = _name_both(opened[0], opened[1], sources, options)
        first, second = (only_section(_chosen(each, options.only), section_of(options.only)) for each in named)
        difference = compare(
            first,
            second,
            sources=sources,
            tolerance=None if exact else Tolerance(options.rtol or 0.0, options.atol or 0.0),
            strict=options.strict,
            threads=options.threads,
            progress=progress or NO_PROGRESS,
        )
        return dataclasses.replace(difference, notes=(*unused, *difference.notes))


def _chosen(checkpoint: Checkpoint, only: Section | SectionName | None) -> Checkpoint:
    """One side of a comparison with the section that ``only`` names as its main one: the one that it has, if it is the
    only one of its kind, as ``convert --only`` writes it.
    """
    from fsdpckpt.transform.selection import choose_section

    section = section_of(only)
    alone = section is not None and not any(named.section is section for named in checkpoint.named)
    return choose_section(checkpoint, section if alone else only)


@takes_options(KnowledgeOptions)
def verify(
    source: str | os.PathLike[str],
    *,
    digests: bool = False,
    finite: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    flavor: str | None = None,
    world_size: int | None = None,
    ignore_file: Iterable[str] = (),
    units: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    **how: Unpack[UnitsKeywords],
) -> Verification:
    """Check the checkpoint at ``source`` for damage: ``.problems`` lists it all, ``.whole`` is True if there is none.

    ``digests`` adds a layout-independent SHA-256 per tensor, ``finite`` reports NaN and Inf in parameters and
    optimizer states; ``include``, ``exclude``: globs over the keys to search, without which buffers are left out.
    ``flavor``: a framework; ``.resumption`` then says whether it resumes from this checkpoint on ``world_size`` ranks.
    ``ignore_file``: globs of files of the source that are left out. ``units``: a units file for flattened shards.
    Raises SourceError if the source cannot be read as a checkpoint at all, UsageError for globs without ``finite``.
    """
    from fsdpckpt.converters.form_choice import writable_flavor
    from fsdpckpt.verify.integrity import listing_all_damage, verify_checkpoint
    from fsdpckpt.verify.measures import Finite

    options = VerifyOptions.of(
        digests=digests,
        finite=finite,
        include=include,
        exclude=exclude,
        flavor=flavor,
        world_size=world_size,
        ignore_file=ignore_file,
        units=units,
        threads=threads,
        **how,
    )
    if options.flavor is None:
        refuse_unused(options, Scope.FRAMEWORK, "no framework is named", f"add {flags.for_('FLAVOR')}")
    framework = writable_flavor(options.flavor, flags.for_) if options.flavor is not None else None
    if not options.finite:
        refuse_unused(options, Scope.FINITE, "nothing is searched for NaN and Inf", f"add {flags.finite}")
    searched = Finite(options.include, options.exclude) if options.finite else None
    with Sources() as sources:
        with listing_all_damage(os.fsdecode(source), sources):
            (opened,) = _open_all([source], sources, options.units, options.ignore_file)
        checkpoint = _name_slices(opened, sources, options, listing=True, planned=framework is not None)
        if searched is not None:
            searched.require_matches(checkpoint)
        verification = verify_checkpoint(
            checkpoint,
            sources=sources,
            digests=options.digests,
            finite=searched,
            buffers=options.buffers,
            threads=options.threads,
            progress=progress or NO_PROGRESS,
        )
        if framework is None:
            return verification
        from fsdpckpt.converters.proposal import with_proposal
        from fsdpckpt.verify.resumption import check_resumption

        found = check_resumption(opened, framework, options.world_size, sources)
        given = {**_knowledge(options), **({"ignore_file": options.ignore_file} if options.ignore_file else {})}
        proposed = with_proposal(found, os.fsdecode(source), framework, sources, given=given)
        return dataclasses.replace(verification, resumption=proposed)


@takes_options(KnowledgeOptions)
def open(  # noqa: A001  # the contract's name
    source: str | os.PathLike[str],
    *,
    ignore_file: Iterable[str] = (),
    units: str | os.PathLike[str] | None = None,
    verify: bool = False,
    **how: Unpack[UnitsKeywords],
) -> LazyCheckpoint:
    """Open a checkpoint as a mapping of names to tensors, read on demand. Use it in a ``with`` block.

    ``ignore_file``: globs of files of the source that are left out. ``units``: a units file for flattened shards. What
    is read whole is compared with the checksums that the source has; ``verify=True`` also reads the rest of each
    record, and of each file in ``fsdpckpt.json``, of which a part is asked for, once. Raises SourceError.
    """
    from fsdpckpt.execute.read_check import ReadCheck
    from fsdpckpt.ir.fatal import fatal
    from fsdpckpt.lazy import LazyCheckpoint
    from fsdpckpt.verify.elements import without_repeats

    options = InspectOptions.of(ignore_file=ignore_file, units=units, **how)
    with ExitStack() as until_opened:
        sources = until_opened.enter_context(Sources())
        (checkpoint,) = _open_all([source], sources, options.units, options.ignore_file)
        changed = checkpoint.origin.changed  # of files that say where everything is
        damaged = [problem for problem in checkpoint.problems if problem.fatal and problem.file in changed]
        if damaged:
            raise fatal(damaged, source=checkpoint.source)
        named = _name_slices(without_repeats(checkpoint, sources), sources, options)
        lazy = LazyCheckpoint(named, ReadCheck(named, sources, everything=verify))
        until_opened.pop_all()
        return lazy


def save_parameter_order(model: nn.Module, optimizer: Optimizer | None, path: str | os.PathLike[str]) -> None:
    """Write what no checkpoint records: the order of ``model.parameters()`` and of the optimizer's groups, which the
    ids of ``optimizer.state_dict()`` count in; for FSDP1 also the parameters of each flat parameter.

    Works for any model: FSDP1, FSDP2, DDP, or not wrapped. Call it once after wrapping, on every rank, or only on rank
    0 if all optimizers list the same parameters in the same order; rank 0 writes ``path``, a ``.json`` file or a
    directory that gets a ``units.json``. Write it beside the checkpoints, where ``fsdpckpt`` finds it, or give it as
    ``--units FILE``. Raises UsageError for an optimizer that was made of another model.
    """
    require_torch("save_parameter_order needs")
    from fsdpckpt.flat.live.save import save_parameter_order as save

    save(model, optimizer, path)


save_units = save_parameter_order
"""The same function, by the name of what it writes for FSDP1."""


def _open_all(
    paths: Sequence[str | os.PathLike[str]],
    sources: Sources,
    units: str | None,
    ignore_file: tuple[str, ...],
    *,
    locate: Locate = Locate.ALL,
) -> list[Checkpoint]:
    """The checkpoints at ``paths``. Raises UsageError for a glob of ``ignore_file`` that matches none of
    their files.
    """
    from fsdpckpt.readers.detect import open_checkpoint
    from fsdpckpt.readers.protocol import require_matches

    loaded = _load_units(units)
    opened = [
        open_checkpoint(os.fsdecode(path), sources=sources, locate=locate, units=loaded, ignore_file=ignore_file)
        for path in paths
    ]
    require_matches(ignore_file, *opened)
    return opened


def _load_units(path: str | None) -> Units | None:
    if path is None:
        return None
    from fsdpckpt.flat.units.request import load_units

    with Sources() as sources:
        return load_units(path, sources)


def _name_slices(
    checkpoint: Checkpoint,
    sources: Sources,
    options: OptionRecord,
    *,
    listing: bool = False,
    planned: bool = False,
) -> Checkpoint:
    """Flattened shards by name, if ``options``, a file beside them or their own model section say the units; any other
    checkpoint with its buffers, if ``options`` name some. A note names options that have no effect, unless a conversion
    is ``planned`` with them.
    """
    given = _knowledge(options)
    if checkpoint.layout is not Layout.FLATTENED and checkpoint.units is None and not given:
        return checkpoint
    from fsdpckpt.flat.logical import logical

    named = logical(checkpoint, sources, _units_request(options), listing=listing)
    if named is not checkpoint or not given:
        return named
    (read,), unused = _with_buffers([checkpoint], given, needed=planned)
    return read.noted(*(Note("unused", message, for_verify=True) for message in unused))


def _with_buffers(
    sides: Sequence[Checkpoint], given: Mapping[str, object], *, needed: bool = False
) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints without the problems that ``--buffers`` settles; and what to say of that which is ``given`` and
    has no effect on any of them. ``needed``: nothing, as something else asks for it.
    """
    from fsdpckpt.ir.buffers import known_buffers, with_named_buffers

    globs = given.get("buffers")
    buffers = globs if isinstance(globs, tuple) else ()
    told = any(known_buffers(side, buffers) != known_buffers(side) for side in sides)
    unused = [] if needed else [name for name in given if name != "buffers" or not told]
    read = [with_named_buffers(side, buffers) for side in sides]
    if not unused:
        return read, []
    listed = " and ".join(f"{option.flag}" for option in options_of(VerifyOptions) if option.name in unused)
    which = " and ".join(dict.fromkeys(side.source for side in sides))
    return read, [f"{listed} had no effect: nothing else is needed to read {which}"]


def _name_both(
    a: Checkpoint, b: Checkpoint, sources: Sources, options: DiffOptions
) -> tuple[list[Checkpoint], list[str]]:
    """Both sides of a comparison with flattened shards by name: each is help for the other. Also returns what
    ``_with_buffers`` does.
    """
    flattened = any(each.layout is Layout.FLATTENED or each.units is not None for each in (a, b))
    if not flattened and not _knowledge(options):
        return [a, b], []
    from fsdpckpt.flat.logical import logical, require_comparable

    request = _units_request(options)
    named = [logical(each, sources, request, other=other) for each, other in ((a, b), (b, a))]
    require_comparable(named[0], named[1], request, sources)
    given = _knowledge(options)
    if given and _keyed_differently(*named):
        from fsdpckpt.converters.steps.knowledge import Knowledge

        knowledge = Knowledge(request, sources)
        return [knowledge.named(each) for each in named], []
    read_as_they_are = given and all(each is one for each, one in zip(named, (a, b), strict=True))
    return _with_buffers(named, given) if read_as_they_are else (named, [])


def _keyed_differently(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether a key of an optimizer of one side may be another parameter's on the other side."""
    from fsdpckpt.ir.sections import optimizers
    from fsdpckpt.producers.table import id_rule_of

    rules = {
        id_rule_of(each) if optim.key_type == "id" else None
        for each in (a, b)
        for optim in optimizers(each)
        if optim.key_type is not None
    }
    return len(rules) > 1


def find_units(source: str | os.PathLike[str], options: UnitsOptions) -> ResolvedUnits:
    """The units of the checkpoint at ``source``, inferred or from ``options.units``, and how they were checked.

    Raises NeedsInformationError if several units match, SourceError.
    """
    from fsdpckpt.flat.units.source import find_units as find

    with Sources() as sources:
        (checkpoint,) = _open_all([source], sources, options.units, options.ignore_file)
        return find(checkpoint, _units_request(options), sources)


def model_units(model: str, options: UnitsOptions) -> ResolvedUnits:
    """The units of the model that ``model``, a ``package.module:name``, builds on the meta device.

    FSDP1 wraps the classes ``options.wrap``. ``options.source``: a checkpoint to check the units against. Raises
    UsageError, SourceError.
    """
    require_torch("building a model needs")
    from fsdpckpt.flat.live.meta import units_from_model
    from fsdpckpt.flat.units.request import ResolvedUnits
    from fsdpckpt.flat.units.source import prove

    request = _units_request(options)
    classes = [] if options.wrap == ("none",) else list(options.wrap)
    units = units_from_model(
        model,
        classes,
        use_orig_params=bool(options.use_orig_params),
        param_dtype=request.param_dtype,
        strategy=options.strategy or Strategy.FULL_SHARD,
        shard_size=request.shard_size,
        ignored=list(options.ignore),
    )
    how = [
        f"built by {model} on the meta device",
        f"wrapped: the root and every {', '.join(classes)}" if classes else "wrapped: the root only",
        *([f"ignored: {', '.join(options.ignore)}"] if options.ignore else []),
    ]
    if options.source is not None:
        with Sources() as sources:
            how += prove(units, options.source, sources)
    if options.use_orig_params is None:
        how.append(f"use_orig_params=False, FSDP's own default: add {flags.use_orig_params} if the training sets it")
    return ResolvedUnits(units, None, tuple(how))


def base_model_units(directory: str, options: UnitsOptions) -> ResolvedUnits:
    """The units of the Hugging Face model in ``directory``, of which FSDP1 wraps the classes ``options.wrap``.

    ``options.source``: a checkpoint to check the units against; a flattened one decides what the options leave open.
    Raises NeedsInformationError, UsageError, SourceError.
    """
    from fsdpckpt.flat.units.architectures import base_model, require_classes
    from fsdpckpt.flat.units.source import units_of_base

    with Sources() as sources:
        base = base_model(directory, sources)
        require_classes(base, options.wrap)
        return units_of_base(base, options.wrap, _units_request(options), options.source, sources)


def _knowledge(options: OptionRecord) -> dict[str, object]:
    """What ``options`` say of units, names and order: those that are given, by name."""
    values = {name: getattr(options, name) for name in ("units", *KNOWLEDGE)}
    return {name: value for name, value in values.items() if value not in (None, ())}


def _units_request(options: OptionRecord) -> UnitsRequest:
    from fsdpckpt.flat.units.from_options import units_request

    return units_request(ConvertOptions.of(**_knowledge(options)))
