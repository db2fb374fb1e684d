"""What each source states of the order of an optimizer's parameters: one function for each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import numpy as np

from fsdpckpt import flags
from fsdpckpt.globs import matches_any
from fsdpckpt.ir.buffers import NO_BUFFERS
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, ChunkChecksums, Container
from fsdpckpt.ir.listing import divided
from fsdpckpt.ir.names import clean, keeps_order, revisits_a_module, without_module
from fsdpckpt.ir.optimizer import Optimizer, ParamGroup
from fsdpckpt.ir.parameters import Named, Parameter, RowNumber
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.transform.listings import listed_names, units_names, whole_tensors
from fsdpckpt.transform.parameter_order import Doubt, ParameterOrder

BY_USER = f"{flags.parameters}"
"""The source of the order that the user gives."""


def from_units(units: Units, source: str) -> ParameterOrder:
    """The order in a units file, which also has shapes, groups and shared names."""
    listing = units_names(units, source)
    row_of = {name: row for row, name in enumerate(listing.names)}
    groups = units.named_groups()
    frozen = [row for row, param in enumerate(listing.params) if not param.requires_grad]
    return ParameterOrder(
        listing.rows,
        source,
        shared=listing.shared,
        authoritative=True,
        members=None if groups is None else tuple(tuple(map(row_of.__getitem__, names)) for names in groups),
        complete=True,
        doubts=dict.fromkeys(frozen, Doubt.OPTIMIZER),
        unit_order=tuple(map(row_of.__getitem__, units.listed_by_unit())),
    )


def from_groups(optim: Optimizer, source: str, names_to_match: Collection[str] = ()) -> ParameterOrder | None:
    """The groups of an optimizer that is keyed by name, each in its order. ``names_to_match``: as for
    ``from_param_names``. None for other optimizers.
    """
    if optim.key_type != "name" or optim.groups is None:
        return None
    groups = listed_names(optim)
    names = without_module(chain(*groups), names_to_match)
    if not names or len(set(names)) != len(names) or any(map(is_flat_key, names)):
        return None
    return ParameterOrder.of_groups(divided(map(Named, names), map(len, groups)), source)


def from_param_names(optim: Optimizer, names_to_match: Collection[str] = ()) -> ParameterOrder | None:
    """The ``param_names`` of an optimizer built from ``named_parameters()``; None unless every key has one.

    Names of flat parameters do not count: each stands for many parameters. If the keys are names too, both must be the
    same set, because keys may have been renamed; their order may differ, because ``rekey_optim_state_dict`` sorts the
    keys and leaves ``param_names`` in the optimizer's order. A ``module.`` prefix on all names is removed unless
    ``names_to_match`` have it.
    """
    groups = [listed_param_names(group) for group in optim.groups or ()]
    names = without_module([name for group in groups for name in group or ()], names_to_match)
    if not names or None in groups or len(set(names)) != len(names):
        return None
    keys = optim.grouped_keys()
    if any(isinstance(key, str) for key in keys) and {clean(str(key)) for key in keys} != set(names):
        return None
    sizes = [len(group or ()) for group in groups]
    return ParameterOrder.of_groups(divided(map(Named, names), sizes), "param_names in the groups")


def listed_param_names(group: ParamGroup) -> list[str] | None:
    """The clean ``param_names`` of one group; None unless there is one for each key, and none is a flat parameter's."""
    names = [clean(word) for word in group.words() if isinstance(word, str)]
    return None if len(names) != len(group.members or ()) or any(map(is_flat_key, names)) else names


def from_list(names: Sequence[str], names_to_match: Collection[str] = ()) -> ParameterOrder:
    """The order listed by the user. ``names_to_match``: as for ``from_param_names``."""
    cleaned = without_module(dict.fromkeys(clean(name) for name in names), names_to_match)
    return ParameterOrder(tuple(map(Named, cleaned)), BY_USER, authoritative=True)


