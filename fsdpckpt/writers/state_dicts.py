"""Builds the state dicts that torch and DCP files hold: of the model, the optimizer, all sections, a rank's extras.

Also flattens a checkpoint into the entries of a DCP directory, under the keys that ``dcp.save`` gives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, NamedSection, Note, Section
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.frame import placed
from fsdpckpt.ir.optimizer import PARAMS, Optimizer, OwnValue
from fsdpckpt.ir.quantized import Blockwise, joined_states
from fsdpckpt.ir.sections import in_extras, optimizer_dict, state_dict_of
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.text_keys import LostDict, lost_in
from fsdpckpt.ir.values import Key, Value, equal
from fsdpckpt.producers import PLAIN_PATHS, PathKey, SectionPath
from fsdpckpt.text import plural, reused_ranks, some_of


def extras_of_rank(
    checkpoint: Checkpoint, rank: int, state_dict_of: Callable[[NamedSection], Value] = state_dict_of
) -> dict[Key, Value]:
    """The extras of target rank ``rank``: source rank ``rank``'s (modulo their number), what was added for all, and the
    named sections at their places, as ``state_dict_of`` makes them.
    """
    extra = checkpoint.extra
    if checkpoint.rank_extra:
        of_rank = checkpoint.rank_extra[rank % len(checkpoint.rank_extra)]
        extra = {**of_rank, **{key: value for key, value in extra.items() if key not in of_rank}}
    return in_extras(extra, checkpoint.named, checkpoint.origin.frame, state_dict_of)


def extras_of_one(checkpoint: Checkpoint) -> tuple[dict[Key, Value], list[Note]]:
    """The extras of a target without ranks: rank 0's with the named sections, and a note for each extra that differs on
    other ranks.
    """
    notes = []
    if len(checkpoint.rank_extra) > 1:
        ranks = len(checkpoint.rank_extra)
        first = checkpoint.rank_extra[0]
        for key in dict.fromkeys(key for extra in checkpoint.rank_extra for key in extra):
            if all(key in extra and equal(extra[key], first.get(key)) for extra in checkpoint.rank_extra):
                continue
            name = str(key)
            what = f"differs between the {ranks} ranks" if key in first else f"is not on rank 0 of {ranks}"
            notes.append(Note("dropped", f"{name} {what}: only what rank 0 has is kept", name))
    return extras_of_rank(checkpoint, 0), notes


def nested(sections: Sequence[tuple[tuple[PathKey, ...], Value]]) -> Value:
    """One dict of ``sections``, each under its path; dicts that share a path are merged."""
    root: Value = {}
    for path, section in sections:
        root = placed(root, path, section)
    return root


def extra_notes(checkpoint: Checkpoint, world_size: int) -> list[Note]:
    """A note on what happens to the ranks' extras if the number of ranks changes."""
    ranks = len(checkpoint.rank_extra)
    if ranks in (0, world_size):
        return []
    if ranks > world_size:
        dropped = f"rank {world_size}" if ranks == world_size + 1 else f"ranks {world_size} to {ranks - 1}"
        what = f"the extras of {dropped} are left out: the target has {plural(world_size, 'rank')}"
        return [Note("dropped", what)]
    new, old = reused_ranks(ranks, world_size)
    return [Note("inferred", f"{new} the extras (random states) of {old}: the source has no others")]


Path: TypeAlias = tuple[str | int, ...]


class Leaf(NamedTuple):
    """One entry of the flat state dict: its key, its nesting, and its value."""

    key: str
    path: Path
    value: Value | Blockwise

    @property
    def tensor(self) -> Tensor | None:
        return self.value if isinstance(self.value, Tensor) else None

    @property
    def form(self) -> tuple[DType | None, tuple[int, ...]]:
        """The dtype and shape of a tensor; None and () of any other value."""
        if isinstance(self.value, Blockwise):
            return self.value.blocks.dtype, self.value.blocks.shape
        return (self.value.dtype, self.value.shape) if isinstance(self.value, Tensor) else (None, ())


