"""Lays out the target files of a conversion: plain, or adapted to the form in which one producer saves."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.converters.transform import TransformedCheckpoint
from fsdpckpt.flat.flatten import write as torch_flat
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, Note, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import LinkedFile, Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers.forms import (
    PLAIN_MESH,
    PLAIN_NAMES,
    PLAIN_NESTING,
    Flavor,
    Form,
    Nesting,
    Place,
    RankNames,
    Step,
)
from fsdpckpt.producers.table import flavor_named
from fsdpckpt.readers.side_files import SideFiles, lacking, side_files
from fsdpckpt.storage.sources import Sources
from fsdpckpt.writers import dcp, safetensors, torch_full, torch_ranks, universal
from fsdpckpt.writers.protocol import DtypeRule, Writer, WriteSpec

WRITERS: Mapping[tuple[Container, Layout], Writer] = {
    (Container.TORCH, Layout.FULL): torch_full.lay_out,
    (Container.TORCH, Layout.SHARDED): torch_ranks.lay_out,
    (Container.TORCH, Layout.FLATTENED): torch_flat.lay_out,
    (Container.DCP, Layout.FULL): dcp.lay_out,
    (Container.DCP, Layout.SHARDED): dcp.lay_out,
    (Container.SAFETENSORS, Layout.FULL): safetensors.lay_out,
}
"""The writer of each container and layout that can be written."""

_LAMBDAS = "lr_lambdas"  # what LambdaLR has, and its load_state_dict() needs
_ANY_SCHEDULE = frozenset({"last_epoch", "_last_lr"})  # what every LR scheduler of torch has


def dtype_rule(options: ConvertOptions) -> DtypeRule:
    """``--dtype`` and ``--optim-dtype`` as the writers take them."""
    return DtypeRule(
        model=DTYPES[options.dtype] if options.dtype is not None else None,
        optim=DTYPES[options.optim_dtype] if options.optim_dtype is not None else None,
    )


def lay_out(
    transformed: TransformedCheckpoint,
    spec: TargetSpec,
    options: ConvertOptions,
    side_files: Mapping[str, Tensor],
    linkable: frozenset[int] = frozenset(),
) -> Target:
    """The target files of ``transformed``, laid out by the writers of ``spec``.

    ``side_files``: files that are copied unchanged into a producer's form, by target name. ``linkable``: numbers of the
    source's files that may be linked. Raises what the writers raise, and NeedsInformationError when the source's
    DTensors name several device types.
    """
    if spec.form is not None:
        return _lay_out_form(transformed, spec, spec.form, options, side_files, linkable)
    document = _Document(Place(""), transformed.checkpoint, _kept_nesting(transformed.checkpoint, spec))
    return _lay_out_document(document, spec.container, spec.layout, transformed, spec, options, linkable)


def _kept_nesting(checkpoint: Checkpoint, spec: TargetSpec) -> Nesting:
    """From DCP to DCP the keys under which the sections stand, and the form of the optimizer's, are the source's."""
    if checkpoint.container is not Container.DCP or spec.container is not Container.DCP:
        return PLAIN_NESTING
    model, optim = (
        tuple(key for key in checkpoint.nesting.get(section, default) if isinstance(key, (str, int)))
        for section, default in ((Section.MODEL, PLAIN_NESTING.model), (Section.OPTIM, PLAIN_NESTING.optim))
    )
    by_name = checkpoint.optim is not None and checkpoint.optim.key_type != "id"
    return Nesting(model, optim, flattened=checkpoint.flattened_keys and by_name)


@dataclass(slots=True)
class _Document:
    """The sections of one file, or of one set of files by rank, or of one DCP directory."""

    place: Place
    checkpoint: Checkpoint
    nesting: Nesting = PLAIN_NESTING
    names: RankNames = PLAIN_NAMES


def _lay_out_document(
    document: _Document,
    container: Container,
    layout: Layout,
    transformed: TransformedCheckpoint,
    spec: TargetSpec,
    options: ConvertOptions,
    linkable: frozenset[int],
) -> Target:
    """The files of one document, laid out by the writer of its container and layout."""
    plain = spec.form is None
    if layout is Layout.FLATTENED and transformed.units is None:
        layout = Layout.SHARDED
    by_parameter = spec.form is not None and spec.form.by_parameter
    writer = universal.lay_out if by_parameter else WRITERS[container, layout]
    return writer(
        document.checkpoint,
        WriteSpec(
            dtypes=dtype_rule(options),
            world_size=1 if layout is Layout.FULL and container is Container.DCP else spec.world_size,
            path=document.place.file,
            nesting=document.nesting,
            unwrap=plain and options.only is not None,
            names=document.names,
            tensor=options.tensor,
            mesh=spec.form.mesh if spec.form is not None else PLAIN_MESH,
            mesh_device=options.mesh_device,
            meshes=spec.mesh.meshes if spec.mesh is not None and layout is Layout.SHARDED else (),
            torch_version=options.torch_version,
            max_shard_size=options.max_shard_size,
            single_file=plain and not spec.directory,
            weights_only=not plain,
            default_loadable=plain,
            units=transformed.units,
            key_type=transformed.key_type or "id",
            linkable=linkable,
        ),
    )


def _lay_out_form(
    transformed: TransformedCheckpoint,
    spec: TargetSpec,
    form: Form,
    options: ConvertOptions,
    side_files: Mapping[str, Tensor],
    linkable: frozenset[int],
) -> Target:
    """Every file of ``form``: those of the sections, the producer's small ones, and the side files unchanged."""
    files: list[TargetFile] = []
    links: list[LinkedFile] = []
    notes: list[Note] = []
    checkpoint = transformed.checkpoint
    for document in _documents(checkpoint, form):
        target = _lay_out_document(document, *_format_of(document.place, form), transformed, spec, options, linkable)
        files += target.files
        links += target.links
        notes += [note for note in target.notes if note not in notes]
    for name, text in form.texts:
        file = TargetFile(name)
        file.literal(text.replace("{world_size}", str(spec.world_size or checkpoint.world_size)).encode())
        files.append(file)
    written = {file.path for file in files}
    for name, tensor in side_files.items():
        if name not in written:
            file = TargetFile(name)
            file.write_item(tensor)
            files.append(file)
    return Target(sorted(files, key=_is_metadata), notes, links)


