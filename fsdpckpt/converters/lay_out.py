"""Lays out the target files of a conversion: plain, or in the form in which one producer saves."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.converters.transform import TransformedCheckpoint
from fsdpckpt.errors import InternalError, NeedsInformationError
from fsdpckpt.flat.flatten import write as torch_flat
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, Note
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options import ConvertOptions, TensorForm
from fsdpckpt.producers.forms import PLAIN_MESH, PLAIN_NAMES, PLAIN_NESTING, Form, Nesting, Place, RankNames
from fsdpckpt.writers import dcp, safetensors, torch_full, torch_ranks
from fsdpckpt.writers.dtype_rule import DtypeRule

__all__ = ["dtype_rule", "lay_out"]


def dtype_rule(options: ConvertOptions) -> DtypeRule:
    """``--dtype`` and ``--optim-dtype`` as the writers take them."""
    return DtypeRule(
        model=DTYPES[options.dtype] if options.dtype is not None else None,
        optim=DTYPES[options.optim_dtype] if options.optim_dtype is not None else None,
    )


def lay_out(
    transformed: TransformedCheckpoint, spec: TargetSpec, options: ConvertOptions, side_files: Mapping[str, Tensor]
) -> Target:
    """The target files of ``transformed``, laid out by the writers of ``spec``.

    ``side_files``: files that are copied unchanged into a producer's form, by target name. Raises what the writers
    raise, and NeedsInformationError when the source's DTensors name several device types.
    """
    writer = _Writer(transformed, spec, options)
    if spec.form is None:
        return writer.lay_out(_Document(Place(""), transformed.checkpoint), spec.container, spec.layout)
    return _lay_out_form(writer, spec.form, transformed.checkpoint, side_files)


@dataclass(slots=True)
class _Document:
    """The sections of one file, or of one set of files by rank, or of one DCP directory."""

    place: Place
    checkpoint: Checkpoint
    nesting: Nesting = PLAIN_NESTING
    names: RankNames = PLAIN_NAMES


@dataclass(frozen=True, slots=True)
class _Writer:
    """Lays documents out by the writer of their container and layout."""

    transformed: TransformedCheckpoint
    spec: TargetSpec
    options: ConvertOptions

    def lay_out(self, document: _Document, container: Container, layout: Layout) -> Target:
        spec, options, dtypes = self.spec, self.options, dtype_rule(self.options)
        checkpoint, plain = document.checkpoint, spec.form is None
        if container is Container.SAFETENSORS:
            return safetensors.lay_out(
                checkpoint,
                max_shard_size=options.max_shard_size,
                single_file=plain and not spec.directory,
                dtypes=dtypes,
                bare=not plain,
            )
        if container is Container.DCP:
            ranks = 1 if plain and layout is Layout.FULL else spec.world_size
            target = dcp.lay_out(checkpoint, world_size=ranks, dtypes=dtypes, nesting=document.nesting)
            for file in target.files:
                file.path = document.place.file + file.path
            return target
        if layout is Layout.FULL:
            bare = plain and options.only is not None
            return torch_full.lay_out(
                checkpoint, dtypes=dtypes, path=document.place.file, bare=bare, nesting=document.nesting
            )
        if spec.world_size is None:
            raise InternalError("files by rank without a number of ranks")
        if layout is Layout.FLATTENED and self.transformed.units is not None:
            return torch_flat.lay_out(
                checkpoint,
                units=self.transformed.units,
                world_size=spec.world_size,
                key_type=self.transformed.key_type or "id",
                dtypes=dtypes,
                names=document.names,
            )
        return self._lay_out_ranks(document, spec.world_size)

    def _lay_out_ranks(self, document: _Document, world_size: int) -> Target:
        """The sharded files of ``world_size`` ranks.

        A live model takes DTensors only from a mesh of its own device type: that of ``--mesh-device``, else of the
        source's DTensors, else the form's usual one, with a note.
        """
        mesh = self.spec.form.mesh if self.spec.form is not None else PLAIN_MESH
        device = self.options.mesh_device or _mesh_device(document.checkpoint)
        if device is not None:
            mesh = replace(mesh, device=device)
        target = torch_ranks.lay_out(
            document.checkpoint,
            world_size=world_size,
            tensor=self.options.tensor,
            dtypes=dtype_rule(self.options),
            names=document.names,
            mesh=mesh,
        )
        if device is None and self.options.tensor is TensorForm.DTENSOR:
            text = f"DTensors say that their mesh is on {mesh.device} devices; the source does not say (--mesh-device)"
            target.notes.append(Note("inferred", text))
        return target


def _mesh_device(checkpoint: Checkpoint) -> str | None:
    devices = sorted(checkpoint.mesh_devices)
    if len(devices) > 1:
        raise NeedsInformationError(
            f"the DTensors of {checkpoint.source} are on meshes of several device types",
            file=checkpoint.source,
            found=", ".join(devices),
            why="a model loads DTensors only from a mesh of its own device type",
            next_step=f"add --mesh-device {devices[0]}, or the one that the loading job has",
        )
    return devices[0] if devices else None


def _lay_out_form(writer: _Writer, form: Form, checkpoint: Checkpoint, side_files: Mapping[str, Tensor]) -> Target:
    """Every file of ``form``: those of the sections, the producer's small ones, and the side files unchanged."""
    files: list[TargetFile] = []
    notes: list[Note] = []
    for document in _documents(checkpoint, form):
        target = writer.lay_out(document, *_format_of(document.place, form))
        files += target.files
        notes += [note for note in target.notes if note not in notes]
    for name, text in form.texts:
        file = TargetFile(name)
        file.literal(text.replace("{world_size}", str(writer.spec.world_size or checkpoint.world_size)).encode())
        files.append(file)
    written = {file.path for file in files}
    for name, tensor in side_files.items():
        if name not in written:
            file = TargetFile(name)
            file.write_item(tensor)
            files.append(file)
    return Target(sorted(files, key=_is_metadata), notes)


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