def from_model(
    checkpoint: Checkpoint,
    source: str,
    buffers: Sequence[str] = (),
    names_to_match: Collection[str] | None = None,
    keyed: Collection[str] = (),
    *,
    scalars: bool = False,
) -> ParameterOrder | None:
    """The order of a checkpoint's model section: a ``state_dict`` lists parameters in order, with buffers among them.

    ``buffers``: globs of keys that are not parameters. ``names_to_match``: as for ``from_param_names``; None keeps the
    prefix. ``keyed``: the names that have optimizer states or are in groups; they are parameters even if they are
    0-dim. ``scalars``: any 0-dim tensor may be a parameter. A key with the same bytes in the file as an earlier one is
    the same parameter under another name. One with the same shape and checksums may be, or both were filled alike when
    they were made: that is a doubt, and proves nothing. None without a model section of whole tensors.
    """
    if checkpoint.model is None:
        return None
    no_buffers = tuple(buffers) == NO_BUFFERS
    cleaned = [clean(name) for name in checkpoint.model.params]
    renamed = cleaned if names_to_match is None else without_module(cleaned, names_to_match)
    name_of = dict(zip(checkpoint.model.params, renamed, strict=True))
    tensors: dict[str, Tensor] = {}
    for key, leaf in whole_tensors(checkpoint.model):
        name = name_of[key]
        if (leaf.ndim or scalars or name in keyed) and _may_be_parameter(name, leaf, buffers):
            tensors[name] = leaf
    if not tensors:
        return None
    shared, alike = _repeats(tensors, checkpoint.checksums)
    uncertain = set(alike)
    names = [name for name in tensors if name not in shared]
    open_names: list[str] = []  # of tensors that nothing shows to be parameters
    if not buffers:
        open_names = [name for name in names if tensors[name].sharded is not True and name not in keyed]
    # Beside distributed tensors a plain one is a buffer. A DCP directory has small parameters in one piece, too.
    plain: set[str] = set()
    if checkpoint.container == Container.TORCH:
        plain.update(name for name in open_names if tensors[name].sharded is False)
    doubtful = {*uncertain, *open_names} - plain
    if not no_buffers and any(tensor.sharded for tensor in tensors.values()):
        unsharded = {name for name in names if tensors[name].sharded is not True}
        uncertain |= unsharded
        alike -= unsharded
    excludes_buffers = bool(buffers) or any(tensor.sharded is not None for tensor in tensors.values())
    doubts: dict[RowNumber, Doubt] = {}
    for row, name in enumerate(names):
        doubt = Doubt.OPTIMIZER if name in uncertain else Doubt(0)
        if name in plain:
            doubt |= Doubt.PLAIN
        elif name in doubtful:
            doubt |= Doubt.MODEL
        doubt |= Doubt.ALIKE if name in alike else Doubt(0)
        if doubt:
            doubts[row] = doubt
    held = ((name, tensors[name]) for name in names)
    rows = tuple(Parameter(name, leaf.shape, leaf.dtype, sharded=leaf.sharded) for name, leaf in held)
    possible = [row.name for row in rows if row.possible]
    ordered = keeps_order(checkpoint, names) and not revisits_a_module(possible)
    return ParameterOrder(rows, source, ordered, excludes_buffers=excludes_buffers, doubts=doubts)


def _may_be_parameter(name: str, tensor: Tensor, buffers: Sequence[str]) -> bool:
    """Whether FSDP accepts ``tensor`` as a parameter (floating or complex), and no glob of ``buffers`` matches it."""
    if tuple(buffers) != NO_BUFFERS and matches_any(name, buffers):
        return False
    return tensor.dtype.kind in ("float", "complex") or tensor.sharded is True


def _repeats(tensors: Mapping[str, Tensor], checksums: Checksums) -> tuple[set[str], set[str]]:
    """The keys that have the bytes of an earlier key, and those that only have the checksums of one."""
    chunk_checksums = ChunkChecksums(checksums)
    same_bytes: set[str] = set()
    same_checksums: set[str] = set()
    locations: set[object] = set()
    contents: set[object] = set()
    for name, tensor in tensors.items():
        location = tensor.location()
        if location in locations:
            same_bytes.add(name)
        elif location is not None:
            locations.add(location)
            content = _content(tensor, chunk_checksums)
            if content in contents:
                same_checksums.add(name)
            elif content is not None:
                contents.add(content)
    return same_bytes, same_checksums


def _content(tensor: Tensor, checksums: ChunkChecksums) -> tuple[object, ...] | None:
    """The shape, dtype, chunks and checksums of a tensor; None if some checksum is not known."""
    chunks = tensor.chunks
    crcs = np.where(chunks.size.all(axis=1), checksums.of(tensor), 1)
    if (crcs <= 0).any():  # a CRC of 0 may be one that was not computed
        return None
    columns = (chunks.start, chunks.size, chunks.stride, crcs)
    return tensor.shape, tensor.dtype.name, *(column.tobytes() for column in columns)
