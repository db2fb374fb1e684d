"""Finds the parts of a checkpoint in a directory, and below it at any depth.

A directory is one checkpoint (its own files, and those of the directories below it that are no checkpoints of their
own) or leads to one. Every file that is listed on the way is entered in the account. Links to what the search finds
anyway are that, and nothing more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdpckpt.errors import FsdpckptError, NeedsInformationError, SourceError, SourceIncompleteError
from fsdpckpt.ir.account import Rule
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.origin import LeftOut
from fsdpckpt.producers.recognition import export_files, recognise
from fsdpckpt.producers.table import EXPORT_DIRECTORIES
from fsdpckpt.readers.account import METADATA, AccountBook
from fsdpckpt.readers.candidates import several_checkpoints
from fsdpckpt.readers.protocol import MANIFEST, UNITS, Part, ReadOptions
from fsdpckpt.readers.registry import READERS, claim_foreign
from fsdpckpt.readers.side_files import auxiliary, resuming_producer
from fsdpckpt.readers.steps import are_of_one_run, beside_steps
from fsdpckpt.readers.torch_ranks import may_be_torch
from fsdpckpt.storage import UPLOADING, Entry
from fsdpckpt.storage.sources import Sources, is_in
from fsdpckpt.text import count_text, names_text

# What a number in the name of a step follows; the first of these words that a name has says which step it is.
WORDS_OF_STEP = ("step", "checkpoint", "ckpt", "iter(?:ation)?", "epoch", "ep")
# Sub-directories named like this are checkpoints of their own, not parts of one.
_NUMBERED = re.compile(rf"(?:^|[_-])(?:{'|'.join(WORDS_OF_STEP)})[-_=]?\d+", re.IGNORECASE)
# Directories of which none is listed twice. A checkpoint with one for each module has thousands.
_MAX_LISTED = 20_000
_NUMBERS = re.compile(r"\d+")
UNFINISHED = ".metadata.tmp"  # what a DCP save leaves that did not reach its end
_PART_NAME = re.compile(r"model|optim|extra_state|scheduler|rng|random_states|loader|train_state", re.IGNORECASE)
_PART_FILE = re.compile(rf"(?:{_PART_NAME.pattern}).*\.(?:pt|pth|bin|ckpt|pkl)$", re.IGNORECASE)


def is_numbered(name: str) -> bool:
    """Whether a directory of this name is one of several checkpoints: ``checkpoint-500``, ``epoch=1-step=500``."""
    return _NUMBERED.search(name) is not None


@dataclass(frozen=True, slots=True)
class SearchedDirectory:
    """One directory. ``parts``: the containers that readers claimed; ``subdirectories``: those that no part needs;
    ``left_out``: the files that are in no part; ``unread_parts``: those that have the name of one;
    ``named_step``: whether a ``latest`` file names the step that the parts are in.
    """

    path: str
    names: tuple[str, ...]
    parts: tuple[Part, ...]
    subdirectories: tuple[Entry, ...]
    left_out: tuple[str, ...]
    unread_parts: tuple[Entry, ...] = ()
    named_step: bool = False


@dataclass(slots=True)
class Found:
    """The parts found at ``path`` and below. ``names``: of all entries of ``path``. ``below``: the subdirectories that
    contain parts. ``beside``: what is no part; ``unfinished``: directories and files of parts without content.
    ``only``: whether it is the one checkpoint below another directory; ``passed``: what of those above is left out,
    outermost first. ``steps``: the directories beside its parts that hold checkpoints of the same run.
    """

    path: str
    names: tuple[str, ...]
    parts: list[Part]
    left_out: list[str]
    notes: list[Note] = field(default_factory=list)
    beside: list[LeftOut] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    unfinished: list[Entry] = field(default_factory=list)
    only: bool = False
    passed: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def notes_on_place(self) -> list[Note]:
        """Where it was found, if that is below another directory."""
        message = f"the checkpoint was found in {self.path}"
        if self.passed:
            return [Note("found-below", f"{message}; not copied from {left_out}") for left_out in self.passed]
        return [Note("found-below", message)] if self.only else []

    def add_below(self, below: Sequence[Found]) -> None:
        for found in below:
            self.parts += found.parts
            self.notes += [*found.notes_on_place(), *found.notes]
            self.beside += found.beside
            self.unfinished += found.unfinished
            self.below += found.below or [found.path]

    def enter_left_out(self) -> None:
        """Enter the files that are left out among what is beside."""
        if self.left_out:
            self.beside.append(LeftOut.not_copied(self.path, self.left_out))


class Search:
    """A search below ``source``. ``has_state``: whether a part holds a model or an optimizer, None for a dict of
    tensors that may be anything.
    """

    def __init__(
        self,
        source: str,
        sources: Sources,
        options: ReadOptions,
        book: AccountBook,
        has_state: Callable[[Part], bool | None],
    ) -> None:
        self._source = source
        self._sources = sources
        self._options = options
        self._book = book
        self._has_state = has_state
        self._listings: dict[str, SearchedDirectory] = {}
        self._followed: set[str] = set()  # directories elsewhere that links lead to

    def find(self, path: str) -> Found | None:
        """The parts at ``path``: those of the directory and what is below it, or of the one checkpoint below it.

        Raises NeedsInformationError for several checkpoints, or more directories than are worth a search;
        SourceIncompleteError for an upload that did not end, and what ``Reader.recognise_directory`` raises.
        """
        listing = self.listing(path)
        numbered = [entry for entry in listing.subdirectories if is_numbered(entry.name)]
        others = [entry for entry in listing.subdirectories if entry not in numbered]
        if listing.parts and all(part.optional for part in listing.parts):
            only = self._producer_below(listing, others) or self._below_settings(listing, numbered, others)
            if only is not None:
                return only
        if listing.parts:
            return self._apart_from_steps(listing, self._with_parts_below(listing, numbered, others))
        searches, refused = self._search_each(numbered)
        possible = len(refused) + sum(search is not None for search in searches)
        if possible > 1:  # a run: what is damaged is one of several
            beside, refused_beside = self._search_each(others)
            searches, refused = [*searches, *beside], {**refused, **refused_beside}
        else:
            searches += [self.find(entry.path) for entry in others]
        below = [search for search in searches if search is not None]
        if refused and len(refused) + len(below) > 1:  # one of several steps is damaged: which is meant is not known
            raise self._several(listing, [*refused, *(search.path for search in below)], None, numbered)
        for error in refused.values():
            raise error
        if not below:
            return None
        if len(below) == 1 and MANIFEST not in listing.names and recognise(listing.names) is None:
            only = below[0]
            only.only = True
            above = Found(path, listing.names, [], list(listing.left_out))
            above.enter_left_out()
            only.beside += above.beside
            only.unfinished += listing.unread_parts
            self._add_unfinished_beside(only, listing, numbered, others)
            return only
        if len(_entries_with(below, numbered)) > 1:
            raise self._several(listing, [search.path for search in below], None, numbered)
        found = Found(path, listing.names, [], list(listing.left_out))
        found.enter_left_out()
        found.add_below(below)
        found.unfinished += self._unfinished_in(others)
        return found

    def _search_each(self, entries: Sequence[Entry]) -> tuple[list[Found | None], dict[str, SourceError]]:
        """What is in each of ``entries``, and by path the errors of those that cannot be read."""
        searches: list[Found | None] = []
        refused: dict[str, SourceError] = {}
        for entry in entries:
            try:
                searches.append(self.find(entry.path))
            except SourceError as error:
                refused[entry.path] = error
        return searches, refused

    def listing(self, path: str) -> SearchedDirectory:
        """What is in the directory ``path`` itself."""
        if path not in self._listings:
            if len(self._listings) >= _MAX_LISTED:
                raise NeedsInformationError(
                    f"{self._source} has more than {count_text(_MAX_LISTED)} directories: the search stopped there",
                    details=[f"the last was {path}"],
                    file=self._source,
                    why="it holds far more than a checkpoint",
                    next_step="give the directory of one checkpoint",
                )
            self._listings[path] = self._listed(path)
        return self._listings[path]

    def _listed(self, path: str) -> SearchedDirectory:
        entries = self._sources.list_directory(path)
        _refuse_uploads(path, entries)
        names = tuple(entry.name for entry in entries)
        exports = export_files(names)
        hidden = [entry for entry in entries if entry.directory and entry.name.startswith(".")]
        linked = [entry for entry in entries if entry not in hidden and self._is_found_anyway(entry, path, names)]
        rest = [entry for entry in entries if entry not in hidden and entry not in linked]
        directories = [entry for entry in rest if entry.directory]
        apart = {*exports, MANIFEST, UNITS}
        files = {entry.name: entry for entry in rest if not entry.directory and entry.name not in apart}
        # Numbers in the names of side files are not ranks, and tensors in them are not a model.
        parts = _side_parts(names, files, self._sources)
        self._book.claimed(files.pop(part.name) for part in parts)
        unwanted: list[str] = []
        named_step = False
        for claim_directory in (claim_foreign, *(reader.recognise_directory for reader in READERS)):
            claim = claim_directory(path, files, self._options, self._sources)
            parts += claim.parts
            unwanted += claim.left_out
            named_step |= any(map(is_numbered, claim.directories))
            claimed = [files[name] for name in files if name in claim.names]
            claimed += [entry for entry in directories if entry.name in claim.directories]
            self._book.claimed(claimed)
            for name in claim.left_out:
                self._book.left_out(f"{path.rstrip('/')}/{name}", Rule.OTHER_SECTION)
            directories = [entry for entry in directories if entry.name not in claim.directories]
            files = {name: entry for name, entry in files.items() if name not in claim.names}
        self._enter_unclaimed(path, names, exports, files, hidden, linked)
        left_out = (*sorted(exports), *(f"{entry.name}/" for entry in hidden), *files, *unwanted)
        unread = (entry for name, entry in files.items() if _PART_FILE.search(name) and not name.startswith("."))
        return SearchedDirectory(path, names, tuple(parts), tuple(directories), left_out, tuple(unread), named_step)

    def _enter_unclaimed(
        self,
        path: str,
        names: Sequence[str],
        exports: set[str],
        files: Mapping[str, Entry],
        hidden: Sequence[Entry],
        linked: Sequence[Entry],
    ) -> None:
        """Enter in the account what no reader claimed in the directory ``path``."""
        above = path.rstrip("/")
        for name in (MANIFEST, UNITS):
            if name in names:
                self._book.read(f"{above}/{name}", METADATA)
        for name in exports:
            self._book.left_out(f"{above}/{name}", Rule.EXPORT)
        for name in files:
            rule = Rule.DESCRIBES if auxiliary(name) else Rule.OTHER
            self._book.left_out(f"{above}/{name}", Rule.HIDDEN if name.startswith(".") else rule)
        for entry in hidden:
            self._book.left_out(entry.path, Rule.HIDDEN, directory=True)
        for entry in linked:
            self._book.left_out(entry.path, Rule.LINK, directory=entry.directory)
        if not names:
            self._book.left_out(above, Rule.EMPTY, directory=True)

    def _is_found_anyway(self, entry: Entry, path: str, names: Sequence[str]) -> bool:
        """Whether ``entry`` is a link to a file beside it, or to a directory that the search finds without it."""
        if not entry.link:
            return False
        if not entry.directory:
            folder, name = os.path.split(entry.link)
            beside = name in names and name != entry.name and folder == os.path.realpath(path)
            # The file of a rank may be a link to that of another: then it is still this rank's.
            return beside and _NUMBERS.sub("#", name) != _NUMBERS.sub("#", entry.name)
        top = os.path.realpath(self._source)
        if is_in(top, entry.link):
            return True  # entering a directory above would have no end
        if is_in(entry.link, top):  # what is in a hidden directory is found through the link only
            return not any(word.startswith(".") for word in os.path.relpath(entry.link, top).split("/"))
        again = entry.link in self._followed
        self._followed.add(entry.link)
        return again

    def _with_parts_below(self, listing: SearchedDirectory, numbered: list[Entry], others: list[Entry]) -> Found:
        """The checkpoint whose parts are in this directory, and in those below it that are no others."""
        found = Found(listing.path, listing.names, list(listing.parts), list(listing.left_out))
        found.unfinished += listing.unread_parts
        exports = [entry for entry in others if entry.name in EXPORT_DIRECTORIES]
        below: list[Found] = []
        for entry in others:
            if entry in exports:
                continue
            if search := self._parts_in(entry):
                below.append(search)
            else:
                found.left_out.append(f"{entry.name}/")
                found.unfinished += self._unfinished_in([entry])
        found.enter_left_out()
        found.add_below(below)
        separate = [*numbered, *exports]
        for entry in separate:
            self._book.left_out(entry.path, Rule.EXPORT if entry in exports else Rule.SEPARATE, directory=True)
        if separate:
            names = ", ".join(entry.name for entry in separate)
            message = f"{listing.path}: not treated as parts of this checkpoint: {names}"
            found.beside.append(LeftOut(listing.path, message))
        return found

    def _parts_in(self, directory: Entry) -> Found | None:
        """What is in ``directory``, beside whose parent's files it is, and below it; None if there are no parts."""
        listing = self.listing(directory.path)
        numbered = [entry for entry in listing.subdirectories if is_numbered(entry.name)]
        others = [entry for entry in listing.subdirectories if entry not in numbered]
        if listing.parts:
            return self._with_parts_below(listing, numbered, others)
        for entry in numbered:
            self._book.left_out(entry.path, Rule.SEPARATE, directory=True)
        below = [found for entry in others if (found := self._parts_in(entry)) is not None]
        if not below:
            return None
        found = Found(listing.path, listing.names, [], list(listing.left_out))
        found.enter_left_out()
        found.add_below(below)
        found.unfinished += self._unfinished_in(others)
        return found

    def _apart_from_steps(self, listing: SearchedDirectory, found: Found) -> Found:
        """``found``, if no step of a run is beside it, or its form says how they belong together: it is a step itself,
        or a ``latest`` file names the one that is read.

        Raises SeveralCheckpointsError if nothing does.
        """
        is_step = listing.named_step or is_numbered(found.path.rstrip("/").rpartition("/")[2])
        if not is_step and not all(part.extras for part in found.parts):
            found.steps = [entry.path for entry in self._numbered_in(found.path) if self._holds_checkpoint(entry)]
        if found.steps and not are_of_one_run(found.parts, found.steps):
            raise beside_steps(found.path, found.parts, found.steps, self._source, self._sources)
        return found

    def _holds_checkpoint(self, entry: Entry) -> bool:
        """Whether there is a checkpoint in the directory ``entry`` or below, be it damaged or one of several."""
        apart = Search(self._source, self._sources, self._options, AccountBook(self._source), self._has_state)
        try:
            found = apart.find(entry.path)
        except FsdpckptError:
            return True
        return found is not None and any(map(self._has_state, found.parts))

    def _numbered_in(self, path: str) -> Iterator[Entry]:
        """The directories with names of steps in ``path``, and in those below that have none."""
        for entry in self.listing(path).subdirectories:
            if is_numbered(entry.name):
                yield entry
            elif entry.name not in EXPORT_DIRECTORIES:
                yield from self._numbered_in(entry.path)

    def _add_unfinished_beside(
        self, only: Found, listing: SearchedDirectory, numbered: Sequence[Entry], others: Sequence[Entry]
    ) -> None:
        """Add to ``only``, the one checkpoint below, what an interrupted save left beside it: a part of it if both
        have the names of parts, else another step.
        """
        folder, _, name = only.path.rstrip("/").rpartition("/")
        if folder == listing.path.rstrip("/") and _PART_NAME.search(name):
            only.unfinished += self._unfinished_in(others)
        for entry in numbered:
            if self._is_hollow(entry.path):
                message = f"{entry.path} is empty: its save did not finish, or it was not copied"
                only.beside.append(LeftOut(listing.path, message, (f"{entry.name}/",)))

    def _unfinished_in(self, directories: Sequence[Entry]) -> list[Entry]:
        """Those of ``directories`` that a save made for a part and did not fill."""
        return [
            entry
            for entry in directories
            if self._is_hollow(entry.path) and (_PART_NAME.search(entry.name) or self._has_leftover(entry.path))
        ]

    def _is_hollow(self, path: str) -> bool:
        """Whether there is no file in the directory ``path`` and below, but for what an interrupted save leaves."""
        listing = self.listing(path)
        files = set(listing.names) - {entry.name for entry in listing.subdirectories}
        return files <= {UNFINISHED} and all(self._is_hollow(entry.path) for entry in listing.subdirectories)

    def _has_leftover(self, path: str) -> bool:
        listing = self.listing(path)
        return UNFINISHED in listing.names or any(self._has_leftover(entry.path) for entry in listing.subdirectories)

    def _producer_below(self, listing: SearchedDirectory, subdirectories: list[Entry]) -> Found | None:
        """The one subdirectory with everything that a producer saves, if no file above it is a model or optimizer."""
        producers = [entry for entry in subdirectories if resuming_producer(self.listing(entry.path).names)]
        below = [found for entry in producers if (found := self._parts_in(entry)) is not None]
        if len(below) > 1:
            raise self._several(listing, [search.path for search in below])
        return self._only_below(listing, below[0]) if below else None

    def _below_settings(self, listing: SearchedDirectory, numbered: list[Entry], others: list[Entry]) -> Found | None:
        """The one checkpoint below a directory whose own files have no model and no optimizer (settings)."""
        if not (numbered or others) or any(map(self._has_state, listing.parts)):
            return None
        beside = [self._parts_in(entry) for entry in others if entry.name not in EXPORT_DIRECTORIES]
        if any(self._has_state(part) for found in beside if found is not None for part in found.parts):
            return None  # the files above belong to it
        searches = [self.find(entry.path) for entry in (*numbered, *others)]
        below = [search for search in searches if search is not None and any(map(self._has_state, search.parts))]
        unclear = [part.label for part in listing.parts if below and self._has_state(part) is None]
        if len(below) + len(unclear) > 1:
            why = f"{names_text(unclear, 6)} may be a model, or only settings" if unclear else None
            raise self._several(listing, [*unclear, *(search.path for search in below)], why)
        return self._only_below(listing, below[0]) if below else None

    def _only_below(self, listing: SearchedDirectory, only: Found) -> Found:
        """``only``, as the one checkpoint below ``listing``, of which nothing is read."""
        left_out = ", ".join([*(part.name for part in listing.parts), *listing.left_out])
        only.passed.insert(0, f"{listing.path}: {left_out}")
        return only

    def _several(
        self, listing: SearchedDirectory, candidates: list[str], why: str | None = None, numbered: Sequence[Entry] = ()
    ) -> FsdpckptError:
        """``numbered``: the directories beside ``candidates``, of which some may be empty."""
        empty = [entry.path for entry in numbered if entry.path not in candidates and self._is_hollow(entry.path)]
        return several_checkpoints(listing.path, candidates, self._sources, why, empty)


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


def _entries_with(found: Sequence[Found], entries: Sequence[Entry]) -> list[Entry]:
    """The directories among ``entries`` in which one of ``found`` is."""
    return [entry for entry in entries if any(is_in(each.path, entry.path) for each in found)]
