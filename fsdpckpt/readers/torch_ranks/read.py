"""Reads a set of torch.save files, one for each rank: joins DTensor, ShardedTensor and plain values.

The world size and every rank's place come from the files' own metadata; file names only show which file to expect from
which rank. A file that another rank saved, according to its metadata, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError
from fsdpckpt.formats.torch import TorchArchive, notes_on_dropped
from fsdpckpt.formats.torch.bulk import read_tensors
from fsdpckpt.ir.checkpoint import Checksums, Container, Evidence, EvidenceKind, Layout, Note, Problem, Section
from fsdpckpt.ir.files import SourceFile
from fsdpckpt.ir.optimizer import ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Groups, Units
from fsdpckpt.ir.values import Key, Value, find_value, replaced, walk
from fsdpckpt.readers.flat_slices import crcs_of_chunks, flat_parameter_keys
from fsdpckpt.readers.optimizer_forms import containers, is_optimizer
from fsdpckpt.readers.protocol import FileTable, KeyPath, PartContents
from fsdpckpt.readers.sections import regroup, regrouped, split
from fsdpckpt.readers.torch_ranks.discontinued import refuse_discontinued
from fsdpckpt.readers.torch_ranks.merge import RankMerge
from fsdpckpt.readers.torch_ranks.rank_files import grouped, open_ranks
from fsdpckpt.readers.torch_ranks.rank_names import check_names
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import is_or_are, listed, plural, some_of
from fsdpckpt.transform.meshes import with_fsdp_dimensions

_Optimizer: TypeAlias = dict[Key, Any]
_MAX_NAMES = 3
_COMPARED = 1 << 20  # bytes: extras up to here are read and compared (random states are 5 KB), larger ones by CRC-32


def read_torch_ranks(
    paths: Mapping[int, str], files: FileTable, sources: Sources, *, only_extras: bool = False
) -> PartContents:
    """Read the state dict that the files ``paths`` (rank to path) hold together.

    ``only_extras``: the files' name shows that they hold extras and named sections, and no main ones. Raises
    SourceIncompleteError that lists every missing rank, SourceCorruptError if a file was saved by another rank than its
    name shows or by another run, and what ``read_archive`` raises. Keys that ranks lack are ``problems`` of the tree.
    An optimizer's vectors of one length on all ranks are read as replicas: ``readers.join`` knows the model and
    decides whether they are slices.
    """
    ranks = sorted(paths)
    opened = open_ranks(paths, files, sources, alike=True)
    archives = [file.archive for file in opened]
    roots = {id(archive.root): (archive.root, paths[rank]) for rank, archive in zip(ranks, archives, strict=True)}
    for root, path in roots.values():
        refuse_discontinued(root, path)
    _check_ranks(paths, ranks, archives)
    without_rank = [rank for rank, archive in zip(ranks, archives, strict=True) if not archive.ranks]
    check_names({rank: paths[rank] for rank in without_rank}, sources)
    forms = sorted({form for archive in archives for form in archive.forms})
    tree = PartContents(None, Layout.SHARDED if forms else Layout.FULL, Container.TORCH, len(ranks))
    groups = grouped(opened, _one_order([archive.root for archive in archives], ranks, files.units, tree))
    merge = RankMerge(groups, sharded=bool(forms))
    merged = merge.value([group.root for group in groups])
    merged = with_fsdp_dimensions(merged, by_fsdp=merge.last_cut_by_fsdp != {False})
    tree.root = root = regroup(merged) if isinstance(merged, dict) else merged
    keys = flat_parameter_keys(tree.root)
    if keys:
        tree.evidence.append(Evidence(EvidenceKind.LAYOUT, f"keys of flat parameters: {some_of(keys, 3)}"))
        tree.layout = Layout.FLATTENED
    tree.problems.extend(merge.problems)
    nested = root if isinstance(root, dict) else {}
    tree.rank_values.update({regrouped(path, nested): values for path, values in merge.rank_values.items()})
    tree.absences.update({regrouped(path, nested): absent for path, absent in merge.absences.items()})
    tree.missing.update({regrouped(path, nested): problem for path, problem in merge.missing.items()})
    tree.checksums = Checksums.joined(archive.checksums for archive in archives)
    tree.differs = lambda vector: _vectors_differ(vector, files, sources)
    tree.notes.extend(notes_on_dropped(archives))
    tree.devices.update(*(archive.devices for archive in archives))
    separate_extras(tree, files, sources, only_extras=only_extras)
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, _container_text(paths, ranks, forms)))
    return tree


def _container_text(paths: Mapping[int, str], ranks: Sequence[int], forms: Sequence[str]) -> str:
    content = " and ".join(f"{form} values" for form in forms) or "plain tensors only"
    if len(ranks) == 1:
        return f"{paths[ranks[0]]} is one rank's torch.save file, of a world of one, holding {content}"
    return f"{len(ranks)} torch.save files, one per rank, holding {content} (first: {paths[ranks[0]]})"


def _check_ranks(paths: Mapping[int, str], ranks: Sequence[int], archives: Sequence[TorchArchive]) -> None:
    swapped = {
        paths[rank]: f"{paths[rank]}: expected rank {rank}, saved by rank {', '.join(map(str, sorted(archive.ranks)))}"
        for rank, archive in zip(ranks, archives, strict=True)
        if archive.ranks - {rank}
    }
    if swapped:
        raise SourceCorruptError(
            "swapped rank files: some files were not saved by the rank that their name says",
            details=list(swapped.values()),
            files=list(swapped),
            file=paths[ranks[0]],
            why="files were renamed, or copied from another rank or run",
            next_step="rename every file to that of the rank that saved it, as listed above",
        )
    worlds = {id(world): world for archive in archives for world in archive.worlds}
    world = {rank for ranks_of_mesh in worlds.values() for rank in ranks_of_mesh} or set(range(ranks[-1] + 1))
    missing = sorted(world - set(ranks))
    if missing:
        place = paths[ranks[0]] if len(paths) == 1 else os.path.dirname(paths[ranks[0]]) or "."
        raise SourceIncompleteError(
            f"{place}: {len(missing)} of {len(world)} ranks {is_or_are(len(missing))} missing: {listed(missing)}",
            file=place,
            rank=missing[0],
            expected=f"the files of {plural(len(world), 'rank')}",
            found=f"those of {listed(ranks)}",
            why="each rank writes its own part, and every part is needed; other nodes may hold the rest on their disks",
            next_step="copy the files of all ranks into one directory and give that directory",
        )
    extra = sorted(set(ranks) - world)
    if extra:
        raise SourceCorruptError(
            f"files of ranks {', '.join(map(str, extra))} do not belong to a world of {plural(len(world), 'rank')}",
            details=[paths[rank] for rank in extra],
            files=[paths[rank] for rank in extra],
            file=paths[extra[0]],
            rank=extra[0],
            expected=f"ranks {min(world)} to {max(world)}",
            found=f"rank {extra[0]}",
            why="files of an earlier run with more ranks were left in the directory",
            next_step="move these files away",
        )


def separate_extras(tree: PartContents, files: FileTable, sources: Sources, *, only_extras: bool = False) -> None:
    """Keep the plain tensors of the extras, such as random states, of each rank, unless their bytes are equal.

    Skips tensors of models and optimizers: there, a plain tensor is a replica, or a slice. ``only_extras``: as for
    ``read_torch_ranks``.
    """
    sections = split(tree.root, called_extra=only_extras)
    if not sections.extra:
        return
    records: dict[tuple[int, int], tuple[int, int]] = {}
    for path, leaf in walk(tree.root):
        if not isinstance(leaf, Tensor) or leaf.sharded or len(leaf.chunks) < 2 or not leaf.nbytes:
            continue
        if sections.owns(path):
            continue
        if leaf.nbytes > _COMPARED and not records:
            records = tree.checksums.by_offset()
        if not _equal_on_all_ranks(leaf, files.files(), sources, records):
            tree.rank_values[path] = _by_rank(leaf, tree.world_size)


def _equal_on_all_ranks(
    tensor: Tensor, files: Sequence[SourceFile], sources: Sources, records: Mapping[tuple[int, int], tuple[int, int]]
) -> bool:
    """Whether every rank saved the same bytes. False for a large tensor without a checksum, which is not read."""
    chunks = tensor.chunks
    if not (chunks.stride == chunks.stride[0]).all():
        return False
    if tensor.nbytes <= _COMPARED:
        return len({_bytes_of(tensor, row, files, sources) for row in range(len(chunks))}) == 1
    crcs = crcs_of_chunks(tensor, records)
    return len(crcs) == 1 and None not in crcs


def _bytes_of(tensor: Tensor, row: int, files: Sequence[SourceFile], sources: Sources) -> bytes:
    """The bytes between a chunk's first and last element: equal for equal replicas of equal strides."""
    sizes, strides = tensor.chunks.size[row].tolist(), tensor.chunks.stride[row].tolist()
    extent = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    source = sources.open_file(files[int(tensor.chunks.file[row])])
    return source.read(int(tensor.chunks.offset[row]), extent * tensor.dtype.itemsize)


