"""A directory held against the ``fsdpckpt.json`` in it: every file there, of its length, and none of another save."""

from __future__ import annotations

import os
import posixpath

from fsdpckpt.ir.checkpoint import Manifest, Problem
from fsdpckpt.readers.flavors import MANIFEST
from fsdpckpt.readers.manifest import read_manifest
from fsdpckpt.storage.sources import Entry, Sources
from fsdpckpt.verify.checksums import Record, check_records

__all__ = ["check_listing", "damaged_files", "stated_records"]


def check_listing(manifest: Manifest, sources: Sources) -> list[Problem]:
    """Problems of files that are missing, of another length, or among the listed without being one of them."""
    there = _listed(manifest, sources)
    found: list[Problem] = []
    for name, stated in manifest.files.items():
        path = f"{manifest.directory}/{name}"
        entry = there.get(name)
        if entry is None:
            found.append(Problem("missing-file", f"{path} is missing, and {MANIFEST} lists it", file=path))
        elif entry.nbytes != stated.nbytes:
            message = f"{path} has {entry.nbytes} bytes, and {MANIFEST} says {stated.nbytes}"
            found.append(Problem("truncated" if entry.nbytes < stated.nbytes else "length", message, file=path))
    return [*found, *_strays(manifest, there)]


def _listed(manifest: Manifest, sources: Sources) -> dict[str, Entry]:
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


def stated_records(manifest: Manifest, sources: Sources) -> list[Record]:
    """The whole files to sum: those that are there in the length that is stated."""
    there = {name: entry.nbytes for name, entry in _listed(manifest, sources).items()}
    return [
        Record(f"{manifest.directory}/{name}", 0, stated.nbytes, stated.crc, MANIFEST)
        for name, stated in manifest.files.items()
        if there.get(name) == stated.nbytes
    ]


def damaged_files(directory: str, sources: Sources) -> list[str]:
    """What is wrong with the files of a directory that cannot be read as a checkpoint, as far as a manifest tells."""
    entry = sources.stat(directory)
    if entry is None or not entry.directory:
        return []
    names = [entry.name for entry in sources.list_directory(directory)]
    manifest, problems = read_manifest(directory, names, sources)
    if manifest is None:
        return [problem.message for problem in problems]
    found = check_listing(manifest, sources)
    found += check_records(stated_records(manifest, sources), sources=sources)
    return [problem.message for problem in found]