@dataclass(frozen=True, slots=True)
class _Walk:
    """Collects the leaves of one section, in ``texts`` the keys that become text, by the dict that has them, and in
    ``double`` those that then equal another one of their dict.

    ``ids``: the dict whose keys may be parameter ids, which readers restore.
    """

    leaves: list[Leaf]
    notes: list[Note]
    double: list[str]
    texts: dict[str, list[Key]]
    ids: Path = ()

    def enter(self, path: Path, prefix: str, value: Value) -> None:
        if isinstance(value, dict):
            self.mapping(path, prefix, value)
        elif isinstance(value, list) and not _stored_whole(value):
            for index, item in enumerate(value):
                self.enter((*path, index), f"{prefix}.{index}", item)
        else:
            self.leaves.append(Leaf(prefix, path, value))

    def mapping(self, path: Path, prefix: str, value: dict[Key, Value]) -> None:
        if not value and path != self.ids:
            message = f"{prefix} is an empty dict, which a DCP directory cannot store"
            self.notes.append(Note("dropped", message, prefix))
        for key, item in joined_states(value):
            part = key if type(key) is str else self.renamed(prefix, key, value)
            inner = f"{prefix}.{part}" if path else part
            if type(item) is Tensor or isinstance(item, Blockwise):
                self.leaves.append(Leaf(inner, (*path, part), item))
            else:
                self.enter((*path, part), inner, item)

    def renamed(self, prefix: str, key: Key, siblings: Collection[Key]) -> str:
        text = str(key)
        if text in siblings:
            self.double.append(f"{prefix}.{text}" if prefix else text)
        if not (self.ids and prefix == _dotted(self.ids)):
            self.texts.setdefault(prefix, []).append(key)
        return text


def _notes_on_texts(texts: Mapping[str, Sequence[Key]]) -> Iterator[Note]:
    """One note on all keys that become text in a DCP directory. ``texts``: them, by the dict that has them."""
    keys = [(prefix, key) for prefix, of_dict in texts.items() for key in of_dict]
    if len(keys) == 1:
        ((prefix, key),) = keys
        message = f"key {key!r} of {prefix or 'the extras'} becomes the text {str(key)!r}"
        yield Note("renamed", message, str(key))
    elif keys:
        where = [
            f"{some_of(list(map(repr, of_dict)))} of {prefix or 'the extras'}" for prefix, of_dict in texts.items()
        ]
        message = f"{plural(len(keys), 'key')} that are not text become text: {some_of(where, 3)}"
        dotted = [".".join(filter(None, (prefix, str(key)))) for prefix, key in keys]
        yield Note("renamed", message, keys=tuple(dotted))


def _notes_on_unset(leaves: Sequence[Leaf], texts: Mapping[str, Sequence[Key]]) -> Iterator[Note]:
    """A warning for values below keys that become text. Loading sets tensors in place, and everything else under the
    texts (``torch.distributed.checkpoint._traverse.set_element``): the job's own keys keep what they have.
    """
    changed = {f"{prefix}.{key!s}" if prefix else str(key) for prefix, keys in texts.items() for key in keys}
    unset: list[str] = []
    for leaf in leaves if changed else ():
        is_value = leaf.tensor is None and not isinstance(leaf.value, Blockwise)
        above = (_dotted(leaf.path[:depth]) for depth in range(1, len(leaf.path) + 1))
        if is_value and not changed.isdisjoint(above):
            unset.append(leaf.key)
    if unset:
        message = (
            f"dcp.load does not set {plural(len(unset), 'value')} below keys that are not text in the job's own state "
            f"dict (tensors it does): {some_of(unset, 3)}"
        )
        yield Note("resumption", message, keys=tuple(unset), warning=True)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _stored_whole(values: list[Value]) -> bool:
    """Whether DCP stores a list as one value: it contains no tensor, mapping or list that DCP enters."""
    return not any(
        isinstance(item, (Tensor, dict)) or (isinstance(item, list) and not _stored_whole(item)) for item in values
    )


def flatten_state_dict(
    checkpoint: Checkpoint, section_paths: Mapping[Section, SectionPath] = PLAIN_PATHS, *, flattened_keys: bool = False
) -> tuple[list[Leaf], list[Note]]:
    """All leaves in ``dcp.save``'s order under DCP's flat keys, with notes on what the flat form cannot hold.

    As ``torch.distributed.checkpoint._nested_dict`` and ``_traverse`` do: mappings are always entered, with their keys
    as text; lists only if they hold tensors, or non-empty containers that do; tuples never. An empty mapping leaves no
    trace, so a note mentions it.

    Raises SourceUnsupportedError if several entries get the same flat key.
    """
    leaves: list[Leaf] = []
    notes: list[Note] = []
    double: list[str] = []
    texts: dict[str, list[Key]] = {}
    walk = _Walk(leaves, notes, double, texts)
    if checkpoint.model is not None:
        path = section_paths[Section.MODEL].keys
        walk.mapping(path, _dotted(path), dict(checkpoint.model.params.items()))
        notes += _notes_on_metadata(checkpoint.model, "the model")
    if checkpoint.optim is not None:
        path = section_paths[Section.OPTIM].keys
        if flattened_keys:
            leaves.extend(_flat_optimizer(checkpoint.optim, path, notes))
        else:
            root, state = optimizer_dict(checkpoint.optim), (*path, "state")
            _Walk(leaves, notes, double, texts, ids=state).enter(state, _dotted(state), root.pop("state"))
            if root:
                walk.mapping(path, _dotted(path), root)
    for named in checkpoint.named:
        if isinstance(named.content, ModelState):
            notes += _notes_on_metadata(named.content, named.dotted)
    extra, dropped = extras_of_one(checkpoint)
    if extra:
        walk.mapping((), "", extra)
    _refuse_duplicates(leaves, double)
    return leaves, [*notes, *_notes_on_texts(texts), *_notes_on_unset(leaves, texts), *dropped]


