"""Recognises directories of torch_checkpointing by their ``metadata.pkl``, and finds the files of their items.

``CheckpointManager.save(path, {"model": ..., "optimizer": ..., "step": 7})`` writes one file for each item and rank, by
default ``<item>_<rank>.pt`` (``checkpoint_writer.py``). Rank 0 writes ``metadata.pkl`` if an item can be resharded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from fsdpckpt.errors import SourceIncompleteError, SourceUnrecognisedError
from fsdpckpt.ir import Section
from fsdpckpt.producers.torch_checkpointing import METADATA, default_file
from fsdpckpt.readers.protocol import Claim, FileTable, Part, PartContents, ReadOptions
from fsdpckpt.readers.side_files import section_of_name
from fsdpckpt.readers.torch_checkpointing.metadata import (
    TORCH,
    Item,
    ItemFile,
    Metadata,
    find_metadata,
)
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import is_or_are, plural

_MOST_MISSING = 10_000  # files that are named
_DEFAULT = re.compile(r"^(?P<item>.+)_(?P<rank>0|[1-9]\d{0,6})\.pt$")


class TorchCheckpointingReader:
    """Directories with torch_checkpointing's ``metadata.pkl``."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        """Raises SourceUnrecognisedError for a safetensors file of one rank, which does not say that it is a part."""
        directory = file.path.rpartition("/")[0] or "."
        if not file.name.endswith(".safetensors"):
            return None
        metadata = find_metadata(sources.stat(f"{directory}/{METADATA}"), sources)
        if metadata is None:
            return None
        paths = {item_file.path for item in metadata.items.values() for item_file in item.files.values()}
        if metadata.world_size == 1 or file.name not in paths:
            return None
        raise SourceUnrecognisedError(
            f"{file.path} is the part of one of {metadata.world_size} ranks, as {directory}/{METADATA} says",
            file=file.path,
            next_step=f"give the directory: {directory}",
        )

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """One part with all items; with ``options.only``, without the items of other sections that lack files.

        Raises SourceIncompleteError that lists every missing file.
        """
        metadata = find_metadata(files.get(METADATA), sources)
        if metadata is None:
            return Claim()
        directory = path.rstrip("/")
        found = _files_below(directory, files, metadata, sources)
        items = [*metadata.items.values(), *_other_items(files, metadata)]
        incomplete = {item.name: missing for item in items if (missing := _missing(item, found))}
        unwanted = {name for name in incomplete if not _is_wanted(name, options.only)}
        lacking = [name for item, names in incomplete.items() if item not in unwanted for name in names]
        if lacking:
            raise SourceIncompleteError(
                f"{path}: {plural(len(lacking), 'file')} that {METADATA} names {is_or_are(len(lacking))} missing",
                details=lacking,
                files=[f"{directory}/{name}" for name in lacking],
                file=f"{directory}/{lacking[0]}",
                why="each rank writes its own part, and every part is needed; other nodes may hold the rest on their "
                "disks",
                next_step="copy the files of all ranks into one directory and give that directory",
            )
        taken = [item for item in items if item.name not in unwanted]
        left_out = [file.path for item in items if item.name in unwanted for file in item.files.values()]

        def read(table: FileTable, sources: Sources) -> PartContents:
            from fsdpckpt.readers.torch_checkpointing.read import read_items

            return read_items(directory, metadata, taken, table, sources)

        names = {METADATA, *(file.path for item in items for file in item.files.values())}
        return Claim(
            [Part(path, directory.rpartition("/")[2], read)],
            names & files.keys(),
            [name for name in left_out if name in files],
            {name.partition("/")[0] for name in names if "/" in name},
        )


def files_of_ranks(files: Mapping[str, Entry], sources: Sources) -> dict[str, tuple[str, int]]:
    """The name of every file that belongs to the checkpoint in a directory, with the item in place of the rank, and the
    rank. ``files``: those that are there. Empty if it is no such directory; raises what the reader of the metadata
    does.
    """
    metadata = find_metadata(files.get(METADATA), sources)
    if metadata is None:
        return {}
    items = [*metadata.items.values(), *_other_items(files, metadata)]
    return {file.path: (_pattern(item, file.path, rank), rank) for item in items for rank, file in item.files.items()}


def _pattern(item: Item, path: str, rank: int) -> str:
    """``path`` with ``*`` in place of the rank: the last number that is the rank's, if there is one."""
    numbers = [match for match in re.finditer(r"\d+", path) if int(match[0]) == rank]
    if not numbers:
        return f"{item.name} of rank *"
    return f"{path[: numbers[-1].start()]}*{path[numbers[-1].end() :]}"


def _is_wanted(name: str, only: Section | None) -> bool:
    """Whether an item may be of the section ``only``."""
    return only is None or section_of_name(name) in (None, only)


def _files_below(directory: str, files: Mapping[str, Entry], metadata: Metadata, sources: Sources) -> set[str]:
    """The names of all files, those in subdirectories that ``metadata`` names with their path."""
    found = set(files)
    paths = {file.path for item in metadata.items.values() for file in item.files.values()}
    for folder in sorted({path.rpartition("/")[0] for path in paths} - {""}):
        below = f"{directory}/{folder}"
        if sources.stat(below) is not None:
            found |= {f"{folder}/{entry.name}" for entry in sources.list_directory(below) if not entry.directory}
    return found


def _missing(item: Item, found: set[str]) -> list[str]:
    return [file.path for _, file in sorted(item.files.items()) if file.path not in found]


def _other_items(files: Mapping[str, Entry], metadata: Metadata) -> list[Item]:
    """The items that are not in ``metadata`` because they cannot be resharded, by the default names of their files.

    Some are those of one rank only. What several ranks have, all have.
    """
    claimed = {file.path for item in metadata.items.values() for file in item.files.values()}
    by_item: dict[str, dict[int, ItemFile]] = {}
    for name in files:
        match = _DEFAULT.match(name)
        if match is not None and name not in claimed and int(match["rank"]) < metadata.world_size:
            by_item.setdefault(match["item"], {})[int(match["rank"])] = ItemFile(name, TORCH)
    items: list[Item] = []
    most = _MOST_MISSING
    for name, of_ranks in sorted(by_item.items()):
        item = _of_all_ranks(Item(name, of_ranks, {}), metadata.world_size, most)
        most -= len(item.files) - len(of_ranks)
        items.append(item)
    return items


def _of_all_ranks(item: Item, world_size: int, most: int) -> Item:
    """``item`` with the names of the files that it lacks, ``most`` of them, unless one rank alone saved it."""
    if len(item.files) == 1:
        return item
    lacking = islice((rank for rank in range(world_size) if rank not in item.files), most)
    named = {**item.files, **{rank: ItemFile(default_file(item.name, rank), TORCH) for rank in lacking}}
    return replace(item, files=dict(sorted(named.items())))
