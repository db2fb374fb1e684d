"""Find the parts of a checkpoint in a file or directory: what can be read as one container each, and how.

Only names, directory listings and the first bytes of files are looked at; reading a part is a later call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.formats.safetensors import looks_like_safetensors
from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.producers.table import export_files
from fsdpckpt.readers.beside import auxiliary
from fsdpckpt.readers.protocol import EXTRA_STEM, MANIFEST, UNITS, FileTable, Tree
from fsdpckpt.readers.torch_ranks.names import MOST_NAMED, RankSet, group_ranks
from fsdpckpt.storage.protocols import UPLOADING, Entry
from fsdpckpt.storage.sources import Sources

__all__ = ["Listing", "Part", "file_part", "list_parts"]

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # protocol 2, then torch's magic number as a long
_SECTION = re.compile(r"model|optim|extra_state|state_dict|weights|params", re.IGNORECASE)
_INDEX = ".safetensors.index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_SHARD = re.compile(r"^(?:shard-\d+-)?(?P<stem>.*?)-\d+-of-\d+\.safetensors$")

Reader = Callable[[FileTable, Sources], Tree]


@dataclass(slots=True)
class Part:
    """``label`` names it in messages (a path), ``stem`` names its extras, ``read`` opens it.

    ``bare_ranks``: file names with nothing but a number were taken for ranks. ``neighbour``: the name does not say
    that this is a model or an optimizer, so a checkpoint can do without it.
    """

    label: str
    stem: str
    read: Reader
    bare_ranks: bool = False
    neighbour: bool = False


@dataclass(slots=True)
class Listing:
    """One directory: its parts, the files that are none, and its sub-directories."""

    path: str
    names: list[str]
    parts: list[Part] = field(default_factory=list)
    not_carried: list[str] = field(default_factory=list)
    directories: list[Entry] = field(default_factory=list)


def file_part(path: str, nbytes: int, sources: Sources) -> Part | None:
    """How to read one file, None when its first bytes are of no kind this program knows."""
    name = path.replace("\\", "/").rpartition("/")[2]
    if name.endswith(_INDEX):
        return _index_part(path)
    source = sources.open(path)
    head = source.read(0, min(16, nbytes))
    if head.startswith((ZIP_MAGIC, LEGACY_MAGIC)):
        return Part(path, _stem(name), lambda files, opened: _read_torch_file(path, files, opened))
    if looks_like_safetensors(head, nbytes):
        return _safetensors_part([path], path)
    return None


def list_parts(path: str, sources: Sources, *, locate: bool, only: Section | None = None) -> Listing:
    """What lies directly in the directory ``path``.

    Raises SourceIncompleteError naming every rank file that a set of rank files lacks; with ``only``, of other sections
    than that one sets that lack files are left out.
    """
    from fsdpckpt.readers.dcp.directory import is_dcp

    entries = sources.list_directory(path)
    _refuse_uploads(path, entries)
    names = [entry.name for entry in entries]
    exports = export_files(names)
    files = {entry.name: entry for entry in entries if not entry.directory and entry.name not in exports}
    listing = Listing(path, names, not_carried=sorted(exports))
    listing.directories = [entry for entry in entries if entry.directory and not entry.name.startswith(".")]
    listing.not_carried += [f"{entry.name}/" for entry in entries if entry.directory and entry.name.startswith(".")]
    if is_dcp(files):
        listing.parts.append(_dcp_part(path, locate=locate))
    rest = _safetensors_parts(path, files, listing, sources)
    _torch_parts([files[name] for name in rest], listing, sources, only)
    return listing


def _refuse_uploads(path: str, entries: Iterable[Entry]) -> None:
    if any(entry.name == UPLOADING for entry in entries):
        raise SourceIncompleteError(
            f"{path} is not complete: it is still being uploaded, or the upload was interrupted",
            file=f"{path.rstrip('/')}/{UPLOADING}",
            why=f"fsdpckpt deletes {UPLOADING} once everything is there",
            next_step="wait for the upload to end, or run the command that began it again with --resume",
        )


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _read_torch_file(path: str, files: FileTable, sources: Sources) -> Tree:
    from fsdpckpt.readers.torch_ranks.read import read_torch_file

    return read_torch_file(path, files, sources)


def _dcp_part(path: str, *, locate: bool) -> Part:
    def read(files: FileTable, sources: Sources) -> Tree:
        from fsdpckpt.readers.dcp.read import read_dcp

        return read_dcp(path, files, sources, locate=locate)

    return Part(path, path.rstrip("/").rpartition("/")[2], read)


def _index_part(path: str) -> Part:
    def read(files: FileTable, sources: Sources) -> Tree:
        from fsdpckpt.readers.safetensors.read import read_safetensors_index

        return read_safetensors_index(path, files, sources)

    name = path.replace("\\", "/").rpartition("/")[2]
    return Part(path, name.removesuffix(_INDEX), read)


def _safetensors_part(paths: list[str], label: str) -> Part:
    def read(files: FileTable, sources: Sources) -> Tree:
        from fsdpckpt.readers.safetensors.read import read_safetensors

        return read_safetensors(paths, files, sources)

    return Part(label, _stem(label.replace("\\", "/").rpartition("/")[2]), read)


def _safetensors_parts(path: str, files: Mapping[str, Entry], listing: Listing, sources: Sources) -> list[str]:
    """Add the safetensors parts of a directory; returns the names of all other files."""
    rest: list[str] = []
    groups: dict[str, list[str]] = {}
    indexed = {name.removesuffix(_INDEX) for name in files if name.endswith(_INDEX)}
    for stem in sorted(indexed):
        listing.parts.append(_index_part(files[stem + _INDEX].path))
    for name in files:
        if name.endswith(_INDEX):
            continue
        if not name.endswith(".safetensors"):
            rest.append(name)
            continue
        shard = _SHARD.match(name)
        stem = shard["stem"] if shard else _stem(name)
        if shard is None or stem not in indexed or name.startswith("shard-"):
            groups.setdefault(stem, []).append(name)
    sources.warm([files[name].path for names in groups.values() for name in names], tails=False)
    for stem, names in sorted(groups.items()):
        label = files[names[0]].path if len(names) == 1 else f"{path.rstrip('/')}/{stem}-*.safetensors"
        listing.parts.append(_safetensors_part([files[name].path for name in names], label))
    return rest


def _torch_parts(entries: Iterable[Entry], listing: Listing, sources: Sources, only: Section | None) -> None:
    """Add rank sets and single torch files; everything else is listed as not carried."""
    torch: dict[str, Entry] = {}
    sources.warm([entry.path for entry in entries if entry.name.endswith(_TORCH_SUFFIXES)])
    for entry in entries:
        if entry.name in (MANIFEST, UNITS, ".metadata") or entry.name.endswith((".distcp", ".metadata")):
            continue
        if auxiliary(entry.name) or not _is_torch(entry, sources):
            listing.not_carried.append(entry.name)
        else:
            torch[entry.name] = entry
    sets, single = group_ranks(torch)
    _share_world_size(sets)
    if only is not None:
        unwanted = [found for found in sets if found.absent and _section_of(found.stem) not in (None, only)]
        sets = [found for found in sets if found not in unwanted]
        listing.not_carried += [name for found in unwanted for name in found.files.values()]
    _require_all_ranks(sets, listing.path, {entry.name: entry.nbytes for entry in entries})
    for found in sets:
        listing.parts.append(_ranks_part(found, torch, listing.path))
    for name in single:
        path = torch[name].path
        listing.parts.append(_torch_part(path, name))


def _torch_part(path: str, name: str) -> Part:
    stem = _stem(name)
    return Part(
        path, stem, lambda files, sources: _read_torch_file(path, files, sources), neighbour=not _SECTION.search(stem)
    )


def _is_torch(entry: Entry, sources: Sources) -> bool:
    if entry.nbytes < 16:
        return False
    return sources.open(entry.path).read(0, 16).startswith((ZIP_MAGIC, LEGACY_MAGIC))


def _ranks_part(found: RankSet, torch: Mapping[str, Entry], directory: str) -> Part:
    paths = {rank: torch[name].path for rank, name in sorted(found.files.items())}

    def read(files: FileTable, sources: Sources) -> Tree:
        from fsdpckpt.readers.torch_ranks.read import read_torch_ranks

        return read_torch_ranks(paths, files, sources, extras=found.stem == EXTRA_STEM)

    first, last = found.name(min(paths)), found.name(max(paths))
    label = f"{directory.rstrip('/')}/{first}" + (f" .. {last}" if len(paths) > 1 else "")
    return Part(label, found.stem, read, found.bare, neighbour=not _SECTION.search(found.stem))


def _section_of(stem: str) -> Section | None:
    """The section that rank files of this stem hold, where it says so."""
    words = {Section.OPTIM: "optim", Section.EXTRA: EXTRA_STEM, Section.MODEL: "model"}
    return next((section for section, word in words.items() if word in stem), None)


def _share_world_size(sets: list[RankSet]) -> None:
    """Sets whose names say ``rank`` but not how many share the largest world size found."""
    shared = max((found.world_size for found in sets if found.world is None and not found.bare), default=0)
    for found in sets:
        if found.world is None and not found.bare:
            found.world = shared


def _require_all_ranks(sets: list[RankSet], directory: str, sizes: Mapping[str, int]) -> None:
    """Every set has ranks 0 .. W-1."""
    count = sum(found.absent for found in sets)
    missing = list(islice((name for found in sets for name in found.missing()), MOST_NAMED))
    if missing:
        damaged = sum(name in sizes for name in missing)
        raise SourceIncompleteError(
            f"{directory}: {count} rank {'file is' if count == 1 else 'files are'} "
            + ("missing" if not damaged else "damaged" if damaged == count else "missing or damaged"),
            details=[
                name if name not in sizes else f"{name} is no torch.save file ({sizes[name]} bytes)" for name in missing
            ],
            why="the save or the copy did not finish, or these ranks wrote to the disks of other machines",
            next_step="copy the files of all ranks into one directory",
            file=f"{directory.rstrip('/')}/{missing[0]}",
        )
