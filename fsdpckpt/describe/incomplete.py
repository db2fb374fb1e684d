"""Describes a checkpoint that cannot be read whole: which files are there, and which sections can be read alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from fsdpckpt import flags
from fsdpckpt.credentials import without_credentials
from fsdpckpt.describe.describe import SectionSummary, describe
from fsdpckpt.describe.rank_grid import FileGrid, FileState, rank_grid
from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceError, SourceIncompleteError, to_copy
from fsdpckpt.formats.zip import read_directory
from fsdpckpt.ir.checkpoint import Checkpoint, Section
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.spans import chunk_ends
from fsdpckpt.ir.tensors import distinct
from fsdpckpt.notebook import table
from fsdpckpt.readers.detect import OpenOptions, open_checkpoint
from fsdpckpt.readers.manifest import read_manifest
from fsdpckpt.readers.torch_checkpointing import files_of_ranks
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import RemainingSources, Sources

_SECTIONS = (Section.MODEL, Section.OPTIM)
_MAX_FILES = 100_000
_ZIP = b"PK"


@dataclass(frozen=True, slots=True, repr=False)
class Incomplete:
    """What is left of the checkpoint at ``source``, which ``error`` prevents from being read.

    ``readable``: the sections that can be read without the others, each as a checkpoint of its own.
    """

    source: str
    error: FsdpckptError
    grid: FileGrid
    missing: tuple[str, ...]  # files that are known to belong to it, from its directory
    damaged: tuple[str, ...]
    readable: Mapping[Section, Checkpoint]
    ignore_file: tuple[str, ...]  # globs of what was left out of the checkpoint

    @property
    def summaries(self) -> dict[str, SectionSummary]:
        """Of the sections that can be read."""
        found: dict[str, SectionSummary] = {}
        for section, checkpoint in self.readable.items():
            totals = describe(checkpoint, section=section).sections
            found.update({name: totals[name] for name in totals if name == str(section)})
        return found

    @property
    def commands(self) -> list[str]:
        """What converts each section that can be read."""
        left_out = [flags.ignore_file(glob) for glob in self.ignore_file]
        return [
            flags.command("convert", self.source, "DST", flags.only(section), *left_out) for section in self.readable
        ]

    def _repr_html_(self) -> str:
        """For notebooks: the files that are missing or damaged."""
        rows = [(name, "missing") for name in self.missing] + [(name, "damaged") for name in self.damaged]
        return table(repr(self)[1:-1], ("file", "state"), rows, len(rows))

    def __repr__(self) -> str:
        return f"<{without_credentials(self.source)}: incomplete; {', '.join(self.readable) or 'nothing'} can be read>"


def describe_incomplete(
    source: str, error: FsdpckptError, sources: Sources, ignore_file: tuple[str, ...]
) -> Incomplete | None:
    """Look at the directory ``source``, of which ``error`` says what is wrong; None if it is no such error, if there is
    no directory, or if there is nothing to say beside the error. ``ignore_file``: globs of the files that were left out
    when the error was raised: no section is read with them.
    """
    sources = RemainingSources(sources, source, ignore_file)
    entry = sources.stat(source)
    if not isinstance(error, (SourceIncompleteError, SourceCorruptError)) or entry is None or not entry.directory:
        return None
    files: dict[str, Entry] = {}
    for name, file in sources.files_below(source):
        files[name] = file
        if len(files) == _MAX_FILES:
            break
    missing, damaged = _listed_in_manifest(source, files, sources)
    recorded: dict[str, tuple[str, int]] = {}
    for name in _named_in_error(error, source):
        if name not in files:
            missing.add(name)
        elif isinstance(error, SourceCorruptError):
            damaged.add(name)
    damaged |= {name for name, file in files.items() if name not in damaged and _is_cut_short(file, sources)}
    with suppress(SourceError):  # of a file that lists others, and is damaged itself
        recorded = files_of_ranks(files, sources)
        missing |= recorded.keys() - files.keys()
    grid = rank_grid(files, missing, damaged, recorded)
    for row in grid.rows:
        if row.pattern.count("*") == 1:  # else a rank has several, and their number is not known
            missing |= {row.pattern.replace("*", str(rank)) for rank in row.ranks(FileState.MISSING)}
    readable: dict[Section, Checkpoint] = {}
    # Files that contradict each other, and of which none is damaged by itself: none of them is known to be right.
    if damaged or not isinstance(error, SourceCorruptError):
        for section in _SECTIONS:
            checkpoint = _readable(source, section, sources)
            if checkpoint is not None:
                readable[section] = checkpoint
    if not readable and not missing and not any(row.ranks(FileState.DAMAGED) for row in grid.rows):
        return None
    return Incomplete(source, error, grid, tuple(sorted(missing)), tuple(sorted(damaged)), readable, ignore_file)


def suggest_readable(error: FsdpckptError, left: Incomplete) -> None:
    """Add to ``error`` the command that converts what can be read."""
    if left.readable and error.alternative is None:
        sections = " and the ".join(left.readable)
        error.alternative = to_copy(f"the {sections} can be converted without the rest", left.commands[0])


def _listed_in_manifest(source: str, files: Mapping[str, Entry], sources: Sources) -> tuple[set[str], set[str]]:
    """The files that ``fsdpckpt.json`` lists and that are not there, and those with another length."""
    manifest = read_manifest(source, [name for name in files if "/" not in name], sources).manifest
    listed = manifest.files if manifest is not None else {}
    missing = {name for name in listed if name not in files}
    return missing, {name for name, file in listed.items() if name in files and files[name].nbytes != file.nbytes}


def _named_in_error(error: FsdpckptError, source: str) -> set[str]:
    """The files that ``error`` is about, from ``source``."""
    above = source.rstrip("/") + "/"
    paths = [path for path in error.files or (error.file,) if path is not None and path.startswith(above)]
    # A finding is, or begins with, the name of a file in the directory.
    directory = os.path.dirname(error.file) + "/" if error.file is not None and error.file.startswith(above) else above
    if error.details and not error.files:
        paths = [directory + finding.split(": ")[0].split(" ")[0] for finding in error.details]
    return {path.removeprefix(above) for path in paths}


def _is_cut_short(file: Entry, sources: Sources) -> bool:
    """Whether ``file`` begins as an archive that torch.save wrote, and does not end as one."""
    if not file.name.endswith((".pt", ".pth", ".bin", ".ckpt", ".pkl")):
        return False
    if not file.nbytes:
        return True
    try:
        opened = sources.open(file.path)
        if opened.read(0, min(len(_ZIP), file.nbytes)) == _ZIP:
            read_directory(opened)
    except SourceError:
        return True
    return False


def _readable(source: str, section: Section, sources: Sources) -> Checkpoint | None:
    """The checkpoint with ``section``, if that needs nothing that is missing or cut short."""
    try:
        checkpoint = open_checkpoint(source, sources=sources, options=OpenOptions(only=section))
    except FsdpckptError:
        return None
    content = checkpoint.model if section is Section.MODEL else checkpoint.optim
    if not content or any(problem.fatal and problem.section in (None, section) for problem in checkpoint.problems):
        return None
    needed: dict[int, int] = {}  # how many bytes of each file
    for named in checkpoint.tensors():
        if named.section is not section:
            continue
        if flaws(named.tensor):
            return None
        chunks = named.tensor.chunks
        filled = (chunks.size != 0).all(axis=1)
        ends = chunk_ends(named.tensor)
        for number in distinct(chunks.file[filled]).tolist():
            needed[number] = max(needed.get(number, 0), int(ends[filled & (chunks.file == number)].max()))
    for number, nbytes in needed.items():
        try:
            if sources.open_file(checkpoint.files[number]).nbytes < nbytes:
                return None
        except SourceError:
            return None
    return checkpoint