def _vectors_differ(tensor: Tensor, files: FileTable, sources: Sources) -> bool:
    """Whether ``tensor``, a vector that each of its ranks has whole, has other bytes on some of them. Reads up to the
    first difference.
    """
    read, chunks, itemsize = files.files(), tensor.chunks, tensor.dtype.itemsize
    places = list(zip(chunks.file.tolist(), chunks.offset.tolist(), chunks.stride[:, 0].tolist(), strict=True))
    most = max(1, _COMPARED // (itemsize * max(1, *(step for _, _, step in places))))

    def block(file: int, offset: int, step: int, first: int) -> bytes:
        count = min(most, tensor.numel - first)
        begin, nbytes = offset + first * step * itemsize, (1 + (count - 1) * step) * itemsize
        data = np.frombuffer(sources.open_file(read[file]).read(begin, nbytes), f"V{itemsize}")
        return as_strided(data, (count,), (step * itemsize,)).tobytes()

    for first in range(0, tensor.numel, most):
        expected = block(*places[0], first)
        if any(block(*place, first) != expected for place in places[1:]):
            return True
    return False


def _by_rank(tensor: Tensor, world_size: int) -> tuple[Value, ...]:
    """Each rank's copy as a tensor of one chunk, None for ranks that have none."""
    rows = {rank: row for row, rank in enumerate(tensor.chunks.rank.tolist())}
    return tuple(
        Tensor(tensor.dtype, tensor.shape, tensor.chunks.take(tensor.chunks.rank == rank), tensor.sharded)
        if rank in rows
        else None
        for rank in range(world_size)
    )


def read_torch_file(path: str, files: FileTable, sources: Sources) -> PartContents:
    """Read the state dict in the torch file at ``path``.

    A file of DTensor or ShardedTensor values is one rank of several: it is read as such, and refused with
    SourceIncompleteError that lists the missing ranks, unless there is only one rank. Raises what ``read_archive``
    raises.
    """
    source = sources.open(path)
    file_id = files.add(path, source.nbytes)
    archive = read_tensors(source, file_id)
    refuse_discontinued(archive.root, path)
    if archive.forms:
        return read_torch_ranks({min(archive.ranks, default=0): path}, files, sources)
    tree = PartContents(archive.root, Layout.FULL, Container.TORCH, 1, checksums=archive.checksums)
    tree.notes.extend(notes_on_dropped([archive]))
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, f"{path} is one torch.save file of plain tensors"))
    keys = flat_parameter_keys(archive.root)
    if keys:
        tree.layout = Layout.FLATTENED
        tree.evidence.append(Evidence(EvidenceKind.LAYOUT, f"keys of flat parameters: {', '.join(keys[:3])}"))
    return tree


