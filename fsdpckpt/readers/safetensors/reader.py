"""Reads safetensors files: one, a list of shards, a Hugging Face index, or the shards of DCP's own HF writer.

Plain files hold a flat dict of names to tensors. Files that fsdpckpt wrote hold the optimizer, its groups and the
extras too, see ``formats.safetensors``. Files of ``torch.distributed.checkpoint.HuggingFaceStorageWriter``
(``hf_storage.py``) with ``save_distributed`` hold chunks, each with its place in ``DCP_SHARDING_INFO``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from operator import add
from typing import NamedTuple

from fsdpckpt.errors import SourceCorruptError, damaged
from fsdpckpt.formats.safetensors import Header, HeaderTensor, looks_like_safetensors, read_header
from fsdpckpt.ir.checkpoint import Container, Evidence, EvidenceKind, Layout, Note
from fsdpckpt.ir.tensors import Chunks
from fsdpckpt.readers.protocol import (
    ChunkedTensor,
    Claim,
    FileTable,
    Part,
    PartContents,
    ReadOptions,
    build_tensors,
    file_name,
    stem_of,
)
from fsdpckpt.readers.safetensors.document import restore
from fsdpckpt.readers.shard_index import NumberedName, numbered, open_index, require_all_numbers
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, truncate

_INDEX = ".safetensors.index.json"
_SHARDING_KEY = "DCP_SHARDING_INFO"
_RANK_SHARD = re.compile(r"shard-(\d{1,6})-")


class SafetensorsReader:
    """Files with a safetensors header, and index files that list them."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        if file_name(file.path).endswith(_INDEX):
            return _index_part(file.path)
        head = sources.open(file.path).read(0, min(16, file.nbytes))
        return _files_part([file.path], file.path) if looks_like_safetensors(head, file.nbytes) else None

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """Claim every index with its shards, then the other files: shards of one stem are one part."""
        del options
        indexed = {name.removesuffix(_INDEX) for name in files if name.endswith(_INDEX)}
        claim = Claim([_index_part(files[stem + _INDEX].path) for stem in sorted(indexed)])
        groups: dict[str, list[str]] = {}
        for name in files:
            if not name.endswith((".safetensors", _INDEX)):
                continue
            claim.names.add(name)
            shard = _numbered(name)
            stem = shard.stem if shard else stem_of(name)
            if not name.endswith(_INDEX) and (shard is None or stem not in indexed or name.startswith("shard-")):
                groups.setdefault(stem, []).append(name)
        sources.prefetch_ends([files[name].path for names in groups.values() for name in names], tails=False)
        for stem, names in sorted(groups.items()):
            glob = "" if len(names) == 1 else f"{stem}-*.safetensors"
            label = f"{path.rstrip('/')}/{glob}" if glob else files[names[0]].path
            claim.parts.append(_files_part([files[name].path for name in names], label, glob))
        return claim


def _numbered(name: str) -> NumberedName | None:
    """The words of a shard's name."""
    return numbered(_without_rank(name))


def _without_rank(name: str) -> str:
    """``name`` without the rank that DCP's writer puts before the words of a shard."""
    return re.sub(r"^shard-\d+-", "", name)


def _index_part(path: str) -> Part:
    stem = file_name(path).removesuffix(_INDEX)
    return Part(path, stem, lambda files, sources: read_safetensors_index(path, files, sources))


def _files_part(paths: list[str], label: str, glob: str = "") -> Part:
    stem = stem_of(file_name(label))
    return Part(label, stem, lambda files, sources: read_safetensors(paths, files, sources), glob)


def read_safetensors(paths: Sequence[str], files: FileTable, sources: Sources) -> PartContents:
    """Read the tensors of all ``paths`` as one state dict.

    Raises SourceIncompleteError that lists missing files, if the numbers in the file names show that there are any;
    SourceCorruptError if a file contradicts itself or another one.
    """
    ordered = sorted(paths, key=file_name)
    _require_all_parts(ordered)
    headers = [(path, read_header(sources.open(path))) for path in ordered]
    return _tree(headers, files)


def read_safetensors_index(path: str, files: FileTable, sources: Sources) -> PartContents:
    """Read the shards that the index at ``path`` (``*.safetensors.index.json``) lists, and compare them with it.

    Raises SourceIncompleteError that lists every missing shard or every missing tensor.
    """
    index = open_index(path, sources)
    headers = [(index.directory + shard, read_header(sources.open(index.directory + shard))) for shard in index.shards]
    tree = _tree(headers, files)
    tree.notes += [*index.notes, *index.compare({file_name(file): header.tensors for file, header in headers})]
    tree.evidence.insert(0, index.evidence)
    return tree


def _require_all_parts(paths: Sequence[str]) -> None:
    """Raises unless the numbers in ``-0000i-of-0000N`` and ``shard-0000r-`` are complete.

    The names of DCP's HF shards do not show the highest rank; a gap below it they do.
    """
    matches = [_RANK_SHARD.match(file_name(path)) for path in paths]
    ranks = {int(match[1]) for match in matches if match is not None}
    below = (f"shard-{rank:05d}-*.safetensors" for rank in range(1, max(ranks, default=0)) if rank not in ranks)
    directory = paths[0][: -len(file_name(paths[0]))]
    names = [directory + _without_rank(file_name(path)) for path in paths]
    require_all_numbers(names, more=below)


