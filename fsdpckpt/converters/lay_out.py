"""Lays out the target files of a conversion: plain, or in a producer's form."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.converters.transform import TransformedCheckpoint
from fsdpckpt.flat import flatten as torch_flat
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, Note, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import LinkedFile, Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers import PLAIN_MESH, PLAIN_NAMES, PLAIN_NESTING, Form, Nesting, Place, RankNames
from fsdpckpt.writers import DtypeRule, Writer, WriteSpec, dcp, safetensors, torch_full, torch_ranks, universal

WRITERS: Mapping[tuple[Container, Layout], Writer] = {
    (Container.TORCH, Layout.FULL): torch_full.lay_out,
    (Container.TORCH, Layout.SHARDED): torch_ranks.lay_out,
    (Container.TORCH, Layout.FLATTENED): torch_flat.lay_out,
    (Container.DCP, Layout.FULL): dcp.lay_out,
    (Container.DCP, Layout.SHARDED): dcp.lay_out,
    (Container.SAFETENSORS, Layout.FULL): safetensors.lay_out,
}
"""The writer of each container and layout that can be written."""


def dtype_rule(options: ConvertOptions) -> DtypeRule:
    """``--dtype`` and ``--optim-dtype`` in the form the writers take."""
    return DtypeRule(
        model=DTYPES[options.dtype] if options.dtype is not None else None,
        optim=DTYPES[options.optim_dtype] if options.optim_dtype is not None else None,
    )


def lay_out(
    transformed: TransformedCheckpoint,
    spec: TargetSpec,
    side_files: Mapping[str, Tensor],
    linkable: frozenset[int] = frozenset(),
) -> Target:
    """Lay out the target files of ``transformed`` with the writers for ``spec``.

    ``side_files``: files to copy unchanged into a producer's form, by target name. ``linkable``: the numbers of the
    source files that may be linked. Raises what the writers raise, and NeedsInformationError if the source's DTensors
    name several device types.
    """
    if spec.form is not None:
        return _lay_out_form(transformed, spec, spec.form, side_files, linkable)
    document = _Document(Place(""), transformed.checkpoint, _kept_nesting(transformed.checkpoint, spec))
    return _lay_out_document(document, spec.container, spec.layout, transformed, spec, linkable)


def _kept_nesting(checkpoint: Checkpoint, spec: TargetSpec) -> Nesting:
    """From DCP to DCP, keep the keys that hold the sections and the form of the optimizer."""
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
    """The sections of one file, one set of rank files, or one DCP directory."""

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
    linkable: frozenset[int],
) -> Target:
    """Lay out the files of one document with the writer for its container and layout."""
    options, plain = spec.options, spec.form is None
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
    side_files: Mapping[str, Tensor],
    linkable: frozenset[int],
) -> Target:
    """Lay out every file of ``form``: the sections, the producer's small files, and the side files unchanged."""
    files: list[TargetFile] = []
    links: list[LinkedFile] = []
    notes: list[Note] = []
    checkpoint = transformed.checkpoint
    for document in _documents(checkpoint, form):
        target = _lay_out_document(document, *_format_of(document.place, form), transformed, spec, linkable)
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
    """The sections of ``checkpoint`` that ``form`` has a place for, grouped by place."""
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
