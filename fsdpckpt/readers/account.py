"""Keeps the account of a source while it is read: what becomes of every file, and of every entry.

The search enters each directory that it lists, with a rule for every file that no reader claims; the reader's file
table says which of the claimed ones were read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fsdpckpt.credentials import shown_name, without_credentials
from fsdpckpt.ir.account import Account, AccountedEntry, AccountedFile, Fate, Rule
from fsdpckpt.ir.checkpoint import Section, SourceFile
from fsdpckpt.ir.files import paths_in
from fsdpckpt.ir.values import Key
from fsdpckpt.readers.parts import ReadPart
from fsdpckpt.readers.sections import regroup
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources, relative_path

METADATA = "metadata"
"""What a file was read as that holds no section but says where the sections are."""

_EXTRAS = "extras"
_METADATA_FILE = re.compile(r"^\.metadata$|^metadata\.pkl$|^latest|\.(json|txt)$")


class AccountBook:
    """The account of ``source`` in the making. Entries that are made later replace earlier ones."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._files: dict[str, AccountedFile] = {}
        self._claimed: dict[str, Entry] = {}
        self._claimed_directories: dict[str, None] = {}

    def left_out(self, path: str, rule: Rule, *, directory: bool = False) -> None:
        """The file at ``path``, or the ``directory`` with all that is below it, is left out by ``rule``."""
        self._enter(path + "/" if directory else path, Fate.LEFT_OUT, rule)

    def read(self, path: str, read_as: str) -> None:
        self._enter(path, Fate.READ, read_as)

    def claimed(self, entries: Iterable[Entry]) -> None:
        """A reader claimed these files and directories: ``account`` finds out whether they were read."""
        for entry in entries:
            if entry.directory:
                self._claimed_directories[entry.path] = None
            else:
                self._claimed[entry.path] = entry

    def account(self, parts: Sequence[ReadPart], files: Sequence[SourceFile], sources: Sources) -> Account:
        """The account, once all ``parts`` were read, whose data is in ``files``."""
        for directory in self._claimed_directories:
            self.claimed(entry for _, entry in sources.files_below(directory))
        sections = {path: part for part in parts for path in paths_in(files[slice(*part.file_numbers)])}
        places = {part.origin.label.rstrip("/") for part in parts} | {part.origin.directory for part in parts}
        for path, entry in self._claimed.items():
            if path in sections:
                self.read(path, _sections_text(sections[path]))
            elif relative_path(path, self._source) in self._files:
                continue  # the search has a rule for it
            elif not any(_is_in(path, place) for place in places):
                self.left_out(path, Rule.ABOVE)
            elif entry.name.endswith(".py"):
                self.left_out(path, Rule.DESCRIBES)
            elif entry.nbytes and not _METADATA_FILE.search(entry.name):
                self.left_out(path, Rule.UNNAMED)
            else:
                self.read(path, METADATA)
        # A checkpoint of its own that turned out to be the one that is read.
        entered = {above for file in self._files.values() if file.fate is Fate.READ for above in _above(file.path)}
        accounted = [self._files[path] for path in sorted(self._files) if path not in entered]
        entries = [entry for part in parts for entry in _entries(part)]
        return Account(tuple(accounted), tuple(entries))

    def _enter(self, path: str, fate: Fate, detail: str) -> None:
        relative = relative_path(path, self._source) + ("/" if path.endswith("/") else "")
        relative = relative if relative.strip("/") else shown_name(path)  # the source itself
        self._files[relative] = AccountedFile(relative, fate, str(detail))


def _is_in(path: str, directory: str) -> bool:
    """Whether ``path`` is below ``directory``, "" being the working directory."""
    return path.startswith(f"{directory}/") or (directory in ("", ".") and not path.startswith("/"))


def _above(path: str) -> list[str]:
    """The directories that ``path`` is in: ``a/b/c`` is in ``a/`` and ``a/b/``."""
    words = path.split("/")[:-1]
    return ["/".join(words[:depth]) + "/" for depth in range(1, len(words) + 1)]


def _sections_text(part: ReadPart) -> str:
    names = [*sorted(part.section_names), *(named.label for named in part.sections.named)]
    return " and ".join(names) or _EXTRAS


def _entries(part: ReadPart) -> list[AccountedEntry]:
    """Every key at the top of the part's state dict, with the sections that its content went to."""
    root = regroup(part.tree.root) if isinstance(part.tree.root, dict) else {}
    label = without_credentials(part.label)
    return [AccountedEntry(label, str(key), _read_as(part, key)) for key in root]


def _read_as(part: ReadPart, key: Key) -> tuple[str, ...]:
    sections = part.sections
    places = {"model": sections.model_path, "optimizer": sections.optim_path}
    places |= {named.label: named.path for named in sections.named}
    owner = sections.place_of((key,))
    read_as = [name for name, path in places.items() if path is not None and path[:1] == (key,)]
    if owner is Section.MODEL or owner is Section.OPTIM:
        read_as = ["model" if owner is Section.MODEL else "optimizer"]
    if key in sections.extra:
        read_as.append(_EXTRAS)
    return tuple(read_as)