def _one_order(roots: Sequence[object], ranks: Sequence[int], units: Units | None, tree: PartContents) -> list[object]:
    """Give ``roots``, the state dicts of ``ranks``, the same optimizer keys if the ranks list different parameters or a
    different order. If nothing explains the difference they stay unchanged, and it is reported later.

    Each rank numbers ids in the order of its own optimizer. The units, or the ``param_names`` of its groups, show which
    parameter an id is on each rank; keys that are names show it themselves. As in ``_map_param_key_to_optim_keys`` of
    ``torch/distributed/fsdp/_optim_utils.py``, the keys of all ranks count.
    """
    changed_roots = list(roots)
    for path in [path for path, mapping in containers(roots[0]) if is_optimizer(mapping)]:
        optimizers = [optimizer for root in roots if (optimizer := _optimizer_at(root, path)) is not None]
        if len(optimizers) < len(roots):
            continue
        names = _names_in_units(optimizers, ranks, units) if units is not None and units.orders else None
        if names is not None and units is not None:
            tree.problems += _missing_parameters(names, ranks, units)
        names = names or _saved_names(optimizers)
        if names is None or all(groups == names[0] for groups in names[1:]) or len(set(map(len, names))) > 1:
            continue
        union = _union(names)
        tree.notes.append(_note(names, ranks, union))
        by_id = _by_id(optimizers[0])
        keys: Mapping[str, ParamKey] = {name: number if by_id else name for number, name in enumerate(chain(*union))}
        if by_id:
            orders: dict[int, list[list[ParamKey]]] = {}
            for rank, groups in zip(ranks, names, strict=True):
                if groups != union:
                    orders[rank] = [list(map(keys.__getitem__, group)) for group in groups]
            tree.orders[path] = orders
        texts: dict[str, str] = {}
        for optimizer, groups in zip(optimizers, names, strict=True):
            texts.update(_param_names(optimizer, groups))
        for index, (optimizer, groups) in enumerate(zip(optimizers, names, strict=True)):
            tree.problems += _unlisted(optimizer, ranks[index])
            changed = _rekeyed(optimizer, groups, union, keys, texts)
            changed_roots[index] = replaced(cast(Value, changed_roots[index]), path, changed)
    return changed_roots