def _is_metadata(file: TargetFile) -> bool:
    return posixpath.basename(file.path) == ".metadata"  # sorted last


def _documents(checkpoint: Checkpoint, form: Form) -> Iterator[_Document]:
    """The sections that ``checkpoint`` has and ``form`` has a place for, those of one place together."""
    empty = replace(checkpoint, model=None, optim=None, extra={}, rank_extra=())
    documents: dict[tuple[str, Container, Layout], _Document] = {}

    def at(place: Place) -> _Document:
        key = (place.file if "{rank}" not in place.file else "{rank}", *_format_of(place, form))
        if key not in documents:
            documents[key] = _Document(place, empty, Nesting(flattened=form.flattened), RankNames())
        return documents[key]

    if checkpoint.model is not None:
        document = at(form.model)
        document.checkpoint = replace(document.checkpoint, model=checkpoint.model)
        document.nesting = replace(document.nesting, model=form.model.at)
        document.names = replace(document.names, model=form.model.file)
    if checkpoint.optim is not None and form.optim is not None:
        document = at(form.optim)
        document.checkpoint = replace(document.checkpoint, optim=checkpoint.optim)
        document.nesting = replace(document.nesting, optim=form.optim.at)
        document.names = replace(document.names, optim=form.optim.file)
    required = form.extra is not None and form.extra.container is not None  # its loader opens that file in any case
    if form.extra is not None and (checkpoint.extra or checkpoint.rank_extra or required):
        document = at(form.extra)
        document.checkpoint = replace(document.checkpoint, extra=checkpoint.extra, rank_extra=checkpoint.rank_extra)
        document.names = replace(document.names, extra=form.extra.file)
    yield from documents.values()


