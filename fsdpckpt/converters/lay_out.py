"""Lays out the target files of a conversion: plain, or in a producer's form."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import TransformedCheckpoint
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, NamedSection, Note, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.sections import alone
from fsdpckpt.ir.targets import LinkedFile, Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.text_keys import LostDict
from fsdpckpt.ir.values import Key, Value, find_value, value_text
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers import PLAIN_MESH, PLAIN_PATHS, Form, SectionPath
from fsdpckpt.readers.protocol import dotted
from fsdpckpt.readers.side_files import notes_on_copies
from fsdpckpt.writers import DtypeRule, Writer, WriteSpec
from fsdpckpt.writers.state_dicts import extras_of_rank


def writer_of(container: Container, layout: Layout, *, by_parameter: bool = False) -> Writer:
    """The writer of each container and layout that can be written. A conversion imports only that of its target.

    ``by_parameter``: a file for each parameter and state, as DeepSpeed's universal checkpoints have them.
    """
    if by_parameter:
        from fsdpckpt.writers import universal

        return universal.lay_out
    if container is Container.DCP:
        from fsdpckpt.writers import dcp

        return dcp.lay_out
    if container is Container.SAFETENSORS:
        from fsdpckpt.writers import safetensors

        return safetensors.lay_out
    if layout is Layout.FULL:
        from fsdpckpt.writers import torch_full

        return torch_full.lay_out
    if layout is Layout.SHARDED:
        from fsdpckpt.writers import torch_ranks

        return torch_ranks.lay_out
    from fsdpckpt.flat import flatten

    return flatten.lay_out


def dtype_rule(options: ConvertOptions) -> DtypeRule:
    """``--dtype`` and ``--optim-dtype`` in the form the writers take."""
    return DtypeRule(
        model=DTYPES[options.dtype] if options.dtype is not None else None,
        optim=DTYPES[options.optim_dtype] if options.optim_dtype is not None else None,
    )


def lay_out(
    transformed: TransformedCheckpoint,
    decision: Decision,
    side_files: Mapping[str, Tensor],
    linkable: frozenset[int] = frozenset(),
) -> Target:
    """Lay out the target files of ``transformed`` with the writers for ``decision``.

    ``side_files``: files to copy unchanged into a producer's form, by target name. ``linkable``: the numbers of the
    source files that may be linked. Raises what the writers raise, and NeedsInformationError if the source's DTensors
    name several device types.
    """
    if decision.form is not None:
        return _lay_out_form(transformed, decision, decision.form, side_files, linkable)
    paths, flattened = _source_paths(transformed.checkpoint, decision)
    document = _SectionGroup(
        "", decision.container, decision.layout, transformed.checkpoint, paths, flattened_keys=flattened
    )
    output = _lay_out_document(document, transformed, decision, linkable)
    output.notes += _moves(transformed.checkpoint, paths, decision)
    return output


def _moves(checkpoint: Checkpoint, paths: Mapping[Section, SectionPath], decision: Decision) -> list[Note]:
    """A note on the main sections that are under other keys in a plain target than in the source, whose script would
    look for them there. None on one that has a file of its own, or is all that is taken.
    """
    if decision.options.only is not None or not _share_a_document(decision):
        return []
    moves: list[str] = []
    for section, nesting in checkpoint.origin.nesting.items():
        keys = paths[section].keys if section in paths else ()
        if checkpoint.has(section) and nesting and nesting != keys:
            word = "model" if section is Section.MODEL else "optimizer"
            moves.append(f"the {word} under {dotted(keys)} (SRC: {dotted(nesting)})")
    return [Note("renamed", f"the target has {' and '.join(moves)}")] if moves else []


def _share_a_document(decision: Decision) -> bool:
    """Whether a plain target has all sections in one file or DCP directory, and their keys in it."""
    return decision.container is Container.DCP or (
        decision.container is Container.TORCH and decision.layout is Layout.FULL
    )


def _source_paths(checkpoint: Checkpoint, decision: Decision) -> tuple[Mapping[Section, SectionPath], bool]:
    """The keys of the main sections in a plain target, and whether the optimizer's are flattened.

    From DCP to DCP both stay as they are. So does the place of a section if the extras or a named section have a key
    that it would get: ``{"model": {"state_dict": ..., "config": ...}}``. Raises SourceUnsupportedError if a list or a
    value has that key.
    """
    both_dcp = checkpoint.container is Container.DCP and decision.container is Container.DCP
    extras = [extras_of_rank(checkpoint, rank) for rank in range(max(1, len(checkpoint.rank_extra)))]
    taken = {key for extra in extras for key in extra}
    in_source: dict[Section, tuple[str | int, ...]] = {}
    for section, nesting in checkpoint.origin.nesting.items():
        if checkpoint.has(section):
            in_source[section] = tuple(key for key in nesting if isinstance(key, (str, int)))
    moved: dict[Section, SectionPath] = {}
    for section, path in PLAIN_PATHS.items():
        place = in_source.get(section)
        others = [other for each, other in in_source.items() if each is not section]
        # Of several directories each may have had its section at the top. In one, a section would be inside of another;
        # but a model's names may be at the top, beside the key of an optimizer.
        beside = section is Section.MODEL and place == () and () not in others
        inside = place is not None and not beside and any(other[: len(place)] == place for other in others)
        stays = both_dcp and place is not None and not inside
        plain_key_is_taken = bool(path.keys) and path.keys[0] in taken
        kept = plain_key_is_taken and bool(place) and _is_in_dicts(checkpoint.origin.nesting[section])
        moved[section] = replace(path, keys=place) if place is not None and (stays or kept) else path
        if place is not None and not stays and not kept and _share_a_document(decision):
            for extra in extras:
                _require_free(checkpoint, section, path.keys, extra)
    by_name = checkpoint.optim is not None and checkpoint.optim.key_type != "id"
    return moved, both_dcp and checkpoint.origin.flattened_keys and by_name


def _is_in_dicts(path: tuple[Key, ...]) -> bool:
    return all(type(key) is str for key in path)


def _require_free(checkpoint: Checkpoint, section: Section, path: tuple[Key, ...], extra: dict[Key, Value]) -> None:
    """Raises SourceUnsupportedError if the place of a main section is that of an extra. Into a dict of extras goes what
    was beside it in a dict, and the keys of a rank's own file.
    """
    found = find_value(extra, path) if path else None
    place = checkpoint.origin.nesting.get(section, ())
    if path and path[0] in extra and (not isinstance(found, dict) or not _is_in_dicts(place)):
        name, key = dotted(path), dotted(place)
        raise SourceUnsupportedError(
            f"the {section} and an extra would both get the key {name}",
            key=name,
            file=checkpoint.source,
            expected=f"a dict with the {section}, or no {name}",
            found=value_text(extra[path[0]]),
            why=f"a plain target has the {section} under {name}, and the source has it under {key or 'no key'}, "
            f"beside another {name}",
            next_step=f"take it alone, with {flags.only(str(section))}, or rename that entry in the source",
        )


@dataclass(frozen=True, slots=True)
class _SectionGroup:
    """Sections that share one file, one set of rank files, or one DCP directory.

    ``path``: the file, or what precedes the names in a directory. ``section_paths``, ``flattened_keys``: as in
    ``WriteSpec``.
    """

    path: str
    container: Container
    layout: Layout
    checkpoint: Checkpoint
    section_paths: Mapping[Section, SectionPath]
    flattened_keys: bool


def _lay_out_document(
    document: _SectionGroup,
    transformed: TransformedCheckpoint,
    decision: Decision,
    linkable: frozenset[int],
) -> Target:
    """Lay out the files of one document with the writer for its container and layout."""
    options, plain = decision.options, decision.form is None
    container, layout = document.container, document.layout
    by_parameter = decision.form is not None and decision.form.by_parameter
    writer = writer_of(container, layout, by_parameter=by_parameter)
    return writer(
        document.checkpoint,
        WriteSpec(
            dtypes=dtype_rule(options),
            world_size=1 if layout is Layout.FULL and container is Container.DCP else decision.world_size,
            path=document.path,
            section_paths=document.section_paths,
            flattened_keys=document.flattened_keys,
            unwrap=plain and options.only is not None,
            tensor=options.tensor,
            mesh=decision.form.mesh if decision.form is not None else PLAIN_MESH,
            mesh_device=options.mesh_device,
            meshes=decision.mesh.meshes if decision.mesh is not None and layout is Layout.SHARDED else (),
            torch_version=options.torch_version,
            max_shard_size=options.max_shard_size,
            single_file=plain and not decision.directory,
            weights_only=not plain,
            default_loadable=plain,
            units=transformed.units,
            key_type=transformed.key_type or "id",
            linkable=linkable,
            by_item=decision.form is not None and decision.form.by_item,
        ),
    )


def _lay_out_form(
    transformed: TransformedCheckpoint,
    decision: Decision,
    form: Form,
    side_files: Mapping[str, Tensor],
    linkable: frozenset[int],
) -> Target:
    """Lay out every file of ``form``: the sections, the producer's small files, and the side files unchanged."""
    files: list[TargetFile] = []
    links: list[LinkedFile] = []
    lost: list[LostDict] = []
    notes: list[Note] = []
    checkpoint = transformed.checkpoint
    for document in _documents(checkpoint, form):
        target = _lay_out_document(document, transformed, decision, linkable)
        files += target.files
        links += target.links
        lost += target.lost if not document.path else ()
        notes += [note for note in target.notes if note not in notes]
    for name, text in form.small_files:
        file = TargetFile(name)
        file.add_literal(text.replace("{world_size}", str(decision.world_size or checkpoint.world_size)).encode())
        files.append(file)
    written = {file.path for file in files}
    copied = [name for name in side_files if name not in written]
    for name in copied:
        file = TargetFile(name)
        file.add_write_item(side_files[name])
        files.append(file)
    notes += notes_on_copies(copied, side_files, checkpoint)
    return Target(sorted(files, key=_is_metadata), notes, links, tuple(lost))


