"""Writes a producer's own form: each section where the producer keeps it, by the writer of its container."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdpckpt.converters.flavored_extras import with_extras_for
from fsdpckpt.converters.passes import Rewritten
from fsdpckpt.converters.rank_files import lay_out_ranks
from fsdpckpt.errors import InternalError
from fsdpckpt.flat.flatten import write as torch_flat
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, Note
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers.forms import Flavor, Form, Nesting, Place, RankNames
from fsdpckpt.readers.beside import side_files
from fsdpckpt.storage.sources import Sources
from fsdpckpt.writers import dcp, safetensors, torch_full
from fsdpckpt.writers.dtype_rule import DtypeRule

__all__ = ["for_flavor", "lay_out_flavor"]


def for_flavor(
    checkpoint: Checkpoint, flavor: Flavor, form: Form, *, world_size: int | None, sources: Sources
) -> tuple[Checkpoint, Mapping[str, Tensor]]:
    """``checkpoint`` with the sections that ``form`` has a place for, and the files beside it that go along."""
    beside = side_files(checkpoint, flavor, world_size, sources)
    notes = [note for note in checkpoint.notes if note.kind != "not-carried"]  # said again, for this producer
    optim = checkpoint.optim
    if optim is not None and form.optim is None:
        notes.append(
            Note("not-carried", f"the optimizer is not carried: the form of {flavor.title} has no place for it")
        )
        optim = None
    extra, rank_extra = checkpoint.extra, checkpoint.rank_extra
    if form.extra is None:
        same = checkpoint.flavor == flavor.name  # then extras that were read from files beside it go along as files
        files = {re.sub(r"(_\d+)?\.[^.]*$", "", name) for name in beside.files} if same else set()
        names = tuple(str(key) for key in extra if key not in files)
        if names:
            message = f"not carried, for the form of {flavor.title} has no place for them: {', '.join(names)}"
            notes.append(Note("not-carried", message, keys=names))
        extra, rank_extra = {}, ()
    elif form.model.at == () and form.extra.container is None:  # a tensor there would be one of the model's names
        names = tuple(str(key) for key, value in extra.items() if isinstance(value, Tensor))
        if names:
            message = f"not carried, as a tensor at the top of {flavor.title} is part of the model: {', '.join(names)}"
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
    return with_extras_for(taken, flavor, form), beside.files


@dataclass(slots=True)
class _Document:
    """The sections of one file, or of one set of files by rank, or of one DCP directory."""

    place: Place
    checkpoint: Checkpoint
    nesting: Nesting
    names: RankNames


def lay_out_flavor(
    rewritten: Rewritten,
    form: Form,
    beside: Mapping[str, Tensor],
    *,
    world_size: int | None,
    options: ConvertOptions,
    dtypes: DtypeRule,
) -> Target:
    """Every file of ``form``: the sections', the producer's small ones, and the side files as they are."""
    files: list[TargetFile] = []
    notes: list[Note] = []
    checkpoint = rewritten.checkpoint
    for document in _documents(checkpoint, form):
        target = _lay_out(document, form, rewritten, world_size, options, dtypes)
        files += target.files
        notes += [note for note in target.notes if note not in notes]
    for name, text in form.texts:
        file = TargetFile(name)
        file.literal(text.replace("{world_size}", str(world_size or checkpoint.world_size)).encode())
        files.append(file)
    written = {file.path for file in files}
    for name, tensor in beside.items():
        if name not in written:
            file = TargetFile(name)
            file.write_item(tensor)
            files.append(file)
    return Target(sorted(files, key=_metadata_last), notes)


def _metadata_last(file: TargetFile) -> bool:
    return posixpath.basename(file.path) == ".metadata"


def _documents(checkpoint: Checkpoint, form: Form) -> list[_Document]:
    """The sections that ``checkpoint`` has and ``form`` has a place for, those of one place together."""
    empty = replace(checkpoint, model=None, optim=None, extra={}, rank_extra=())
    found: dict[tuple[str, Container, Layout], _Document] = {}

    def document(place: Place) -> _Document:
        key = (place.file if "{rank}" not in place.file else "{rank}", *_form_of(place, form))
        if key not in found:
            found[key] = _Document(place, empty, Nesting(flattened=form.flattened), RankNames())
        return found[key]

    if checkpoint.model is not None:
        own = document(form.model)
        own.checkpoint = replace(own.checkpoint, model=checkpoint.model)
        own.nesting = replace(own.nesting, model=form.model.at)
        own.names = replace(own.names, model=form.model.file)
    if checkpoint.optim is not None and form.optim is not None:
        own = document(form.optim)
        own.checkpoint = replace(own.checkpoint, optim=checkpoint.optim)
        own.nesting = replace(own.nesting, optim=form.optim.at)
        own.names = replace(own.names, optim=form.optim.file)
    own_file = form.extra is not None and form.extra.container is not None  # its loader opens it in any case
    if form.extra is not None and (checkpoint.extra or checkpoint.rank_extra or own_file):
        own = document(form.extra)
        own.checkpoint = replace(own.checkpoint, extra=checkpoint.extra, rank_extra=checkpoint.rank_extra)
        own.names = replace(own.names, extra=form.extra.file)
    return list(found.values())


def _form_of(place: Place, form: Form) -> tuple[Container, Layout]:
    return place.container or form.container, place.layout or form.layout


def _lay_out(
    document: _Document,
    form: Form,
    rewritten: Rewritten,
    world_size: int | None,
    options: ConvertOptions,
    dtypes: DtypeRule,
) -> Target:
    container, layout = _form_of(document.place, form)
    checkpoint, nesting = document.checkpoint, document.nesting
    if container is Container.SAFETENSORS:
        return safetensors.lay_out(
            checkpoint, max_shard_size=options.max_shard_size, single_file=False, dtypes=dtypes, bare=True
        )
    if container is Container.DCP:
        target = dcp.lay_out(checkpoint, world_size=world_size, dtypes=dtypes, nesting=nesting)
        for file in target.files:
            file.path = document.place.file + file.path
        return target
    if layout is Layout.FULL:
        return torch_full.lay_out(checkpoint, dtypes=dtypes, path=document.place.file, nesting=nesting)
    if world_size is None:
        raise InternalError("files by rank without a number of ranks")
    names = document.names
    if layout is Layout.FLATTENED and rewritten.units is not None:
        key_type = rewritten.key_type or "id"
        return torch_flat.lay_out(
            checkpoint, units=rewritten.units, world_size=world_size, key_type=key_type, dtypes=dtypes, names=names
        )
    return lay_out_ranks(checkpoint, world_size=world_size, options=options, dtypes=dtypes, mesh=form.mesh, names=names)
