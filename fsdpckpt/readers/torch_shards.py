"""Reads weights that are divided among numbered torch.save files, with or without an index.

``save_pretrained(safe_serialization=False)``, DeepSpeed's ``zero_to_fp32.py`` and ColossalAI's plugins write
``pytorch_model-00001-of-00002.bin`` and ``pytorch_model.bin.index.json``. ColossalAI divides the optimizer in the same
way (``pytorch_optim.bin.index.json``): by parameter id, and with the param groups in a file of their own, which the
index names (``colossalai/checkpoint_io/general_checkpoint_io.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError, damaged
from fsdpckpt.formats.torch import TorchArchive, notes_on_dropped
from fsdpckpt.formats.torch.bulk import read_tensors
from fsdpckpt.ir.checkpoint import Checksums, Container, Evidence, EvidenceKind, Layout
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.protocol import Claim, FileTable, Part, PartContents, ReadOptions, file_name, stem_of
from fsdpckpt.readers.shard_index import NumberedName, ShardIndex, numbered, open_index, require_all_numbers
from fsdpckpt.readers.torch_ranks import looks_like_torch
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural

_SUFFIXES = (".bin", ".pt", ".pth")
_INDEXES = tuple(f"{suffix}.index.json" for suffix in _SUFFIXES)
_GROUPS = "param_groups"  # in the metadata of ColossalAI's index: the file that has them


class TorchShardsReader:
    """Numbered files that torch.save wrote, and index files that list such files."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        """Raises SourceIncompleteError for one of several shards."""
        if file.name.endswith(_INDEXES):
            return _index_part(file.path)
        name = _shard(file.name)
        if name is None or name.total < 2 or not looks_like_torch(file, sources):
            return None
        raise SourceIncompleteError(
            f"{file.path} is shard {name.number} of {name.total}",
            file=file.path,
            why="the parameters are divided among all of them",
            next_step=f"give the directory with all of them, or the index: {file.path.rpartition('/')[0] or '.'}",
        )

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """Claim every index with its shards, then other numbered shards: those of one name are one part."""
        del options
        indexes = [name for name in files if name.endswith(_INDEXES)]
        claim = Claim([_index_part(files[name].path) for name in indexes], set(indexes))
        for name in indexes:
            index = open_index(files[name].path, sources)
            claim.names.update({*index.shards, *_group_file(index)} & files.keys())
            claim.names.update(key for note in index.notes for key in note.keys)
        sets: dict[tuple[str, int, str], list[str]] = {}
        for name, file in files.items():
            shard = _shard(name)
            if shard is not None and name not in claim.names and looks_like_torch(file, sources):
                sets.setdefault((shard.stem, shard.total, shard.suffix), []).append(name)
        for (stem, total, suffix), names in sorted(sets.items()):
            if total > 1:
                claim.names.update(names)
                glob = f"{stem}-*-of-*{suffix}"
                read = partial(_read_numbered, [files[each].path for each in names])
                claim.parts.append(Part(f"{path.rstrip('/')}/{glob}", stem, read, glob))
        return claim


def _shard(name: str) -> NumberedName | None:
    found = numbered(name)
    return found if found is not None and found.suffix in _SUFFIXES else None


def _index_part(path: str) -> Part:
    def read(files: FileTable, sources: Sources) -> PartContents:
        return _read_index(open_index(path, sources), files, sources)

    return Part(path, stem_of(stem_of(stem_of(file_name(path)))), read)


def _group_file(index: ShardIndex) -> list[str]:
    """The file with the param groups, in ColossalAI's index of an optimizer."""
    name = index.metadata.get(_GROUPS)
    return [name] if isinstance(name, str) and "/" not in name and name not in ("", "..") else []


def _read_numbered(paths: Sequence[str], files: FileTable, sources: Sources) -> PartContents:
    """Read the shards at ``paths`` as one state dict. Raises SourceIncompleteError if the numbers are not complete,
    and what ``_joined`` raises.
    """
    ordered = sorted(paths, key=file_name)
    require_all_numbers(ordered)
    archives = [_archive(path, files, sources) for path in ordered]
    return _tree(_joined(archives), archives)


def _read_index(index: ShardIndex, files: FileTable, sources: Sources) -> PartContents:
    """Read the shards that ``index`` lists, and compare them with it."""
    archives = [_archive(index.directory + shard, files, sources) for shard in index.shards]
    by_shard = {file_name(archive.path): set(map(str, _root(archive))) for archive in archives}
    notes = index.compare(by_shard)
    root = _joined(archives)
    for name in _group_file(index):
        groups = _archive(index.directory + name, files, sources)
        archives.append(groups)
        content = groups.root
        root = {"state": root, _GROUPS: content.get(_GROUPS) if isinstance(content, dict) else content}
    tree = _tree(root, archives)
    tree.notes += [*index.notes, *notes]
    tree.evidence.insert(0, index.evidence)
    return tree


def _archive(path: str, files: FileTable, sources: Sources) -> TorchArchive:
    source = sources.open(path)
    archive = read_tensors(source, files.add(path, source.nbytes))
    if archive.forms:
        raise SourceUnsupportedError(
            f"{path} is a shard with {' and '.join(sorted(archive.forms))} values",
            file=path,
            why="each rank saved a part of each tensor, and the numbers in the names need not be ranks",
            next_step="rename the files to model_world_size_<N>_rank_<r>.pt, if the numbers are those of the ranks",
        )
    return archive


def _root(archive: TorchArchive) -> dict[Key, Value]:
    if not isinstance(archive.root, dict):
        kind = type(archive.root).__name__
        raise damaged(archive.path, "a shard that is not a dict", "a dict of tensors", kind, why="another file")
    return archive.root


def _joined(archives: Sequence[TorchArchive]) -> dict[Key, Value]:
    """The entries of all shards in one dict. Raises SourceCorruptError for an entry that two shards have."""
    root: dict[Key, Value] = {}
    holder: dict[Key, str] = {}
    for archive in archives:
        for key, value in _root(archive).items():
            if key in holder:
                raise SourceCorruptError(
                    f"{key!s} is in two shards",
                    details=[holder[key], archive.path],
                    file=archive.path,
                    key=str(key),
                    expected="each entry in one shard",
                    why="shards of different saves are in one directory, or each holds a part of every tensor",
                    next_step="give only the shards of one save; parts of tensors have to be merged with the script of "
                    "the trainer that wrote them",
                )
            root[key], holder[key] = value, archive.path
    return root


def _has_weights(archive: TorchArchive) -> bool:
    """Whether tensors are at the top, as in a model's state dict; an optimizer has none there."""
    root = archive.root
    return isinstance(root, dict) and any(isinstance(leaf, Tensor) for leaf in root.values())


def _tree(root: dict[Key, Value], archives: Sequence[TorchArchive]) -> PartContents:
    tree = PartContents(root, Layout.FULL, Container.TORCH, 1)
    tree.checksums = Checksums.joined(archive.checksums for archive in archives)
    tree.notes.extend(notes_on_dropped(archives))
    message = f"{plural(len(archives), 'torch.save file')}, each with some of the entries"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
    if sum(map(_has_weights, archives)) > 1:
        tree.keys_in_order = False  # Hugging Face gives a large tensor a shard of its own, before all others
    return tree
