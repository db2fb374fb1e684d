"""Opens the checkpoint at a path: finds its parts, reads each with its reader, and joins them.

A path is one file, a directory that is one checkpoint, a directory of parts (model and optimizer side by side), or a
directory with exactly one checkpoint below it. If several answers are possible, none is chosen: the error lists all.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from fsdpckpt.ir.checkpoint import Checkpoint, Evidence, EvidenceKind, Note, Section
from fsdpckpt.ir.invariants import problems
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.process import without_collection
from fsdpckpt.producers import PLAIN, Flavor
from fsdpckpt.producers.table import EXPORT_DIRECTORIES, export_files, flavor_named, recognise
from fsdpckpt.readers import READERS
from fsdpckpt.readers.assembly import ReadPart, join, read_part, without_exports
from fsdpckpt.readers.beside import BesideUnits, flavor_of, manifest_units, units_beside, with_manifest, with_units
from fsdpckpt.readers.protocol import MANIFEST, UNITS, FileTable, Items, Part, ReadOptions
from fsdpckpt.readers.side_files import missing_sections
from fsdpckpt.readers.torch_ranks import may_be_torch
from fsdpckpt.storage import UPLOADING, Entry, is_url
from fsdpckpt.storage.sources import RemainingSources, Sources
from fsdpckpt.text import bytes_text, first_of, names_text

# Sub-directories named like this are checkpoints of their own, not parts of one.
_NUMBERED = re.compile(r"(?:^|[_-])(?:checkpoint|ckpt|step|global_step|epoch|ep|iter|iteration)[-_]?\d+", re.IGNORECASE)
# A checkpoint in parts has directories for the model, the optimizer, data loaders, samplers; hardly more.
_MOST_DIRECTORIES = 6
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

    ``units``: the order of each rank's optimizer, used if no units lie beside the checkpoint. ``ignore_file``: globs of
    files and directories to leave out; the caller then calls ``require_matches``. For ``locate``, ``only`` and
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
class _Listing:
    """One directory: its parts, the names of all its entries, its subdirectories, and the files in no part."""

    path: str
    names: list[str]
    parts: list[Part]
    directories: list[Entry]
    not_carried: list[str]


def _side_parts(names: Sequence[str], files: Mapping[str, Entry], sources: Sources) -> list[Part]:
    """A part for each of ``files`` that is a side file of the framework with ``names`` in a directory."""
    flavor = recognise(names)
    beside = [file for name, file in files.items() if flavor is not None and re.search(flavor.side_files, name)]
    parts = [reader.recognise_file(file, sources) for file in beside if may_be_torch(file) for reader in READERS]
    return [replace(part, neighbour=True, extras=True) for part in parts if part is not None]


def _refuse_uploads(path: str, entries: Sequence[Entry]) -> None:
    if any(entry.name == UPLOADING for entry in entries):
        raise SourceIncompleteError(
            f"{path} is not complete: it is still being uploaded, or the upload was interrupted",
            file=f"{path.rstrip('/')}/{UPLOADING}",
            why=f"fsdpckpt deletes {UPLOADING} once everything is there",
            next_step="wait for the upload to end, or run the command that began it again",
        )


@dataclass(slots=True)
class _SearchResult:
    """The parts found by a search, the directory ``path`` that contains them, and the ``names`` of its entries.

    ``directories``: the subdirectories that contain parts.
    """

    path: str
    names: list[str]
    parts: list[Part]
    notes: list[Note]
    directories: list[str]


def _join_searches(listing: _Listing, below: Sequence[_SearchResult]) -> _SearchResult:
    """The parts of a directory and of those ``below`` it."""
    notes = [note for one in below for note in one.notes]
    if listing.not_carried:
        message = f"not copied from {listing.path}: {names_text(listing.not_carried, 6)}"
        notes.insert(0, Note("not-carried", message, listing.path, keys=tuple(listing.not_carried)))
    parts = [*listing.parts, *(part for one in below for part in one.parts)]
    directories = [directory for one in below for directory in one.directories or [one.path]]
    return _SearchResult(listing.path, listing.names, parts, notes, directories)


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
            error.run_again = False
            raise
        checkpoint = _with_flavor(join(self.source, [read], self.files, []), [entry.name], "")
        checkpoint.problems = (*checkpoint.problems, *missing_sections(checkpoint, ()))
        units = None if is_url(self.source) else _nearest_units([os.path.dirname(self.source) or "."], self.sources)
        if units is not None:
            with_units(checkpoint, units)
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
        written = manifest_units(searched.path, searched.names, self.sources)
        self.files.units = written or (units.units if units is not None else self.files.units)
        read = self._read_parts(searched)
        if self.options.as_dcp:
            read, beside = without_exports(read)
            if beside:
                searched.notes.append(Note("not-carried", f"not in .metadata, and left out: {names_text(beside, 6)}"))
        if self.sources.ignored:
            left = tuple(self.sources.ignored)
            searched.notes.append(Note("ignored", f"left out by --ignore-file: {first_of(left, 6)}", keys=left))
        checkpoint = join(self.source, read, self.files, searched.notes)
        checkpoint = _with_flavor(checkpoint, searched.names, searched.path)
        if units is not None:
            with_units(checkpoint, units)
        checkpoint = with_manifest(checkpoint, searched.path, searched.names, self.sources.all)  # it lists all files
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

    def _read_parts(self, searched: _SearchResult) -> list[ReadPart]:
        """Read every part. Leaves out a file beside the checkpoint that cannot be read (a training script's classes).

        An error among many directories side by side means that they are several checkpoints.
        """
        read: list[ReadPart] = []
        refused: list[FsdpckptError] = []
        for part in searched.parts:
            known = len(self.files.files())
            try:
                read.append(self._read(part))
            except SourceError as error:
                if not part.neighbour and len(searched.directories) > _MOST_DIRECTORIES:
                    raise _several_candidates(searched.path, searched.directories) from None
                left_out = (SourceUnsafeError, SourceUnrecognisedError, SourceUnsupportedError)
                if not part.neighbour or not isinstance(error, left_out):
                    raise
                self.files.forget(known)
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
        read = read_part(part.label, part.stem, tree, extras=part.extras)
        if part.bare_ranks and not read.auxiliary and read.whole():
            raise NeedsInformationError(
                f"{part.label}: each of these files holds whole tensors",
                why="the numbers in their names may be ranks that hold the same, or different checkpoints",
                next_step="name one of the files",
                file=part.label,
            )
        return read

    def _list(self, path: str) -> _Listing:
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
            del files[part.label.rpartition("/")[2]]
        unwanted: list[str] = []
        for reader in READERS:
            claim = reader.recognise_directory(path, files, self.options, self.sources)
            parts += claim.parts
            unwanted += claim.not_carried
            directories = [entry for entry in directories if entry.name not in claim.directories]
            files = {name: entry for name, entry in files.items() if name not in claim.names}
        return _Listing(path, names, parts, directories, [*sorted(exports), *hidden, *files, *unwanted])

    def _search(self, path: str, depth: int) -> _SearchResult | None:
        """The parts at ``path``: those of the directory and its subdirectories, or of the one checkpoint below it."""
        listing = self._list(path)
        numbered = [entry for entry in listing.directories if _NUMBERED.search(entry.name)]
        others = [entry for entry in listing.directories if entry not in numbered]
        if listing.parts and all(part.neighbour for part in listing.parts):
            only = self._producer_below(listing, others if depth else [])
            if only is not None:
                return only
        if listing.parts:
            apart = [*numbered, *(entry for entry in others if entry.name in EXPORT_DIRECTORIES)]
            joined = self._with_neighbours(listing, [entry for entry in others if entry not in apart], depth)
            if apart:
                names = ", ".join(entry.name for entry in apart)
                joined.notes.append(Note("not-carried", f"{path}: not treated as parts of this checkpoint: {names}"))
            return joined
        below = [one for entry in (*numbered, *others) if depth and (one := self._search(entry.path, depth - 1))]
        if not below:
            return None
        if len(below) == 1 and recognise(listing.names) is None:
            only = below[0]
            if all(note.kind != "found-below" for note in only.notes):  # a deeper level may have added it already
                only.notes.insert(0, Note("found-below", f"the checkpoint was found in {only.path}"))
            return only
        if sum(1 for entry in numbered if any(one.path.startswith(entry.path) for one in below)) > 1:
            raise _several_candidates(path, [one.path for one in below])
        return _join_searches(listing, below)

    def _producer_below(self, listing: _Listing, directories: list[Entry]) -> _SearchResult | None:
        """The one subdirectory with everything that a producer saves, if no file above it is a model or optimizer."""
        below = [one for entry in directories if (one := self._search_flat(entry.path)) and _resuming(one.names)]
        if len(below) > 1:
            raise _several_candidates(listing.path, [one.path for one in below])
        for one in below:
            left = ", ".join([*(part.label.rpartition("/")[2] for part in listing.parts), *listing.not_carried])
            message = f"the checkpoint was found in {one.path}; not copied from {listing.path}: {left}"
            one.notes.insert(0, Note("found-below", message))
        return below[0] if below else None

    def _with_neighbours(self, listing: _Listing, directories: list[Entry], depth: int) -> _SearchResult:
        """The parts of a directory and of those of its subdirectories that contain parts."""
        below = [one for entry in directories if depth and (one := self._search_flat(entry.path))]
        parts = {one.path for one in below}
        listing.not_carried += [f"{entry.name}/" for entry in directories if entry.path not in parts]
        return _join_searches(listing, below)

    def _search_flat(self, path: str) -> _SearchResult | None:
        listing = self._list(path)
        return _join_searches(listing, []) if listing.parts else None

    def _nothing_found(self) -> SourceUnrecognisedError:
        listing = self._list(self.source)
        return SourceUnrecognisedError(
            f"no checkpoint was found in {self.source}",
            file=self.source,
            expected=".metadata (DCP), *.safetensors, torch.save files, or one file per rank, here or one to three "
            "directories below",
            found=first_of(listing.names, 8) or "an empty directory",
            next_step=to_copy(
                "see what is there, and name the directory of one checkpoint", f"ls -l {shlex.quote(self.source)}"
            ),
        )


def _with_flavor(checkpoint: Checkpoint, names: Sequence[str], directory: str) -> Checkpoint:
    """``checkpoint``, found in ``directory`` ("": it is one file), with the name of its producer."""
    checkpoint.directory = directory
    if checkpoint.flavor == PLAIN:
        checkpoint.flavor = flavor_of(checkpoint, names, directory)
    flavor = flavor_named(checkpoint.flavor)
    if flavor is None or not directory:
        checkpoint.notes = (*checkpoint.notes, *_of_a_larger_one(checkpoint.source))
    if flavor is not None:
        evidence = Evidence(EvidenceKind.FLAVOR, f"flavor {flavor.name}: names of {flavor.title}")
        checkpoint.evidence = (*checkpoint.evidence, evidence)
    return checkpoint


def _of_a_larger_one(source: str) -> list[Note]:
    """A note if a framework keeps one section in ``source`` and the others in the directory above, from which it
    resumes.
    """
    if is_url(source):
        return []
    above, name = os.path.split(os.path.abspath(source))
    flavor = _resuming(os.listdir(above) if os.access(above, os.R_OK) else [])
    if flavor is None or not re.search(flavor.state, name):
        return []
    folder = os.path.dirname(source.rstrip("/")) or "."
    message = f"{source} is one part of a checkpoint of flavor {flavor.name}: give {folder} for all of it"
    return [Note("part-of", message)]


def _resuming(names: Sequence[str]) -> Flavor | None:
    """The producer of files with these names, if it resumes training from them."""
    flavor = recognise(names)
    return flavor if flavor is not None and any(form.optim is not None for form in flavor.forms) else None


def _parent_quoted(path: str) -> str:
    return shlex.quote(path.rpartition("/")[0] or ".")


def _several_candidates(path: str, candidates: list[str]) -> NeedsInformationError:
    return NeedsInformationError(
        f"{path} holds {len(candidates)} checkpoints",
        details=candidates,
        why="each of these directories is a checkpoint of its own",
        next_step=f"name the one to read, for example {shlex.quote(candidates[-1])}",
        file=path,
    )


def _nearest_units(places: Sequence[str], sources: Sources) -> BesideUnits | None:
    """The units of the nearest of the directories ``places`` that has any."""
    beside = (units_beside(sources.list_directory(place), sources) for place in places)
    return next((units for units in beside if units is not None), None)


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
            meant = get_close_matches(source.removeprefix(above).strip("/").partition("/")[0], names, n=1)
            why += f"; {os.path.normpath(os.path.join(above, meant[0]))} is there" if meant else ""
    return SourceMissingError(f"{source} does not exist", file=source, why=why, next_step=next_step)