def _format_of(place: Place, form: Form) -> tuple[Container, Layout]:
    return place.container or form.container, place.layout or form.layout


def adapt_to_form(
    checkpoint: Checkpoint,
    flavor: Flavor,
    form: Form,
    *,
    world_size: int | None,
    sources: Sources,
    only: Section | None = None,
    divided: bool = False,
) -> tuple[Checkpoint, Form, Mapping[str, Tensor]]:
    """``checkpoint`` with the sections that ``form`` has a place for, ``form`` with the places that this source needs,
    and the files beside it that go along.

    ``only``: the section that is taken. ``divided``: whether a param group that is the only one will be two.
    """
    beside = side_files(checkpoint, flavor, world_size, sources, only=only)
    below = (
        f"{checkpoint.directory.rstrip('/')}/"  # of what lies directly in there all is said again, for this producer
    )
    notes = [note for note in checkpoint.notes if note.kind != "not-carried" or (note.key or "").startswith(below)]
    optim = checkpoint.optim
    if optim is not None and form.optim is None:
        notes.append(Note("not-carried", f"the optimizer is left out: flavor {flavor.name} has no place for it"))
        optim = None
    extra, rank_extra = checkpoint.extra, checkpoint.rank_extra
    if form.extra is None:
        files = [*beside.files, *(name for note in beside.notes for name in note.keys)]  # copied or not: it is said
        said = {re.sub(r"(_\d+)?\.[^.]*$", "", name) for name in files}
        extra, rank_extra = {}, ()
        if optim is not None and only is None:
            form, extra = _with_schedule(checkpoint, flavor, form, beside, sources)
            said.update(map(str, _schedule_path(checkpoint)[:1]) if extra else ())
            if divided and len(optim.param_groups or ()) == 1:  # lists have an entry for each group
                ones = {key: value for key, value in extra.items() if isinstance(value, list) and len(value) == 1}
                extra |= {key: value * 2 for key, value in ones.items()}
        names = tuple(str(key) for key in checkpoint.extra if key not in said)
        if names:
            message = f"left out, because flavor {flavor.name} has no place for them: {', '.join(names)}"
            notes.append(Note("not-carried", message, keys=names))
    elif form.model.at == () and form.extra.container is None:  # a tensor there would be one of the model's names
        names = tuple(str(key) for key, value in extra.items() if isinstance(value, Tensor))
        if names:
            message = f"left out: flavor {flavor.name} takes tensors at the top as the model's: {', '.join(names)}"
            notes.append(Note("not-carried", message, keys=names))
            extra = {key: value for key, value in extra.items() if not isinstance(value, Tensor)}
            rank_extra = tuple({key: value for key, value in each.items() if key not in names} for each in rank_extra)
    taken = replace(
        checkpoint,
        optim=optim,
        extra=extra,
        rank_extra=rank_extra,
        files=(*checkpoint.files, *beside.sources),
        notes=(*notes, *beside.notes),
    )
    return _adapt_extras(taken, flavor, form, sources), form, beside.files


def _with_schedule(
    checkpoint: Checkpoint, flavor: Flavor, form: Form, beside: SideFiles, sources: Sources
) -> tuple[Form, dict[Key, Value]]:
    """``form`` with a place for the source's LR scheduler, in the file that ``flavor`` has for it, and that as extras.

    ``beside`` gets the notes: of this file, and of what is lacking.
    """
    names, extra = set(beside.files), dict[Key, Value]()
    schedule = _schedule(checkpoint)
    file = flavor.schedule_file
    if file and file not in names and isinstance(schedule, dict) and _has(schedule, _ANY_SCHEDULE):
        form, extra = replace(form, extra=Place(file, container=Container.TORCH, layout=Layout.FULL)), schedule
        beside.notes.append(_schedule_note(file, schedule, checkpoint, flavor, sources))
        names.add(file)
    beside.notes += [Note("unconfigured", message) for message in lacking("the target", flavor, names)]
    return form, extra