def _is_metadata(file: TargetFile) -> bool:
    return posixpath.basename(file.path) == ".metadata"  # sorted last


def _documents(checkpoint: Checkpoint, form: Form) -> Iterator[_SectionGroup]:
    """The sections of ``checkpoint`` that ``form`` has a place for, grouped by file, container and layout."""
    required = form.extra is not None and form.extra.container is not None  # its loader opens that file in any case
    section_paths = {
        Section.MODEL: form.model if checkpoint.model is not None else None,
        Section.OPTIM: form.optim if checkpoint.optim is not None else None,
        Section.EXTRA: form.extra if checkpoint.extra or checkpoint.rank_extra or required else None,
    }
    documents: dict[tuple[str, Container, Layout], dict[Section, SectionPath]] = {}
    named: dict[tuple[str, Container, Layout], list[NamedSection]] = {}
    for section, section_path in section_paths.items():
        if section_path is not None:
            documents.setdefault(_document_of(section_path, form), {})[section] = section_path
    for each in checkpoint.named if not form.several else ():
        section_path = form.model if each.section is Section.MODEL else form.optim
        if section_path is not None:
            key = _document_of(section_path, form)
            documents.setdefault(key, {}).setdefault(each.section, section_path)
            named.setdefault(key, []).append(each)
    for key, shared in documents.items():
        _, container, layout = key
        sections = replace(
            checkpoint,
            model=checkpoint.model if Section.MODEL in shared else None,
            optim=checkpoint.optim if Section.OPTIM in shared else None,
            extra=checkpoint.extra if Section.EXTRA in shared else {},
            rank_extra=checkpoint.rank_extra if Section.EXTRA in shared else (),
            named=tuple(named.get(key, ())),
        )
        path = next(iter(shared.values())).file
        yield _SectionGroup(path, container, layout, sections, shared, flattened_keys=form.flattened)
    if form.several:
        yield from _numbered_documents(checkpoint, form)


def _numbered_documents(checkpoint: Checkpoint, form: Form) -> Iterator[_SectionGroup]:
    """A document for each of several models and optimizers, which ``adapt`` has numbered."""
    for section in (Section.MODEL, Section.OPTIM):
        of_kind = [named for named in checkpoint.named if named.section is section]
        for number, named in enumerate(of_kind):
            place = form.numbered(section, number)
            if place is None:
                continue
            _, container, layout = _document_of(place, form)
            view = alone(checkpoint, named)
            model, optim = (view.model, None) if section is Section.MODEL else (None, view.optim)
            single = replace(view, model=model, optim=optim)
            yield _SectionGroup(place.file, container, layout, single, {section: place}, flattened_keys=form.flattened)


def _document_of(section_path: SectionPath, form: Form) -> tuple[str, Container, Layout]:
    """The file, or the kind of file, that holds ``section_path``, with its container and layout."""
    file = "{rank}" if "{rank}" in section_path.file else section_path.file
    return file, section_path.container or form.container, section_path.layout or form.layout