def _optimizer_at(root: object, path: KeyPath) -> _Optimizer | None:
    value = find_value(cast(Value, root), path)
    return value if isinstance(value, dict) and isinstance(value.get("state"), dict) else None


def _groups(optim: _Optimizer) -> list[list[ParamKey]] | None:
    """The keys that each group lists; None without groups, or if a list does not hold keys."""
    groups = optim.get("param_groups")
    if not isinstance(groups, (list, tuple)):
        return None
    listed: list[list[ParamKey]] = []
    for group in groups:
        keys = group.get("params") if isinstance(group, dict) else None
        if not isinstance(keys, list) or not all(isinstance(key, (int, str)) for key in keys):
            return None
        listed.append(cast("list[ParamKey]", keys))
    return listed


def _by_id(optim: _Optimizer) -> bool:
    groups = _groups(optim)
    return all(type(key) is int for key in (chain(*groups) if groups is not None else optim["state"]))


def _names_in_units(optimizers: Sequence[_Optimizer], ranks: Sequence[int], units: Units) -> list[Groups] | None:
    """The groups of each rank from the units; None if they do not match these optimizers."""
    by_rank = [groups for rank in ranks if (groups := units.groups_of(rank)) is not None]
    return by_rank if len(by_rank) == len(optimizers) and all(map(_groups_fit, optimizers, by_rank)) else None


def _groups_fit(optim: _Optimizer, groups: Groups) -> bool:
    """Whether ``groups`` may be those of ``optim``, whose keys are ids."""
    listed = _groups(optim)
    if not _by_id(optim):
        return False
    if listed is None:
        return all(key < sum(map(len, groups)) for key in optim["state"])
    return [len(keys) for keys in listed] == [len(names) for names in groups]


def _saved_names(optimizers: Sequence[_Optimizer]) -> list[Groups] | None:
    """The names that each optimizer saved: keys that are names, or ``param_names``. None if one of them has neither."""
    by_rank: list[Groups] = []
    for optim in optimizers:
        groups = _groups(optim)
        if groups is None:
            return None
        texts = groups
        if _by_id(optim):
            saved = [group.get("param_names") for group in optim["param_groups"]]
            texts = [list(names) if isinstance(names, (list, tuple)) else [] for names in saved]
        named: Groups = tuple(tuple(map(str, names)) for names in texts)
        all_names = list(chain(*named))
        if list(map(len, named)) != list(map(len, groups)) or len(set(all_names)) < len(all_names):
            return None
        by_rank.append(named)
    return by_rank