def lost_dicts(
    checkpoint: Checkpoint, section_paths: Mapping[Section, SectionPath] = PLAIN_PATHS, *, flattened_keys: bool = False
) -> tuple[LostDict, ...]:
    """The dicts of what ``flatten_state_dict`` makes leaves of that are others when the leaves are nested again. The
    ids of the main optimizer are not among them: readers know them by its groups.
    """
    lost: list[LostDict] = []
    if checkpoint.model is not None:
        lost += lost_in(dict(checkpoint.model.params.items()), section_paths[Section.MODEL].keys)
    if checkpoint.optim is not None and not flattened_keys:
        path = section_paths[Section.OPTIM].keys
        lost += (each for each in lost_in(optimizer_dict(checkpoint.optim), path) if each.path != (*path, "state"))
    return (*lost, *lost_in(extras_of_rank(checkpoint, 0)))


def _notes_on_metadata(model: ModelState, name: str) -> list[Note]:
    if model.metadata is None:
        return []
    return [Note("dropped", f"{name} state dict's _metadata (module versions) cannot be stored in a DCP directory")]


def _flat_optimizer(optim: Optimizer, at: Path, notes: list[Note]) -> Iterator[Leaf]:
    """The form of ``StateDictOptions(flatten_optimizer_state_dict=True)`` for an optimizer keyed by name.

    Raises SourceUnsupportedError for ids, which this form cannot hold.
    """
    if optim.key_type == "id":
        raise SourceUnsupportedError(
            "flattened optimizer keys begin with parameter names, and this optimizer is keyed by id",
            next_step=f"{flags.key_type('name')}",
        )
    entries: list[tuple[str, Value | Blockwise]] = []
    for param, entry in optim.items():
        if isinstance(entry, OwnValue):
            entries.append((f"state.{param}", entry.value))
        else:
            entries += [(f"state.{param}.{name}", value) for name, value in joined_states(entry)]
    for key, value in entries:
        yield Leaf(_dotted((*at, key)), (*at, key), value)
    yield from settings_by_parameter(optim, at)
    if len(optim.groups or ()) > 1:
        message = "each parameter has its own settings: the order of the groups is not kept"
        notes.append(Note("groups-flattened", message))
    for number, group in enumerate(optim.groups or ()):
        if not group.members:
            message = f"param group {number} lists no parameter, and flattened keys have nothing else to hold it by"
            notes.append(Note("dropped", message))
    for extra in optim.extra:
        notes.append(Note("dropped", f"{extra!s} of the optimizer cannot be stored among flattened keys", str(extra)))


def settings_by_parameter(optim: Optimizer, at: Path) -> Iterator[Leaf]:
    """The settings of the param groups as a flattened optimizer at ``at`` has them: one entry for each parameter."""
    for group, params in zip(optim.groups or (), optim.in_groups(), strict=False):
        for param in params:
            for setting, value in group.settings.items():
                if setting != PARAMS:
                    key = f"param_groups.{param}.{setting!s}"
                    yield Leaf(_dotted((*at, key)), (*at, key), value)


def _refuse_duplicates(leaves: list[Leaf], double: list[str]) -> None:
    times = Counter(leaf.key for leaf in leaves)
    same = list(dict.fromkeys([*(key for key in times if times[key] > 1), *double]))
    if same:
        raise SourceUnsupportedError(
            "several entries would get the same key in a DCP directory",
            details=same,
            why="DCP makes keys text and joins nested ones with dots, and two of them become equal",
            next_step=f"leave one of them out with {flags.exclude}, or rename it with {flags.rename('OLD=NEW')}",
            key=same[0],
        )
