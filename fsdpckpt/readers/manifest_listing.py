"""A directory held against the ``fsdpckpt.json`` in it: every file there, of its length, and none of another save."""

from __future__ import annotations

import os
import posixpath
import re

from fsdpckpt.ir.checkpoint import Manifest, Problem, Section
from fsdpckpt.readers.flavors import MANIFEST, auxiliary
from fsdpckpt.storage.sources import Entry, Sources

__all__ = ["check_listing", "listed"]

_DECIDING = (".metadata", ".index.json")  # small, and without them the others mean nothing
_SECTIONS = ((Section.OPTIM, "optim"), (Section.EXTRA, "extra_state"), (Section.MODEL, "model"))


def check_listing(manifest: Manifest, there: dict[str, Entry]) -> list[Problem]:
    """Problems of files that are missing, of another length, or among the listed without being one of them.

    ``there``: what ``listed`` found. A missing file that describes a model without being part of it is not fatal.
    """
    found: list[Problem] = []
    for name, stated in manifest.files.items():
        path = f"{manifest.directory}/{name}"
        entry = there.get(name)
        if entry is None:
            message = f"{path} is missing, and {MANIFEST} lists it (if that is meant, remove {MANIFEST} too)"
            fatal = name.endswith(_DECIDING) or not auxiliary(posixpath.basename(name))
            found.append(Problem("missing-file", message, fatal=fatal, file=path, section=_section(name)))
        elif entry.nbytes != stated.nbytes:
            message = f"{path} has {entry.nbytes} bytes, and {MANIFEST} says {stated.nbytes}"
            kind = "truncated" if entry.nbytes < stated.nbytes else "length"
            found.append(Problem(kind, message, file=path, section=_section(name)))
    return [*found, *_strays(manifest, there)]


def listed(manifest: Manifest, sources: Sources) -> dict[str, Entry]:
    """The files of every directory that the manifest names one in, by their path below its own."""
    found: dict[str, Entry] = {}
    for folder in sorted({"", *(posixpath.dirname(name) for name in manifest.files)}):
        path = posixpath.join(manifest.directory, folder).rstrip("/")
        entry = sources.stat(path)
        if entry is not None and entry.directory:
            for inner in sources.list_directory(path):
                if not inner.directory:
                    found[posixpath.join(folder, inner.name)] = inner
    return found


def _section(name: str) -> Section | None:
    """The one section that a file of this name holds; None where it may hold several."""
    return next((section for section, word in _SECTIONS if re.search(word, name)), None)


def _strays(manifest: Manifest, there: dict[str, Entry]) -> list[Problem]:
    """Files of the same kind as those of the checkpoint that were not written with it."""
    kinds = {os.path.splitext(name)[1] for name in manifest.files} - {"", ".json"}
    strays = [name for name in there if os.path.splitext(name)[1] in kinds and name not in manifest.files]
    return [
        Problem(
            "stray",
            f"{manifest.directory}/{name} is not among the files that {MANIFEST} lists: another save left it, or it "
            "was put there since",
            fatal=False,
            file=f"{manifest.directory}/{name}",
        )
        for name in sorted(strays)
    ]
