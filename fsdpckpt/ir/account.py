"""Says what became of everything that was found at a source: of every file, and of every entry of a state dict.

A file that nobody mentions cannot be told from one that was overlooked. So the account lists all of them, and a test
walks a directory and compares.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fsdpckpt import flags


class Fate(StrEnum):
    """What became of a file. An error ends the reading, so no account has one."""

    READ = "read"
    COPIED = "copied"
    LEFT_OUT = "left-out"


class Rule(StrEnum):
    """Why a file or a directory was left out."""

    ABOVE = "beside the one checkpoint, which is further down"
    DESCRIBES = "a file that describes the model or the run, or belongs to another tool"
    EMPTY = "an empty directory"
    EXPORT = "a second copy of the model, for other programs"
    HIDDEN = "a hidden file or directory"
    IGNORED = f"left out by {flags.ignore_file!s}"
    LINK = "a link to what is here under another name"
    OTHER = "not a file that a checkpoint consists of, judging by its content"
    OTHER_SECTION = f"holds a section that {flags.only!s} leaves out"
    REFUSED = "holds objects that fsdpckpt does not read"
    SEPARATE = "a checkpoint of its own"
    UNNAMED = "data that neither an index nor the metadata of the checkpoint names"


@dataclass(frozen=True, slots=True)
class AccountedFile:
    """``path``: relative to the source; with a trailing ``/`` a directory, with everything below it.

    ``detail``: what the file was read as, the ``Rule`` that left it out, or where it was copied to.
    """

    path: str
    fate: Fate
    detail: str


@dataclass(frozen=True, slots=True)
class AccountedEntry:
    """``key``: at the top of the state dict of ``part``. ``read_as``: the sections that have what is below it."""

    part: str
    key: str
    read_as: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Account:
    """``files``: sorted by path. ``entries``: those of every container that was read."""

    files: tuple[AccountedFile, ...] = ()
    entries: tuple[AccountedEntry, ...] = ()
    _by_path: dict[str, AccountedFile] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_path.update((file.path, file) for file in self.files)

    def of(self, path: str) -> AccountedFile | None:
        """What became of the file at ``path``, relative to the source; None if nothing says so."""
        found = self._by_path.get(path)
        above = path
        while found is None and "/" in above:
            above = above.rpartition("/")[0]
            found = self._by_path.get(f"{above}/")
        return found

    def with_copied(self, paths: Collection[str]) -> Account:
        """The account of a conversion that also copied the files ``paths`` as they are."""
        if not paths:
            return self
        copied = set(paths)
        files = [
            replace(file, fate=Fate.COPIED, detail="copied unchanged") if file.path in copied else file
            for file in self.files
        ]
        return Account(tuple(files), self.entries)

    def paths(self, fate: Fate) -> dict[str, list[str]]:
        """The paths of that fate, by detail."""
        by_detail: dict[str, list[str]] = {}
        for file in self.files:
            if file.fate is fate:
                by_detail.setdefault(file.detail, []).append(file.path)
        return by_detail
