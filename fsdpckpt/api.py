"""Offers the Python API: ``inspect``, ``convert``, ``diff``, ``verify``, ``open``, and for training
``save_parameter_order``.

The commands are thin wrappers of these. Only ``save_parameter_order``, ``model_units`` and ``convert`` with workers
import torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from fsdpckpt.errors import (
    FsdpckptError,
    FsdpckptWarning,
    SeveralCheckpointsError,
    UsageError,
    require_torch,
)
from fsdpckpt.flags import in_python
from fsdpckpt.ir import Layout, Section, Strategy
from fsdpckpt.options import ConvertOptions, EachOptions, LaunchOptions
from fsdpckpt.options.commands import (
    DiffOptions,
    InspectOptions,
    KnowledgeOptions,
    UnitsOptions,
    VerifyOptions,
    takes_options,
    with_keywords,
)
from fsdpckpt.progress import NO_PROGRESS, Progress
from fsdpckpt.storage.sources import Sources

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from fsdpckpt.converters import Report
    from fsdpckpt.describe import Description, Incomplete, Run
    from fsdpckpt.flat.units.request import ResolvedUnits
    from fsdpckpt.ir import Container, Section
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
        map: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
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
    from fsdpckpt.queries import inspect as query

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
    return query.inspect(os.fsdecode(source), options, progress or NO_PROGRESS)


def inspect_run(source: str | os.PathLike[str], several: SeveralCheckpointsError) -> Run:
    """The checkpoints of a run: a row for each, read from headers and metadata alone.

    ``several``: what ``inspect(source)`` raised.
    """
    from fsdpckpt.describe import describe_run

    with Sources() as sources:
        return describe_run(os.fsdecode(source), several, sources)


def inspect_incomplete(
    source: str | os.PathLike[str], error: FsdpckptError, *, ignore_file: tuple[str, ...] = ()
) -> Incomplete | None:
    """What is left of a checkpoint: which rank has which file, and which sections can be read alone.

    ``error``: what ``inspect(source)`` raised, with the same ``ignore_file``. None if it is not about the files of a
    directory.
    """
    from fsdpckpt.describe import describe_incomplete

    with Sources() as sources:
        return describe_incomplete(os.fsdecode(source), error, sources, ignore_file)


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
    map: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),  # noqa: A002 - the option's name
    inverse: bool = False,
    map_value: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    ignore_file: Iterable[str] = (),
    units: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    **how: Unpack[UnitsKeywords],
) -> Difference:
    """Compare two checkpoints logically, whatever their layouts, containers, key types and world sizes.

    Every byte counts; with ``rtol`` or ``atol`` numbers are compared as ``torch.allclose`` does. ``only`` compares one
    section. ``strict`` counts extras of ranks (random states) that only one of them has. ``map``: compare what this
    layout map makes of ``a``, or several one after the other (``inverse`` and ``map_value`` as for ``convert``).
    ``units``: a units file for flattened shards on either side; without one, what the other side records, or its names
    and shapes. Raises NeedsInformationError if id and name keys, or slices and whole tensors, cannot be matched,
    SourceError.
    """
    from fsdpckpt.queries import diff as query

    options = DiffOptions.of(
        rtol=rtol,
        atol=atol,
        only=only,
        strict=strict,
        map=map,
        inverse=inverse,
        map_value=map_value,
        ignore_file=ignore_file,
        units=units,
        threads=threads,
        **how,
    )
    return query.diff(os.fsdecode(a), os.fsdecode(b), options, progress or NO_PROGRESS)


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
    from fsdpckpt.queries import verify as query

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
    return query.verify(os.fsdecode(source), options, progress or NO_PROGRESS)


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
    from fsdpckpt.queries.open import open_lazily

    options = InspectOptions.of(ignore_file=ignore_file, units=units, **how)
    return open_lazily(os.fsdecode(source), options, verify=verify)


def save_parameter_order(
    model: nn.Module, optimizer: Optimizer | Mapping[str, Optimizer] | None, path: str | os.PathLike[str]
) -> None:
    """Write what no checkpoint records: the order of ``model.parameters()`` and of the optimizer's groups, which the
    ids of ``optimizer.state_dict()`` count in; for FSDP1 also the parameters of each flat parameter.

    Works for any model: FSDP1, FSDP2, DDP, or not wrapped. Call it once after wrapping, on every rank, or only on rank
    0 if all optimizers list the same parameters in the same order; rank 0 writes ``path``, a ``.json`` file or a
    directory that gets a ``units.json``. Write it beside the checkpoints, where ``fsdpckpt`` finds it, or give it as
    ``--units FILE``. Several optimizers of the model (Muon and AdamW) are a dict by the names that they have in the
    checkpoint, which ``inspect`` lists: ``{"muon": muon, "adamw": adamw}``. Raises UsageError for an optimizer that was
    made of another model.
    """
    require_torch("save_parameter_order needs")
    from fsdpckpt.flat.live.save import save_parameter_order as save

    save(model, optimizer, path)


save_units = save_parameter_order
"""The same function, by the name of what it writes for FSDP1."""


def find_units(source: str | os.PathLike[str], options: UnitsOptions) -> ResolvedUnits:
    """The units of the checkpoint at ``source``, inferred or from ``options.units``, and how they were checked.

    Raises NeedsInformationError if several units match, SourceError.
    """
    from fsdpckpt.queries import units as query

    return query.find_units(os.fsdecode(source), options)


def model_units(model: str, options: UnitsOptions) -> ResolvedUnits:
    """The units of the model that ``model``, a ``package.module:name``, builds on the meta device.

    FSDP1 wraps the classes ``options.wrap``. ``options.source``: a checkpoint to check the units against. Raises
    UsageError, SourceError.
    """
    require_torch("building a model needs")
    from fsdpckpt.queries import units as query

    return query.model_units(model, options)


def base_model_units(directory: str, options: UnitsOptions) -> ResolvedUnits:
    """The units of the Hugging Face model in ``directory``, of which FSDP1 wraps the classes ``options.wrap``.

    ``options.source``: a checkpoint to check the units against; a flattened one decides what the options leave open.
    Raises NeedsInformationError, UsageError, SourceError.
    """
    from fsdpckpt.queries import units as query

    return query.base_model_units(directory, options)
