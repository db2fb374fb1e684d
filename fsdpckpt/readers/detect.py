"""Opens the checkpoint at a path: finds its parts, reads each with its reader, and joins them.

A path is one file, a directory that is one checkpoint, a directory of parts (model and optimizer side by side), or a
directory with exactly one checkpoint below it. If several answers are possible, none is chosen: the error lists all.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from fsdpckpt import flags
from fsdpckpt.errors import (
    EMPTY,
    FsdpckptError,
    NeedsInformationError,
    SeveralCheckpointsError,
    SourceError,
    SourceIncompleteError,
    SourceMissingError,
    SourceUnrecognisedError,
    SourceUnsafeError,
    SourceUnsupportedError,
    UsageError,
    to_look,
)
from fsdpckpt.ir.account import Rule
from fsdpckpt.ir.checkpoint import Checkpoint, Note, Problem, Section
from fsdpckpt.ir.copies import copies_of_plain_tensors, mark_open_copies
from fsdpckpt.ir.files import paths_in
from fsdpckpt.ir.invariants import problems
from fsdpckpt.ir.origin import LeftOut
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.text_keys import LostDict
from fsdpckpt.ir.units import Units
from fsdpckpt.process import gc_paused
from fsdpckpt.readers.account import METADATA, AccountBook
from fsdpckpt.readers.candidates import refuse_directories_of_ranks, several_checkpoints
from fsdpckpt.readers.join import join, without_exports
from fsdpckpt.readers.manifest import (
    ReadManifest,
    read_manifest,
    with_manifest,
    with_manifest_beside,
    with_manifests_of_parts,
)
from fsdpckpt.readers.model_config import HUGGING_FACE_WEIGHTS, config_problems
from fsdpckpt.readers.parts import ReadPart, read_part
from fsdpckpt.readers.protocol import FileTable, Locate, Part, ReadOptions, stem_of
from fsdpckpt.readers.rank_facts import without_rank_facts
from fsdpckpt.readers.registry import READERS, recognise_foreign_file
from fsdpckpt.readers.search import UNFINISHED, Found, Search, is_numbered
from fsdpckpt.readers.side_files import missing_sections, section_of_name, with_flavor
from fsdpckpt.readers.units_files import FoundUnits, find_units, with_units
from fsdpckpt.readers.unread import several_with_unread
from fsdpckpt.storage import Entry, is_url, require_complete_url
from fsdpckpt.storage.sources import RemainingSources, Sources, relative_path
from fsdpckpt.text import bytes_text, some_of

# A checkpoint in parts has directories for the model, the optimizer, data loaders, samplers, hardly for more.
_MAX_DIRECTORIES = 6
_LEFT_OUT = (SourceUnsafeError, SourceUnrecognisedError, SourceUnsupportedError)  # of a file beside the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """What is known about a checkpoint, and what of it is read, beside which of its tensors are located."""

    only: Section | None = None  # see ``ReadOptions``
    units: Units | None = None  # the order of each rank's optimizer, used if no units are found beside the checkpoint
    lost: tuple[LostDict, ...] = ()  # dicts that are others in a DCP directory, if the manifest beside it does not say
    ignore_file: tuple[str, ...] = ()  # globs of what to leave out; the caller then calls ``require_matches``
    prefer_dcp_over_exports: bool = False  # see ``ReadOptions``
    compare_config: bool = True  # whether a ``config.json`` beside the weights must describe them


_EVERYTHING = OpenOptions()


def open_checkpoint(
    source: str, *, sources: Sources, locate: Locate = Locate.ALL, options: OpenOptions = _EVERYTHING
) -> Checkpoint:
    """Read everything about the checkpoint at ``source`` (file, directory or URL) but its tensor data. For ``locate``
    see ``ReadOptions``.

    Raises SourceMissingError, SourceUnrecognisedError, SourceIncompleteError, NeedsInformationError (several
    candidates), and what the readers raise. Problems that do not prevent reading are in ``Checkpoint.problems``.
    """
    if not source:
        raise UsageError("the path of a checkpoint is empty", why=EMPTY, next_step="give a file or a directory")
    entry = sources.stat(source)
    if entry is None:
        require_complete_url(source, "the path")
        raise missing(source)
    remaining = RemainingSources(sources, source, options.ignore_file)
    with gc_paused():
        try:
            opening = _Opening(source, remaining, locate, options)
            checkpoint = opening.directory() if entry.directory else opening.file(entry)
        except SourceError as error:
            several = _several_beside_unread(source, error, sources, options) if entry.directory else None
            if several is None:
                raise
            raise several from error
        checkpoint.origin = replace(checkpoint.origin, ignored=tuple(remaining.ignored))
        copies = list(copies_of_plain_tensors(checkpoint))
        mark_open_copies(checkpoint, copies)
        checkpoint.ledger = checkpoint.ledger.with_problems(*problems(checkpoint, copies))
    return checkpoint


def _several_beside_unread(
    source: str, error: SourceError, sources: Sources, options: OpenOptions
) -> SeveralCheckpointsError | None:
    """The error if the directory ``source`` has several checkpoints, and ``error`` is about one of them."""

    def open_without(unread: frozenset[str]) -> None:
        rest = RemainingSources(sources, source, options.ignore_file, unread)
        as_listed = replace(options, prefer_dcp_over_exports=False, lost=())
        _Opening(source, rest, Locate.NOTHING, as_listed).directory()

    return several_with_unread(source, error, sources, open_without)


class _Opening:
    """One reading of ``source``: what was found, read and accounted for so far."""

    def __init__(self, source: str, sources: RemainingSources, locate: Locate, options: OpenOptions) -> None:
        self.compare_config = options.compare_config
        self.source = source
        self.sources = sources
        self.options = ReadOptions(locate, options.only, options.prefer_dcp_over_exports)
        self.files = FileTable(options.units)
        self.files.lost = options.lost
        self.book = AccountBook(source)
        self.search = Search(source, sources, self.options, self.book, self._has_state)

    def file(self, entry: Entry) -> Checkpoint:
        recognise = (recognise_foreign_file, *(reader.recognise_file for reader in READERS))
        part = next((part for each in recognise if (part := each(entry, self.sources))), None)
        if part is None:
            head = self.sources.open(self.source).read(0, min(16, entry.nbytes))
            raise SourceUnrecognisedError(
                f"{self.source} is not a checkpoint that fsdpckpt knows",
                file=self.source,
                expected="a torch.save file (zip), a safetensors file or its index, or a directory",
                found=f"{bytes_text(entry.nbytes)} beginning with {str(head)[1:]}" if head else "an empty file",
                why=None if head else "the save or the copy did not finish",
                next_step=to_look(
                    "see what is there, and give the path of a checkpoint", f"ls -l {_parent_quoted(self.source)}"
                ),
            )
        try:
            read = self._read(part)
        except SourceIncompleteError as error:
            if error.rank is None:
                raise
            error.why = "each rank writes its own file, and this is one of them"
            error.next_step = f"give the directory with all of them: {_parent_quoted(self.source)}"
            raise
        checkpoint = with_flavor(join(self.source, [read], self.files, [], self.sources), [entry.name], "")
        self.book.claimed([entry])
        account = self.book.account([read], self.files.files(), self.sources)
        checkpoint.ledger = replace(checkpoint.ledger, account=account)
        checkpoint.ledger = checkpoint.ledger.with_problems(*missing_sections(checkpoint, ()))
        units = None if is_url(self.source) else _nearest_units([os.path.dirname(self.source) or "."], self.sources)
        if units is not None:
            with_units(checkpoint, units)
        with_manifest_beside(checkpoint, self.source, self.sources.all)
        if self.compare_config and HUGGING_FACE_WEIGHTS.fullmatch(entry.name) and not is_url(self.source):
            parent = os.path.dirname(self.source) or "."
            names = [each.name for each in self.sources.list_directory(parent)]
            checkpoint.ledger = checkpoint.ledger.with_problems(
                *config_problems(checkpoint, parent, names, self.sources)
            )
        return checkpoint

    def directory(self) -> Checkpoint:
        if os.path.realpath(self.source) == "/" and not is_url(self.source):
            raise SourceUnrecognisedError(
                f"{self.source} is the root of the file system, not a checkpoint",
                file=self.source,
                next_step="give the directory of one checkpoint",
            )
        found = self.search.find(self.source)
        if found is None:
            raise self._nothing_found()
        units = _nearest_units(self._directories_above(found.path), self.sources)
        # The manifest lists files that are ignored, too.
        manifest = read_manifest(found.path, found.names, self.sources.all)
        self._know(units, manifest)
        read = self._read_parts(found)
        if self.options.prefer_dcp_over_exports:
            read = without_exports(read)  # the account says that nothing in the checkpoint names their files
        self._account_for_ignored(found)
        joined = join(self.source, read, self.files, [*found.notes_on_place(), *found.notes], self.sources)
        joined.origin = replace(joined.origin, left_out=tuple(found.beside), steps=tuple(found.steps))
        checkpoint = self._with_what_is_beside(with_flavor(joined, found.names, found.path), found, units, manifest)
        account = self.book.account(read, self.files.files(), self.sources)
        checkpoint.ledger = replace(checkpoint.ledger, account=account)
        unnamed = LeftOut.unnamed(found.path, account)
        checkpoint.origin = replace(checkpoint.origin, left_out=(*checkpoint.origin.left_out, *unnamed))
        return checkpoint

    def _know(self, units: FoundUnits | None, manifest: ReadManifest) -> None:
        """Take what readers need of the files beside the checkpoint: the order of each rank's optimizer, and which
        dicts are others. A manifest was written with the checkpoint, and knows better.
        """
        recorded = manifest.units.units if manifest.units is not None else None
        if recorded is not None and recorded.orders:
            self.files.units = recorded
        elif units is not None and units.units is not None:
            self.files.units = units.units
        self.files.without_slices = manifest.without_slices
        self.files.lost = manifest.lost or self.files.lost

    def _account_for_ignored(self, found: Found) -> None:
        """Say in the account, and in a note, what options leave out."""
        if not self.sources.ignored:
            return
        ignored = tuple(self.sources.ignored)
        for path, directory in self.sources.ignored.items():
            self.book.left_out(f"{self.source.rstrip('/')}/{path}", Rule.IGNORED, directory=directory)
        found.notes.append(Note("ignored", f"left out by {flags.ignore_file}: {some_of(ignored, 6)}", keys=ignored))

    def _with_what_is_beside(
        self, joined: Checkpoint, found: Found, units: FoundUnits | None, manifest: ReadManifest
    ) -> Checkpoint:
        """``joined`` with what its units files, manifests and configuration say of it, and what they contradict."""
        if units is not None:
            with_units(joined, units)
            if units.units is not None and relative_path(units.path, self.source) != units.path:
                self.book.read(units.path, METADATA)
        checkpoint = without_rank_facts(with_manifest(joined, manifest, self.sources.all))
        with_manifests_of_parts(checkpoint, found.path, self.sources.all)
        absent = missing_sections(checkpoint, found.names)
        unfinished = [problem for entry in found.unfinished if (problem := _unfinished(entry, checkpoint)) is not None]
        contradicted: list[Problem] = []
        if self.compare_config:
            contradicted = config_problems(checkpoint, found.path, found.names, self.sources)
        checkpoint.ledger = checkpoint.ledger.with_problems(*(unfinished or absent), *contradicted)
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
        if is_numbered(name) and is_url(parent) == is_url(places[-1]):
            places.append(parent or ".")
        return places

    def _read_parts(self, found: Found) -> list[ReadPart]:
        """Read every part. Leaves out what cannot be read of the section that was not asked for, which the other one
        never needs, and a file beside the checkpoint (a training script's classes).

        An error among many directories side by side means that they are several checkpoints, of which maybe none can be
        read (else ``unread`` tells).
        """
        read: list[ReadPart] = []
        refused: list[FsdpckptError] = []
        for part in found.parts:
            count = len(self.files.files())
            try:
                read.append(self._read(part))
            except SourceError as error:
                unasked = self._is_of_other_section(part)
                if isinstance(error, SourceIncompleteError) and error.rank is not None:
                    refuse_directories_of_ranks(found.path, [each.label for each in found.parts])
                if not unasked and not part.optional and len(found.below) > _MAX_DIRECTORIES:
                    raise several_checkpoints(found.path, found.below, self.sources) from None
                if not unasked and not (part.optional and isinstance(error, _LEFT_OUT)):
                    raise
                for path in (part.label, *paths_in(self.files.files()[count:])):
                    self.book.left_out(path, Rule.REFUSED)
                self.files.truncate(count)
                refused.append(error)
                names = ", ".join(error.details[:5]) or error.what
                found.beside.append(LeftOut(part.directory, f"{part.label} is left out: {names}", refused=True))
        if refused and all(part.auxiliary for part in read):
            raise refused[0]
        return read

    def _is_of_other_section(self, part: Part) -> bool:
        """Whether the name of ``part`` says that it holds a section that was not asked for."""
        only = self.options.only
        return only is not None and section_of_name(part.stem) not in (None, only)

    def _read(self, part: Part) -> ReadPart:
        first = len(self.files.files())
        tree = part.read(self.files, self.sources)
        if not isinstance(tree.root, dict):
            kind = "tensor" if isinstance(tree.root, Tensor) else type(tree.root).__name__
            raise SourceUnrecognisedError(
                f"{part.label} contains a single {kind}, not a state dict",
                file=part.label,
                expected="a dict of tensors, or of models and optimizers",
                found=kind,
                next_step="save a state dict: torch.save(model.state_dict(), new_path)",
            )
        read = replace(read_part(part, tree), file_numbers=(first, len(self.files.files())))
        if part.ranks_inferred and not read.auxiliary and read.whole():
            raise NeedsInformationError(
                f"{part.label}: each of these files contains whole tensors",
                why="they may be different checkpoints, or the parts of tensor-parallel ranks",
                next_step="if each is a checkpoint of its own, name one of them; parts have to be merged with the "
                "script of the trainer that wrote them",
                file=part.label,
            )
        return read

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

    def _nothing_found(self) -> SourceUnrecognisedError | SourceIncompleteError:
        names = self.search.listing(self.source).names
        if UNFINISHED in names:
            return SourceIncompleteError(
                f"{self.source} contains nothing but {UNFINISHED}",
                file=self.source,
                why="the save did not finish, or still runs: the data files and .metadata are written later",
                next_step="wait for the save, or use the checkpoint before this one",
            )
        return SourceUnrecognisedError(
            f"no checkpoint was found in {self.source}",
            file=self.source,
            expected=".metadata (DCP), *.safetensors, torch.save files, or one file per rank, here or in the "
            "directories below",
            found=some_of(names, 8) or "an empty directory",
            next_step=to_look(
                "see what is there, and give the directory of one checkpoint", f"ls -l {shlex.quote(self.source)}"
            ),
        )


def _unfinished(entry: Entry, checkpoint: Checkpoint) -> Problem | None:
    """The fatal problem of a directory or a file of a part that is empty, or in no format that is read; None if the
    part is there after all.
    """
    section = section_of_name(entry.name) or Section.EXTRA
    has_bytes = not entry.directory and entry.nbytes > 0
    is_there = stem_of(entry.name) in checkpoint.extra or has_bytes
    if is_there if section is Section.EXTRA else checkpoint.has(section):
        return None
    message = f"{entry.path} is empty: the save of this part did not finish, or it was not copied"
    if has_bytes:
        message = f"{entry.path} has the name of the {section}, which is nowhere else, and is in no format that is read"
    return Problem("missing-section", message, file=entry.path, section=section)


def _parent_quoted(path: str) -> str:
    return shlex.quote(path.rpartition("/")[0] or ".")


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
            next_step = to_look("see what is there", f"ls {shlex.quote(above)}")
            names = os.listdir(above) if os.access(above, os.R_OK) else []
            name = source.removeprefix(above).strip("/").partition("/")[0]
            wanted = os.path.normpath(os.path.join(above, name))
            if os.path.islink(wanted):
                why = f"{wanted} is a link to {os.readlink(wanted)}, which does not exist"
                next_step = to_look("see where it leads", f"ls -l {shlex.quote(wanted)}")
            elif meant := get_close_matches(name, names, n=1):
                why += f"; {os.path.normpath(os.path.join(above, meant[0]))} is there"
    return SourceMissingError(f"{source} does not exist", file=source, why=why, next_step=next_step)