def _union(names: Sequence[Groups]) -> Groups:
    """Each group with what any rank has in it, in the order of the first that has it."""
    return tuple(tuple(dict.fromkeys(chain(*of_group))) for of_group in zip(*names, strict=True))


def _note(names: Sequence[Groups], ranks: Sequence[int], union: Groups) -> Note:
    total = sum(map(len, union))
    incomplete = [rank for rank, groups in zip(ranks, names, strict=True) if sum(map(len, groups)) < total]
    text = "the ranks' optimizers list their parameters in different orders; every id was read as that rank counts it"
    if incomplete:
        text = f"the optimizers of ranks {some_of(incomplete, 8)} do not have all parameters that those of others have"
    return Note("orders", text)


def _missing_parameters(names: Sequence[Groups], ranks: Sequence[int], units: Units) -> Iterator[Problem]:
    """A fatal problem for each rank whose optimizer lacks what FSDP shards, and others have: its part is in no file."""
    in_units = {unit.key for unit in units.units} | set(units.unit_of())
    union = dict.fromkeys(name for groups in names for name in chain(*groups) if name in in_units)
    for rank, groups in zip(ranks, names, strict=True):
        names_here = set(chain(*groups))
        missing = [name for name in union if name not in names_here]
        if missing:
            message = (
                f"the optimizer of rank {rank} has no {some_of(missing, _MAX_NAMES)}, which the optimizers of other "
                "ranks have. In PyTorch's words: FSDP currently requires each rank to have at least the optimizer "
                "states needed by rank 0's optimizer but some ranks are missing some of those states"
            )
            yield Problem("missing-key", message, key=missing[0], rank=rank, section=Section.OPTIM)


def _unlisted(optim: _Optimizer, rank: int) -> Iterator[Problem]:
    """A fatal problem for each id with a state that no group lists: nothing shows which parameter it is."""
    listed = set(chain(*(_groups(optim) or (optim["state"],))))
    for key in optim["state"]:
        if type(key) is int and key not in listed:
            message = (
                f"the optimizer of rank {rank} has a state of id {key}, which no param group lists, and the ranks' "
                "optimizers list their parameters in different orders, so its parameter is unknown"
            )
            yield Problem("parameter-order", message, key=f"state.{key}", rank=rank, section=Section.OPTIM)


def _param_names(optim: _Optimizer, names: Groups) -> list[tuple[str, str]]:
    """(name, its text in ``param_names``)."""
    pairs: list[tuple[str, str]] = []
    for group, group_names in zip(optim.get("param_groups") or (), names, strict=False):
        saved = group.get("param_names")
        if isinstance(saved, (list, tuple)) and len(saved) == len(group_names):
            pairs += zip(group_names, map(str, saved), strict=True)
    return pairs


def _rekeyed(
    optim: _Optimizer, members: Groups, union: Groups, keys: Mapping[str, ParamKey], texts: Mapping[str, str]
) -> _Optimizer:
    """``optim``, which has ``members``, with the ``keys`` of all names, and groups that list ``union``."""
    groups = _groups(optim)
    listed = range(sum(map(len, members))) if groups is None else chain(*groups)
    new = {key: keys[name] for key, name in zip(listed, chain(*members), strict=True)}
    changed = {**optim, "state": {new.get(key, key): states for key, states in optim["state"].items()}}
    if groups is not None:
        regrouped: list[dict[Key, object]] = []
        for group, names in zip(optim["param_groups"], union, strict=True):
            listing: dict[Key, object] = {**group, "params": [keys[name] for name in names]}
            if "param_names" in group:
                listing["param_names"] = [texts.get(name, name) for name in names]
            regrouped.append(listing)
        changed["param_groups"] = regrouped
    return changed
