"""Read one torch.save file: any nesting of model, optimizer and extras, every tensor where it lies in the file."""

from __future__ import annotations

from fsdpckpt.containers.torch_values import local_tensor, read_archive
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.readers.flat_slices import flat_parameter_keys
from fsdpckpt.readers.recorded import record_beside, shards_without_record
from fsdpckpt.readers.tree import FileTable, Tree
from fsdpckpt.storage.sources import Sources

__all__ = ["read_torch_file"]


def read_torch_file(path: str, files: FileTable, sources: Sources) -> Tree:
    """The state dict in the torch file at ``path``.

    A file of DTensor or ShardedTensor values is one rank of several: it is read as such, and refused with
    SourceIncompleteError naming the missing ranks unless it is the only one. Raises what ``read_archive`` raises.
    """
    source = sources.open(path)
    file_id = files.add(path, source.nbytes)
    archive = read_archive(source, file_id, leaf=lambda stored: local_tensor(stored, file_id))
    record = record_beside(archive.root)
    if archive.forms or record is not None:
        from fsdpckpt.readers.torch_ranks import read_torch_ranks

        rank = min(archive.ranks, default=0) if record is None or record.rank is None else record.rank
        return read_torch_ranks({rank: path}, files, sources)
    tree = Tree(archive.root, Layout.FULL, Container.TORCH, 1, checksums=archive.checksums, notes=archive.notes)
    tree.evidence.append(f"{path} is one torch.save file of plain tensors")
    keys = flat_parameter_keys(archive.root)
    if keys:
        tree.layout = Layout.FLATTENED
        tree.evidence.append(f"keys of flat parameters: {', '.join(keys[:3])}")
    tree.problems.extend(shards_without_record(archive.root, path))
    return tree