def _adapt_extras(checkpoint: Checkpoint, flavor: Flavor, form: Form, sources: Sources) -> Checkpoint:
    """``checkpoint`` with the extras that ``form``'s loader opens, as it wants them; what was done is in the notes.

    An extra of a name that it opens, but not made as it makes it, is left out; the state of the source's LR scheduler
    goes where this producer has it; what its loader stops without is added.
    """
    notes = list(checkpoint.notes)
    extra, rank_extra = dict(checkpoint.extra), checkpoint.rank_extra
    foreign = tuple(key for key, keys in form.opened if extra.get(key) is not None and not _has(extra[key], keys))
    if foreign:
        extra = {key: value for key, value in extra.items() if key not in foreign}
        rank_extra = tuple({key: value for key, value in each.items() if key not in foreign} for each in rank_extra)
        message = f"left out, because flavor {flavor.name} keeps something else under that name: {', '.join(foreign)}"
        notes.append(Note("not-carried", message, keys=foreign))
    if form.schedule is not None and form.schedule[0] not in extra:
        place, keys = form.schedule
        schedule = _schedule(checkpoint)
        if isinstance(schedule, dict) and _has(schedule, keys):
            extra[place] = schedule
            notes.append(_schedule_note(place, schedule, checkpoint, flavor, sources))
    absent: list[tuple[str, Value]] = [
        (key, [] if value == () else value) for key, value in form.defaults if key not in extra
    ]
    if form.counter and type(extra.get(form.counter)) is not int:
        absent.append((form.counter, _steps(checkpoint, sources)))
    if absent:
        said = ", ".join(f"{key} = {value!r}" for key, value in absent)
        notes.append(Note("inferred", f"what {flavor.title} needs and the source does not have was added: {said}"))
        extra.update(absent)
    return replace(checkpoint, extra=extra, rank_extra=rank_extra, notes=tuple(notes))


def _schedule_note(
    place: str, schedule: Mapping[Key, Value], checkpoint: Checkpoint, flavor: Flavor, sources: Sources
) -> Note:
    """That ``schedule`` goes to ``place``, and what of it another framework may take otherwise."""
    message = f"{place} is the state of the source's LR scheduler, unchanged"
    if flavor.schedule_file and _LAMBDAS not in schedule:
        message += ", which is no LambdaLR: resume with a scheduler of the same class"
    counted, steps = schedule.get("last_epoch"), _steps(checkpoint, sources)
    source = flavor_named(checkpoint.flavor)
    by_process = source is not None and source.counts_processes
    if by_process and not flavor.counts_processes and isinstance(counted, int) and counted != steps:
        message += (
            f"; it counts {counted} steps, and the optimizer {steps}: {checkpoint.flavor} counts one for each process"
        )
    elif flavor.counts_processes and not by_process:
        message += f"; {flavor.name} will count one step for each process, unless split_batches is set"
    return Note("inferred", message)


def _schedule(checkpoint: Checkpoint) -> Value:
    """The state dict of the source's LR scheduler, None where its producer keeps none that is torch's own."""
    path = _schedule_path(checkpoint)
    value: Value = checkpoint.extra if path else None
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        else:
            value = value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None
    return value


def _schedule_path(checkpoint: Checkpoint) -> tuple[Step, ...]:
    source = flavor_named(checkpoint.flavor)
    paths = source.schedules if source is not None else ()
    return next((path for path in paths if path[0] in checkpoint.extra), ())


def _steps(checkpoint: Checkpoint, sources: Sources) -> int:
    """How many steps the optimizer has made of its first parameter that counts them; 0 where none does."""
    entries = checkpoint.optim.state.values() if checkpoint.optim is not None else ()
    step = next((entry["step"] for entry in entries if "step" in entry), 0)
    if isinstance(step, Tensor) and step.numel == 1 and step.dtype.numpy is not None:
        return int(np.frombuffer(sources.read_elements(checkpoint.files, step), step.dtype.numpy)[0])
    return int(step) if isinstance(step, (int, float)) else 0


def _has(value: Value, keys: frozenset[str]) -> bool:
    return isinstance(value, dict) and keys <= value.keys()
