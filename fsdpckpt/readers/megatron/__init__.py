"""Read Megatron-core's distributed checkpoints: ``torch_dist`` directories, and what Megatron FSDP adds to DCP.

``dist_checkpointing.save`` writes a DCP directory without planner data, ``metadata.json`` with the name of the format,
and the values that all ranks share in ``common.pt`` (since core 0.19 in the object ``common_state``). The training loop
puts each into ``iter_<number>/`` and the last number into ``latest_checkpointed_iteration.txt``
(``megatron/core/dist_checkpointing/serialization.py``, ``megatron/training/checkpointing.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from fsdpckpt.errors import SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.readers.beside import claim_named
from fsdpckpt.readers.protocol import Claim, FileTable, Part, ReadOptions, Tree
from fsdpckpt.storage.protocols import Entry
from fsdpckpt.storage.sources import Sources

CONFIG, COMMON = "metadata.json", "common.pt"
_LATEST = "latest_checkpointed_iteration.txt"
_DCP = (".distcp", ".metadata")
_OWN = {COMMON, ".metadata"}
_MAX_CONFIG_BYTES = 1 << 16
_MOST_LETTERS = 32


class MegatronReader:
    """Directories that ``megatron.core.dist_checkpointing.save`` wrote, or a run's directory with the last of them."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        del file, sources
        return None

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """The checkpoint in ``path``, or the one that ``latest_checkpointed_iteration.txt`` names. Raises
        SourceUnsupportedError for the zarr format, SourceIncompleteError where no file says the format."""
        if CONFIG in files or files.keys() >= _OWN:
            return _claim(path, files, options, sources)
        claim = partial(_claim, options=options, sources=sources)
        return claim_named(path, files.get(_LATEST), sources, claim, _directory_of)


def _claim(path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources) -> Claim:
    backend = _backend(files.get(CONFIG), sources)
    if backend is None:
        if files.keys() >= _OWN:
            raise SourceIncompleteError(
                f"{path} has the files of a Megatron checkpoint, and no {CONFIG} that says its format",
                file=f"{path.rstrip('/')}/{CONFIG}",
                why="the save or the copy did not finish, or the file was damaged",
                next_step=f"copy {CONFIG} again, or add --ignore-file {COMMON} where that file is none of Megatron's",
            )
        return Claim()
    if backend != "torch_dist":
        raise SourceUnsupportedError(
            f"{path} is a Megatron checkpoint of the format {backend}, which fsdpckpt does not read",
            file=f"{path.rstrip('/')}/{CONFIG}",
            expected="torch_dist",
            found=backend,
            why="Megatron-core gave that format up for torch_dist",
            next_step="load it with the Megatron-LM that wrote it, and save it with --ckpt-format torch_dist",
        )

    def read(table: FileTable, sources: Sources) -> Tree:
        from fsdpckpt.readers.megatron.torch_dist import read_torch_dist

        return read_torch_dist(path, files.get(COMMON), table, sources, locate=options.locate)

    names = {name for name in files if name.endswith(_DCP) or name in (CONFIG, COMMON)}
    return Claim([Part(path, path.rstrip("/").rpartition("/")[2], read)], names)


def _backend(entry: Entry | None, sources: Sources) -> str | None:
    """The format that ``metadata.json`` names; None where it is another program's file."""
    if entry is None or entry.nbytes > _MAX_CONFIG_BYTES:
        return None
    try:
        document = json.loads(sources.open(entry.path).read(0, entry.nbytes))
    except (ValueError, RecursionError):
        return None
    backend = document.get("sharded_backend") if isinstance(document, dict) else None
    return backend[:_MOST_LETTERS] if isinstance(backend, str) and backend.isprintable() else None


def _directory_of(iteration: str) -> str | None:
    number = iteration.isascii() and iteration.isdecimal()
    return f"iter_{int(iteration):07d}" if number else "release" if iteration == "release" else None
