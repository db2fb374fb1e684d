"""Reads DCP directories (``torch.distributed.checkpoint``): recognises their files, and reads their metadata.

Follows ``torch/distributed/checkpoint/filesystem.py``: data files are ``__<rank>_<n>.distcp``, ``.metadata`` is renamed
into place last, and with ``use_collectives=False`` each rank writes ``__<rank>.metadata`` instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdpckpt.errors import SourceUnrecognisedError
from fsdpckpt.readers.dcp.directory import RANK_METADATA
from fsdpckpt.readers.protocol import Claim, FileTable, Part, PartContents, ReadOptions
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources

_SUFFIXES = (".distcp", ".metadata")


class DcpReader:
    """Directories that contain ``.metadata`` or ``.distcp`` files, complete or not."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        del sources
        if not file.name.endswith(_SUFFIXES):
            return None
        raise SourceUnrecognisedError(
            f"{file.path} is one file of a DCP directory",
            file=file.path,
            next_step=f"give the directory: {file.path.rpartition('/')[0] or '.'}",
        )

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        del sources
        claim = Claim(names={name for name in files if name.endswith(_SUFFIXES)})
        if any(name == ".metadata" or RANK_METADATA.match(name) or name.endswith(".distcp") for name in files):
            claim.parts.append(_part(path, options))
        return claim


def _part(path: str, options: ReadOptions) -> Part:
    def read(files: FileTable, sources: Sources) -> PartContents:
        from fsdpckpt.readers.dcp.megatron import unwrap_megatron_fsdp
        from fsdpckpt.readers.dcp.read import read_dcp

        tree = read_dcp(path, files, sources, locate=options.locate)
        unwrap_megatron_fsdp(tree, files, path)
        return tree

    return Part(path, path.rstrip("/").rpartition("/")[2], read)
