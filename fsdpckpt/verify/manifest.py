"""The bytes of a directory held against the ``fsdpckpt.json`` in it."""

from __future__ import annotations

from fsdpckpt.ir.checkpoint import Manifest
from fsdpckpt.readers.beside import check_listing, listed, read_manifest
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.checksums import Record, check_records

__all__ = ["damaged_files", "stated_records"]


def stated_records(manifest: Manifest, sources: Sources) -> list[Record]:
    """The whole files to sum: those that are there in the length that is stated."""
    there = {name: entry.nbytes for name, entry in listed(manifest, sources).items()}
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
    found = check_listing(manifest, listed(manifest, sources))
    found += check_records(stated_records(manifest, sources), sources=sources)
    return [problem.message for problem in found]
