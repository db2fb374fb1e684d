"""Opens the checkpoint at a path: finds its parts, reads each with its reader, and joins them.

A path is one file, a directory that is one checkpoint, a directory of parts (model and optimizer side by side), or a
directory with exactly one checkpoint below it. If several answers are possible, none is chosen: the error lists all.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from fsdpckpt.errors import (
    EMPTY,
    FsdpckptError,
    NeedsInformationError,
    SourceError,
    SourceIncompleteError,
    SourceMissingError,
    SourceUnrecognisedError,
    SourceUnsafeError,
    SourceUnsupportedError,
    UsageError,
    to_copy,
)
from fsdpckpt.ir.checkpoint import Checkpoint, Note, Section
from fsdpckpt.ir.invariants import problems
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.process import without_collection
from fsdpckpt.producers.table import EXPORT_DIRECTORIES, export_files, recognise
from fsdpckpt.readers import READERS
from fsdpckpt.readers.join import ReadPart, join, read_part, without_exports
from fsdpckpt.readers.manifest import (
    FoundUnits,
    find_units,
    read_manifest,
    with_manifest,
    with_manifest_beside,
    with_manifests_of_parts,
    with_units,
)
from fsdpckpt.readers.protocol import MANIFEST, UNITS, FileTable, Items, Part, ReadOptions
from fsdpckpt.readers.side_files import missing_sections, resuming_producer, with_flavor
from fsdpckpt.readers.torch_ranks import may_be_torch
from fsdpckpt.storage import UPLOADING, Entry, is_url
from fsdpckpt.storage.sources import RemainingSources, Sources
from fsdpckpt.text import bytes_text, names_text, some_of

# Sub-directories named like this are checkpoints of their own, not parts of one.
_NUMBERED = re.compile(r"(?:^|[_-])(?:checkpoint|ckpt|step|global_step|epoch|ep|iter|iteration)[-_]?\d+", re.IGNORECASE)
# A checkpoint in parts has directories for the model, the optimizer, data loaders, samplers, hardly for more.
_MAX_DIRECTORIES = 6
_EACH = "each of these directories is a checkpoint"
_LEFT_OUT = (SourceUnsafeError, SourceUnrecognisedError, SourceUnsupportedError)  # of a file beside the checkpoint
_DEPTH = 3  # levels below SRC that are searched for the one checkpoint: run / step / role


def open_checkpoint(
    source: str,
    *,
    sources: Sources,
    locate: bool | Items = True,
    only: Section | None = None,
    units: Units | None = None,
    ignore_file: tuple[str, ...] = (),
    as_dcp: bool = False,
) -> Checkpoint:
    """Read everything about the checkpoint at ``source`` (file, directory or URL) but its tensor data.

    ``units``: the order of each rank's optimizer, used if no units are found beside the checkpoint. ``ignore_file``:
    globs of files and directories to leave out; the caller then calls ``require_matches``. For ``locate``, ``only`` and
    ``as_dcp`` see ``ReadOptions``.

    Raises SourceMissingError, SourceUnrecognisedError, SourceIncompleteError, NeedsInformationError (several
    candidates), and what the readers raise. Problems that do not prevent reading are in ``Checkpoint.problems``.
    """
    if not source:
        raise UsageError("the path of a checkpoint is empty", why=EMPTY, next_step="name a file or a directory")
    entry = sources.stat(source)
    if entry is None:
        raise missing(source)
    remaining = RemainingSources(sources, source, ignore_file)
    opening = _Opening(source, remaining, ReadOptions(locate, only, as_dcp), units)
    with without_collection():
        checkpoint = opening.directory() if entry.directory else opening.file(entry)
        checkpoint.ignored = tuple(remaining.ignored)
        checkpoint.problems = (*checkpoint.problems, *problems(checkpoint))
    return checkpoint


@dataclass(slots=True)
class _Found:
    """What was found in the directory ``path``: its parts, the ``names`` of all its entries, its ``subdirectories``
    that no part needs, and ``left_out``, the files that are in no part.

    ``notes`` and ``below``, subdirectories that contain parts, are those of a search.
    """

    path: str
    names: list[str]
    parts: list[Part]
    subdirectories: list[Entry]
    left_out: list[str]
    notes: list[Note] = field(default_factory=list)
    below: list[str] = field(default_factory=list)

    def with_parts_of(self, below: Sequence[_Found]) -> _Found:
        """Add the parts found in subdirectories, and a note on the files that are left out."""
        if self.left_out:
            message = f"not copied from {self.path}: {names_text(self.left_out, 6)}"
            self.notes.append(Note("not-carried", message, self.path, keys=tuple(self.left_out)))
        for found in below:
            self.parts += found.parts
            self.notes += found.notes
            self.below += found.below or [found.path]
        return self


def _side_parts(names: Sequence[str], files: Mapping[str, Entry], sources: Sources) -> list[Part]:
    """A part for each of ``files`` that is a side file of the framework with ``names`` in a directory."""
    flavor = recognise(names)
    side_files = [file for name, file in files.items() if flavor is not None and re.search(flavor.side_files, name)]
    parts = [reader.recognise_file(file, sources) for file in side_files if may_be_torch(file) for reader in READERS]
    return [replace(part, optional=True, extras=True) for part in parts if part is not None]


def _refuse_uploads(path: str, entries: Sequence[Entry]) -> None:
    if any(entry.name == UPLOADING for entry in entries):
        raise SourceIncompleteError(
            f"{path} is not complete: it is still being uploaded, or the upload was interrupted",
            file=f"{path.rstrip('/')}/{UPLOADING}",
            why=f"fsdpckpt deletes {UPLOADING} once everything is there",
            next_step="wait for the upload to end, or run the command that began it again",
        )


class _Opening:
    def __init__(self, source: str, sources: RemainingSources, options: ReadOptions, units: Units | None) -> None:
        self.source = source
        self.sources = sources
        self.options = options
        self.files = FileTable(units)

    def file(self, entry: Entry) -> Checkpoint:
        part = next((part for reader in READERS if (part := reader.recognise_file(entry, self.sources))), None)
        if part is None:
            head = self.sources.open(self.source).read(0, min(16, entry.nbytes))
            raise SourceUnrecognisedError(
                f"{self.source} is not a checkpoint that fsdpckpt knows",
                file=self.source,
                expected="a torch.save file (zip), a safetensors file or its index, or a directory",
                found=f"{bytes_text(entry.nbytes)} beginning with {str(head)[1:]}" if head else "an empty file",
                why=None if head else "the save or the copy did not finish",
                next_step=to_copy("see what is there, and name a checkpoint", f"ls -l {_parent_quoted(self.source)}"),
            )
        try:
            read = self._read(part)
        except SourceIncompleteError as error:
            if error.rank is None:
                raise
            error.why = "each rank writes its own file, and this is one of them"
            error.next_step = f"give the directory with all of them: {_parent_quoted(self.source)}"
            raise
        checkpoint = with_flavor(join(self.source, [read], self.files, []), [entry.name], "")
        checkpoint.problems = (*checkpoint.problems, *missing_sections(checkpoint, ()))
        units = None if is_url(self.source) else _nearest_units([os.path.dirname(self.source) or "."], self.sources)
        if units is not None:
            with_units(checkpoint, units)
        with_manifest_beside(checkpoint, self.source, self.sources.all)
        return checkpoint

    def directory(self) -> Checkpoint:
        if os.path.realpath(self.source) == "/" and not is_url(self.source):
            raise SourceUnrecognisedError(
                f"{self.source} is the root of the file system, and not a checkpoint",
                file=self.source,
                next_step="name the directory of one checkpoint",
            )
        searched = self._search(self.source, _DEPTH)
        if searched is None:
            raise self._nothing_found()
        units = _nearest_units(self._directories_above(searched.path), self.sources)
        # The manifest lists files that are ignored, too.
        manifest = read_manifest(searched.path, searched.names, self.sources.all)
        recorded = manifest.units.units if manifest.units is not None else None
        if recorded is not None and recorded.orders:
            self.files.units = recorded
        elif units is not None and units.units is not None:
            self.files.units = units.units
        self.files.without_slices = manifest.without_slices
        read = self._read_parts(searched)
        if self.options.as_dcp:
            read, exports = without_exports(read)
            if exports:
                searched.notes.append(Note("not-carried", f"not in .metadata, and left out: {names_text(exports, 6)}"))
        if self.sources.ignored:
            ignored = tuple(self.sources.ignored)
            searched.notes.append(Note("ignored", f"left out by --ignore-file: {some_of(ignored, 6)}", keys=ignored))
        checkpoint = join(self.source, read, self.files, searched.notes)
        checkpoint = with_flavor(checkpoint, searched.names, searched.path)
        if units is not None:
            with_units(checkpoint, units)
        checkpoint = with_manifest(checkpoint, manifest, self.sources.all)
        with_manifests_of_parts(checkpoint, searched.path, self.sources.all)
        checkpoint.problems = (*checkpoint.problems, *missing_sections(checkpoint, searched.names))
        return checkpoint

    def _directories_above(self, path: str) -> list[str]:
        """Directories that may hold units for a checkpoint in ``path``, nearest first: up to SRC, and one
        above a step.
        """
        top = self.source.rstrip("/")
        places = [path.rstrip("/")]
        while len(places[-1]) > len(top) and "/" in places[-1]:
            places.append(places[-1].rpartition("/")[0])
        parent, name = os.path.split(places[-1])
        if _NUMBERED.search(name) and is_url(parent) == is_url(places[-1]):
            places.append(parent or ".")
        return places

    def _read_parts(self, searched: _Found) -> list[ReadPart]:
        """Read every part. Leaves out a file beside the checkpoint that cannot be read (a training script's classes).

        An error among many directories side by side means that they are several checkpoints.
        """
        read: list[ReadPart] = []
        refused: list[FsdpckptError] = []
        for part in searched.parts:
            count = len(self.files.files())
            try:
                read.append(self._read(part))
            except SourceError as error:
                if not part.optional and len(searched.below) > _MAX_DIRECTORIES:
                    raise _several_candidates(searched.path, searched.below) from None
                if not part.optional or not isinstance(error, _LEFT_OUT):
                    raise
                self.files.truncate(count)
                refused.append(error)
                names = ", ".join(error.details[:5]) or error.what
                searched.notes.append(Note("not-carried", f"{part.label} is left out: {names}", part.stem))
        if refused and all(part.auxiliary for part in read):
            raise refused[0]
        return read

    def _read(self, part: Part) -> ReadPart:
        tree = part.read(self.files, self.sources)
        if not isinstance(tree.root, dict):
            kind = "tensor" if isinstance(tree.root, Tensor) else type(tree.root).__name__
            raise SourceUnrecognisedError(
                f"{part.label} holds a single {kind}, not a state dict",
                file=part.label,
                expected="a dict of tensors, or of models and optimizers",
                found=kind,
                next_step="save a state dict: torch.save(model.state_dict(), new_path)",
            )
        read = read_part(part, tree)
        if part.ranks_inferred and not read.auxiliary and read.whole():
            raise NeedsInformationError(
                f"{part.label}: each of these files holds whole tensors",
                why="the numbers in their names may be ranks that hold the same, or different checkpoints",
                next_step="name one of the files",
                file=part.label,
            )
        return read

    def _list(self, path: str) -> _Found:
        """List the directory ``path`` without descending. Raises what ``Reader.recognise_directory`` raises."""
        entries = self.sources.list_directory(path)
        _refuse_uploads(path, entries)
        names = [entry.name for entry in entries]
        exports = export_files(names)
        hidden = [f"{entry.name}/" for entry in entries if entry.directory and entry.name.startswith(".")]
        directories = [entry for entry in entries if entry.directory and not entry.name.startswith(".")]
        apart = {*exports, MANIFEST, UNITS}
        files = {entry.name: entry for entry in entries if not entry.directory and entry.name not in apart}
        # Numbers in the names of side files are not ranks, and tensors in them are not a model.
        parts = _side_parts(names, files, self.sources)
        for part in parts:
            del files[part.name]
        unwanted: list[str] = []
        for reader in READERS:
            claim = reader.recognise_directory(path, files, self.options, self.sources)
            parts += claim.parts
            unwanted += claim.left_out
            directories = [entry for entry in directories if entry.name not in claim.directories]
            files = {name: entry for name, entry in files.items() if name not in claim.names}
        return _Found(path, names, parts, directories, [*sorted(exports), *hidden, *files, *unwanted])

    def _search(self, path: str, depth: int) -> _Found | None:
        """The parts at ``path``: those of the directory and its subdirectories, or of the one checkpoint below it."""
        found = self._list(path)
        numbered = [entry for entry in found.subdirectories if _NUMBERED.search(entry.name)]
        others = [entry for entry in found.subdirectories if entry not in numbered]
        if found.parts and all(part.optional for part in found.parts):
            only = self._producer_below(found, others if depth else []) or self._below_settings(
                found, numbered, others, depth
            )
            if only is not None:
                return only
        if found.parts:
            separate = [*numbered, *(entry for entry in others if entry.name in EXPORT_DIRECTORIES)]
            self._add_subdirectories(found, [entry for entry in others if entry not in separate], depth)
            if separate:
                names = ", ".join(entry.name for entry in separate)
                message = f"{path}: not treated as parts of this checkpoint: {names}"
                found.notes.append(Note("not-carried", message))
            return found
        searches = (self._search(entry.path, depth - 1) for entry in (*numbered, *others) if depth)
        below = [search for search in searches if search is not None]
        if not below:
            return None
        if len(below) == 1 and recognise(found.names) is None:
            only = below[0]
            if all(note.kind != "found-below" for note in only.notes):  # a deeper level may have added it already
                only.notes.insert(0, Note("found-below", f"the checkpoint was found in {only.path}"))
            return only
        if sum(1 for entry in numbered if any(_is_in(search.path, entry.path) for search in below)) > 1:
            raise _several_candidates(path, [search.path for search in below])
        return found.with_parts_of(below)

    def _producer_below(self, found: _Found, subdirectories: list[Entry]) -> _Found | None:
        """The one subdirectory with everything that a producer saves, if no file above it is a model or optimizer."""
        below = [search for search in self._search_each(subdirectories) if resuming_producer(search.names)]
        if len(below) > 1:
            raise _several_candidates(found.path, [search.path for search in below])
        return _only_below(found, below[0]) if below else None

    def _below_settings(self, found: _Found, numbered: list[Entry], others: list[Entry], depth: int) -> _Found | None:
        """The one checkpoint below a directory whose own files have no model and no optimizer (settings)."""
        if not depth or not (numbered or others) or any(map(self._has_state, found.parts)):
            return None
        parts_beside = [each for each in others if each.name not in EXPORT_DIRECTORIES]
        if any(self._has_state(part) for beside in self._search_each(parts_beside) for part in beside.parts):
            return None  # the files above belong to it
        searches = (self._search(entry.path, depth - 1) for entry in (*numbered, *others))
        below = [search for search in searches if search is not None and any(map(self._has_state, search.parts))]
        unclear = [part.label for part in found.parts if below and self._has_state(part) is None]
        if len(below) + len(unclear) > 1:
            why = f"{names_text(unclear, 6)} may be a model, or only settings" if unclear else _EACH
            raise _several_candidates(found.path, [*unclear, *(search.path for search in below)], why)
        return _only_below(found, below[0]) if below else None

    def _has_state(self, part: Part) -> bool | None:
        """Whether ``part`` holds a model or an optimizer. None for a dict of tensors that may be anything."""
        if not part.optional:
            return True
        count = len(self.files.files())
        try:
            sections = self._read(part).sections
        except _LEFT_OUT:
            return False
        except FsdpckptError:  # raised again when the checkpoint is read
            return True
        finally:
            self.files.truncate(count)
        if sections.optim is not None or sections.model_path or sections.named:
            return True
        params = sections.model.params if sections.model is not None else {}
        if any("." in name for name in params):
            return True
        only_tensors = sections.model_keys is None and all(isinstance(leaf, Tensor) for leaf in params.values())
        return None if params and only_tensors else False

    def _add_subdirectories(self, found: _Found, subdirectories: list[Entry], depth: int) -> None:
        """Add the parts of those subdirectories that contain any."""
        below = self._search_each(subdirectories) if depth else []
        with_parts = {search.path for search in below}
        found.left_out += [f"{entry.name}/" for entry in subdirectories if entry.path not in with_parts]
        found.with_parts_of(below)

    def _search_each(self, directories: Sequence[Entry]) -> list[_Found]:
        """Those of ``directories`` that contain parts, without what is below them."""
        listed = (self._list(entry.path) for entry in directories)
        return [found.with_parts_of([]) for found in listed if found.parts]

    def _nothing_found(self) -> SourceUnrecognisedError:
        names = self._list(self.source).names
        return SourceUnrecognisedError(
            f"no checkpoint was found in {self.source}",
            file=self.source,
            expected=".metadata (DCP), *.safetensors, torch.save files, or one file per rank, here or one to three "
            "directories below",
            found=some_of(names, 8) or "an empty directory",
            next_step=to_copy(
                "see what is there, and name the directory of one checkpoint", f"ls -l {shlex.quote(self.source)}"
            ),
        )


def _parent_quoted(path: str) -> str:
    return shlex.quote(path.rpartition("/")[0] or ".")


def _is_in(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or below it."""
    return f"{path.rstrip('/')}/".startswith(f"{directory.rstrip('/')}/")


def _only_below(found: _Found, only: _Found) -> _Found:
    """``only``, with a note that it is below ``found``, of which nothing is read."""
    left_out = ", ".join([*(part.name for part in found.parts), *found.left_out])
    where = Note("found-below", f"the checkpoint was found in {only.path}")
    only.notes = [note for note in only.notes if note != where]
    only.notes.insert(0, Note("found-below", f"{where.message}; not copied from {found.path}: {left_out}"))
    return only


def _several_candidates(path: str, candidates: list[str], why: str = _EACH) -> NeedsInformationError:
    return NeedsInformationError(
        f"{path} holds {len(candidates)} checkpoints",
        details=candidates,
        why=why,
        next_step=f"name the one to read, for example {shlex.quote(candidates[-1])}",
        file=path,
    )


def _nearest_units(places: Sequence[str], sources: Sources) -> FoundUnits | None:
    """The units of the nearest of the directories ``places`` that has any."""
    searches = (find_units(sources.list_directory(place), sources) for place in places)
    return next((units for units in searches if units is not None), None)


def missing(source: str) -> SourceMissingError:
    """The error for a path that does not exist: says which part of it exists, since most typos are in one component."""
    if is_url(source):
        why, next_step = "the URL is misspelt, or this account may not see it", "check the URL and the credentials"
    elif source.startswith("~"):
        why, next_step = "the shell replaces ~ only where it is not quoted", "write the path without quotes around ~"
    else:
        above, file = source.rstrip("/"), False
        while above and not (file := os.path.isfile(above)) and not os.path.isdir(above):
            above = os.path.dirname(above.rstrip("/"))
        if file:
            why, next_step = f"{above} is a file: nothing is below it", f"give {shlex.quote(above)} itself"
        else:
            why = "the path is misspelt, or the disk is not mounted here"
            above = above or ("/" if source.startswith("/") else ".")
            next_step = to_copy("see what is there", f"ls {shlex.quote(above)}")
            names = os.listdir(above) if os.access(above, os.R_OK) else []
            name = source.removeprefix(above).strip("/").partition("/")[0]
            wanted = os.path.normpath(os.path.join(above, name))
            if os.path.islink(wanted):
                why = f"{wanted} is a link to {os.readlink(wanted)}, which does not exist"
                next_step = to_copy("see where it leads", f"ls -l {shlex.quote(wanted)}")
            elif meant := get_close_matches(name, names, n=1):
                why += f"; {os.path.normpath(os.path.join(above, meant[0]))} is there"
    return SourceMissingError(f"{source} does not exist", file=source, why=why, next_step=next_step)
