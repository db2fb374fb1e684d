"""Flattens a checkpoint into the entries of a DCP directory, under the keys that ``dcp.save`` gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.blockwise import Blockwise, put_together
from fsdpckpt.ir.checkpoint import BARE_VALUE, Checkpoint, Note, OptimState, group_params
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.producers.forms import PLAIN_NESTING, Nesting
from fsdpckpt.writers.state_dicts import extras_of_one, optim_dict

Path: TypeAlias = tuple[str | int, ...]


class Leaf(NamedTuple):
    """One entry of the flat state dict: its key, the path it was nested under, and what it is."""

    key: str
    path: Path
    value: Value | Blockwise

    @property
    def tensor(self) -> Tensor | None:
        return self.value if isinstance(self.value, Tensor) else None

    @property
    def looks(self) -> tuple[DType, tuple[int, ...]] | None:
        """The dtype and shape of a tensor; None of any other value."""
        match self.value:
            case Tensor():
                return self.value.dtype, self.value.shape
            case Blockwise():
                return self.value.blocks.dtype, self.value.blocks.shape
            case _:
                return None


@dataclass(frozen=True, slots=True)
class _Walk:
    """Collects the leaves of one section. ``ids``: the dict whose keys may be parameter ids, which readers restore."""

    leaves: list[Leaf]
    notes: list[Note]
    ids: Path = ()

    def enter(self, path: Path, prefix: str, value: Value) -> None:
        if isinstance(value, dict):
            self.mapping(path, prefix, value)
        elif isinstance(value, list) and not _plain(value):
            for index, item in enumerate(value):
                self.enter((*path, index), f"{prefix}.{index}", item)
        else:
            self.leaves.append(Leaf(prefix, path, value))

    def mapping(self, path: Path, prefix: str, value: dict[Key, Value]) -> None:
        if not value and path != self.ids:
            self.notes.append(
                Note("dropped", f"{prefix} is an empty dict: a DCP directory has no place for it", prefix)
            )
        for key, item in put_together(value):
            part = key if type(key) is str else self.renamed(prefix, key)
            inner = f"{prefix}.{part}" if prefix else part
            if type(item) is Tensor or isinstance(item, Blockwise):
                self.leaves.append(Leaf(inner, (*path, part), item))
            else:
                self.enter((*path, part), inner, item)

    def renamed(self, prefix: str, key: Key) -> str:
        if not (self.ids and prefix == _dotted(self.ids)):
            where = prefix or "the extras"
            self.notes.append(Note("renamed", f"key {key!r} of {where} becomes the text {str(key)!r}", str(key)))
        return str(key)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _plain(values: list[Value]) -> bool:
    """Whether DCP keeps a list as one value: no tensor, mapping or entered list in it."""
    return not any(isinstance(item, (Tensor, dict)) or (isinstance(item, list) and not _plain(item)) for item in values)


def flatten(checkpoint: Checkpoint, nesting: Nesting = PLAIN_NESTING) -> tuple[list[Leaf], list[Note]]:
    """All leaves in ``dcp.save``'s order under DCP's flat keys, with notes on what the flat form cannot hold.

    As ``torch.distributed.checkpoint._nested_dict`` and ``_traverse`` do: mappings are always entered, their keys as
    text; lists only when they hold tensors or non-empty containers that do; tuples never. An empty mapping leaves no
    trace, which is why it is noted.

    Raises SourceUnsupportedError when several entries get the same flat key.
    """
    leaves: list[Leaf] = []
    notes: list[Note] = []
    walk = _Walk(leaves, notes)
    if checkpoint.model is not None:
        model: dict[Key, Value] = dict(checkpoint.model.params.items())
        walk.mapping(nesting.model, _dotted(nesting.model), model)
        if checkpoint.model.metadata is not None:
            what = "the model state dict's _metadata (module versions)"
            notes.append(Note("dropped", f"{what} has no place in a DCP directory"))
    if checkpoint.optim is not None:
        if nesting.flattened:
            leaves.extend(_flat_optimizer(checkpoint.optim, nesting.optim, notes))
        else:
            root, state = optim_dict(checkpoint.optim), (*nesting.optim, "state")
            _Walk(leaves, notes, ids=state).enter(state, _dotted(state), root.pop("state"))
            if root:
                walk.mapping(nesting.optim, _dotted(nesting.optim), root)
    extra, dropped = extras_of_one(checkpoint)
    if extra:
        walk.mapping((), "", extra)
    _refuse_duplicates(leaves)
    return leaves, notes + dropped


def _flat_optimizer(optim: OptimState, at: Path, notes: list[Note]) -> Iterator[Leaf]:
    """What ``StateDictOptions(flatten_optimizer_state_dict=True)`` makes of an optimizer keyed by name.

    Raises SourceUnsupportedError for ids, which have no place in that form.
    """
    if optim.key_type == "id":
        raise SourceUnsupportedError(
            "flattened optimizer keys begin with parameter names, and this optimizer is keyed by id",
            next_step="--key-type name",
        )
    entries: list[tuple[str, Value | Blockwise]] = []
    for param, states in optim.state.items():
        for name, value in put_together(states):
            entries.append((f"state.{param}.{name}" if name != BARE_VALUE else f"state.{param}", value))
    for group in optim.param_groups or []:
        for param in group_params(group) or ():
            for setting, value in group.items():
                if setting != "params":
                    entries.append((f"param_groups.{param}.{setting!s}", value))
    for key, value in entries:
        yield Leaf(_dotted((*at, key)), (*at, key), value)
    if len(optim.param_groups or []) > 1:
        notes.append(
            Note("groups-flattened", "each parameter has its own settings: the order of the groups is not kept")
        )
    for extra in optim.extra:
        notes.append(Note("dropped", f"{extra!s} of the optimizer has no place among flattened keys", str(extra)))


def _refuse_duplicates(leaves: list[Leaf]) -> None:
    if len({leaf.key for leaf in leaves}) == len(leaves):
        return
    seen: set[str] = set()
    double = [leaf.key for leaf in leaves if leaf.key in seen or seen.add(leaf.key)]  # type: ignore[func-returns-value]
    raise SourceUnsupportedError(
        "several entries would get the same key in a DCP directory",
        details=double,
        why="DCP joins nested keys with dots, and two of them become equal",
        next_step="leave one of them out with --exclude, or rename it with --rename OLD=NEW",
        key=double[0],
    )