def sharding_info(header: Header, *, file: str) -> dict[str, tuple[int, ...]] | None:
    """Where each tensor of a file that DCP wrote begins in its global tensor; None for other files.

    Raises SourceCorruptError if the information is malformed or names other tensors.
    """
    text = header.metadata.get(_SHARDING_KEY)
    if text is None:
        return None
    offsets: dict[str, tuple[int, ...]] = {}
    try:
        document = json.loads(text)
        for key, tensor in header.tensors.items():
            saved = document[key]["saved_offsets"]
            if len(saved) != len(tensor.shape) or not all(type(item) is int and item >= 0 for item in saved):
                raise ValueError(f"{saved} for {key}")
            offsets[key] = tuple(saved)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what, found = f"{_SHARDING_KEY} does not fit the tensors of the file", f"{type(error).__name__}: {error}"[:200]
        raise damaged(file, what, found=found, why="the file was edited, or a newer torch wrote it") from None
    return offsets


def _tree(headers: Sequence[tuple[str, Header]], files: FileTable) -> PartContents:
    chunked: dict[str, list[_RankChunk]] = {}
    documents: list[tuple[str, str]] = []
    ranks, placed = 1, False
    for path, header in headers:
        number = files.add(path, header.end)
        offsets = sharding_info(header, file=path)
        shard = _RANK_SHARD.match(file_name(path))
        rank = int(shard[1]) - 1 if shard is not None else 0
        ranks, placed = max(ranks, rank + 1), placed or offsets is not None
        if "fsdpckpt" in header.metadata:
            documents.append((path, header.metadata["fsdpckpt"]))
        for key, tensor in header.tensors.items():
            start = offsets[key] if offsets is not None else (0,) * len(tensor.shape)
            chunks = chunked.setdefault(key, [])
            chunks.append(_RankChunk(path, rank, number, start, tensor))
            if len(chunks) > 1:
                _require_fitting(key, chunks[0], chunks[-1], sharded=offsets is not None)
    tensors = build_tensors([_with_global_shape(key, chunks) for key, chunks in chunked.items()], world_size=ranks)
    sharded = ranks > 1 or any(len(tensor.chunks) > 1 for tensor in tensors.values())
    tree = PartContents({}, Layout.SHARDED if sharded else Layout.FULL, Container.SAFETENSORS, ranks)
    tree.root = restore(tensors, documents, tree)
    reasons = [f"{plural(len(headers), 'safetensors file')} with {plural(len(tensors), 'tensor')}"]
    if ranks > 1:
        reasons.append(f"file names and {_SHARDING_KEY} say that {plural(ranks, 'rank')} wrote chunks")
    if placed:
        message = (
            "DCP's safetensors shards record neither the shapes of whole tensors nor how many ranks saved them: those "
            f"of {plural(ranks, 'rank')} are here, and count as all. Check that no later shard is missing"
        )
        tree.notes.append(Note("inferred", message))
    tree.evidence += [Evidence(EvidenceKind.CONTAINER, message) for message in reasons]
    return tree


class _RankChunk(NamedTuple):
    """A tensor of the file ``path``, which begins at ``start`` of its global tensor."""

    path: str
    rank: int
    file: int
    start: tuple[int, ...]
    tensor: HeaderTensor


def _require_fitting(key: str, first: _RankChunk, other: _RankChunk, *, sharded: bool) -> None:
    """Raises SourceCorruptError unless both can be chunks of one tensor. ``sharded``: whether files have chunks."""
    (dtype, shape, *_), (other_dtype, other_shape, *_) = first.tensor, other.tensor
    if not sharded or dtype is not other_dtype or len(shape) != len(other_shape):
        raise SourceCorruptError(
            f"{key} is in two files that do not fit together",
            details=[first.path, other.path],
            file=other.path,
            key=key,
            expected=f"one file, or chunks of one {dtype.name} tensor with {len(shape)} dimensions",
            found=f"a {other_dtype.name} tensor with {len(other_shape)} dimensions",
            why="files of different saves are in one directory",
            next_step="give only the files of one save",
        )


def _with_global_shape(key: str, chunks: list[_RankChunk]) -> ChunkedTensor:
    """The tensor with its global shape: up to the end of the farthest chunk (``hf_storage.py`` reads it the same way).

    Raises SourceCorruptError if no tensor can be that large.
    """
    path, rank, file, start, (dtype, shape, offset, *_) = chunks[0]
    if len(chunks) == 1 and not any(start):
        return ChunkedTensor(key, dtype, shape, Chunks.whole(file=file, offset=offset, shape=shape, rank=rank))
    ndim = len(shape)
    ends = [tuple(map(add, chunk.start, chunk.tensor.shape)) for chunk in chunks]
    shape = tuple(map(max, zip(*ends, strict=True)))
    if prod(filter(None, shape)) * dtype.itemsize >= 1 << 63:
        what = f"{_SHARDING_KEY} places {key} where no tensor reaches"
        raise damaged(path, what, found=truncate(shape), key=key, why="the file was edited or damaged")
    rows = Chunks.rows(
        ndim=ndim,
        rank=[chunk.rank for chunk in chunks],
        file=[chunk.file for chunk in chunks],
        offset=[chunk.tensor.offset for chunk in chunks],
        start=[chunk.start for chunk in chunks],
        size=[chunk.tensor.shape for chunk in chunks],
    )
    return ChunkedTensor(key, dtype, shape, rows)
