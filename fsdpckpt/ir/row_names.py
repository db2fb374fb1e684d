"""The names of rows, and how each section of a source spells them: with wrappers, ``module.``, an adapter's name.

Names go without what a section has before them until they are written (``normalise``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.adapters import without_adapter
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note
from fsdpckpt.ir.names import DISTRIBUTED, FSDP_WRAPPER, clean, is_in_module, without_fsdp, without_module
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value, like
from fsdpckpt.text import plural, some_of

_MAX_NAMED = 5  # keys in a note's message; its ``keys`` lists all


@dataclass(frozen=True)  # without slots: its views are made once
class RowNames:
    """The name of each parameter's row, by the names that the model and the optimizer of the source give it. ``live``:
    as the optimizer's, with the adapter's name, which the live model has: no option takes it away.

    ``leading``: the prefix of all names in the model that have none of their own: those that a units file gives slices.
    """

    model: Mapping[str, str] = field(default_factory=dict)
    optim: Mapping[str, str] = field(default_factory=dict)
    live: Mapping[str, str] = field(default_factory=dict)
    leading: str = ""

    @classmethod
    def of(cls, checkpoint: Checkpoint, leading: str = "") -> RowNames:
        in_model = {name: clean(name) for name in checkpoint.params}
        in_optim = {name: clean(name) for name in _names(checkpoint.optim)}
        live = in_optim
        if in_model and in_optim:
            by_section = in_model, in_optim
            in_model = _without_module(in_model, by_section[1].values())
            live = _without_module(in_optim, by_section[0].values())
            in_optim = dict(zip(live, without_adapter(live.values(), in_model.values()), strict=True))
        return cls(in_model, in_optim, live, leading)

    @cached_property
    def plain(self) -> bool:
        """Whether every key is the name of its row."""
        return all(key == row for names in (self.model, self.optim) for key, row in names.items())

    @property
    def wrapped(self) -> bool:
        """Whether any name has the prefix of a wrapper."""
        return bool(self.leading) or not self.plain

    def of_model(self, row: str) -> str:
        """The name that the model gives a parameter."""
        key = self._in_model.get(row, row)
        return key if key != row else self.leading + row

    def of_optimizer(self, row: str) -> str:
        """The name that the optimizer gives a parameter, or would give one that it did not have: the model's if the
        optimizer is keyed by id.
        """
        if self.plain:
            return self.leading + row
        if row in self._in_optim:
            return self._in_optim[row]
        return self.of_model(row) if self._optim_leading is None else self._optim_leading + row

    @cached_property
    def _in_model(self) -> Mapping[str, str]:
        return {row: key for key, row in self.model.items()}

    @cached_property
    def _in_optim(self) -> Mapping[str, str]:
        return {row: key for key, row in self.optim.items()}

    @cached_property
    def _optim_leading(self) -> str | None:
        """What all names in the optimizer have before those of their rows; None if they differ in that, or there are
        none.
        """
        found = {key.removesuffix(row) if key.endswith(row) else None for key, row in self.optim.items()}
        return found.pop() if len(found) == 1 else None

    def put_back_wrappers(self, checkpoint: Checkpoint) -> Checkpoint:
        """``checkpoint``, keyed by the names of rows, with the names of the source."""
        in_model = checkpoint.params
        return with_spellings(
            checkpoint,
            {name: self.of_model(name) for name in in_model},
            {name: self.of_optimizer(name) for name in _names(checkpoint.optim)},
        )

    def report_wrappers(self, checkpoint: Checkpoint) -> Checkpoint:
        """``checkpoint``, keyed by the names of rows, with those of the live model, and with a note that lists the
        names that lost a prefix.
        """
        model = checkpoint.model
        if model is not None and any(key != row for key, row in self.model.items()):
            checkpoint = replace(checkpoint, model=replace(model, metadata=_metadata(model.metadata)))
        checkpoint = with_spellings(checkpoint, {}, {row: self.live[key] for key, row in self.optim.items()})
        listed = [f"{key} -> {name}" for names in (self.model, self.live) for key, name in names.items() if key != name]
        if not listed:
            return checkpoint
        lost = list(dict.fromkeys(listed))
        message = f"{plural(len(lost), 'key')} lost the prefixes of wrapper modules: {some_of(lost, _MAX_NAMED)}"
        return checkpoint.noted(Note("normalised", message, keys=tuple(lost)))

    def spellings(self, leads: Iterable[str] = (), names: Iterable[str] = ()) -> list[list[str]]:
        """Of each parameter that may be spelled in several ways, its keys, then all others, which need be no keys: with
        the wrappers, or the ``module.``, that any key has before the name of its row, or with one of ``leads``.
        ``names``: of all parameters, also of those that only the ``param_names`` beside ids name.
        """
        keys = [*self.model.items(), *self.optim.items()]
        keys += [(name, clean(name)) for name in names if name not in self.model and name not in self.optim]
        rows = dict.fromkeys(row for _, row in keys)
        of_keys = [key.removesuffix(row) for key, row in keys if key.endswith(row)]
        before = dict.fromkeys(("", *of_keys, *leads))
        in_module = bool(rows) and all(map(is_in_module, rows))
        if not in_module and before.keys() <= {""} and all(key == row for key, row in keys):
            return []
        of_row: dict[str, dict[str, None]] = {row: {} for row in rows}
        for key, row in keys:
            of_row[row][key] = None
        taken = {*rows, *(key for key, _ in keys)}
        for row, spelled in of_row.items():
            others = [lead + row for lead in before]
            if in_module:
                others += [lead + row.removeprefix(DISTRIBUTED) for lead in before]
            spelled.update({other: None for other in others if other == row or other not in taken})
        return [list(spelled) for spelled in of_row.values()]

    def are_spellings(self, key: str, other: str) -> bool:
        """Whether these keys are one parameter, which the model spells in one way and the optimizer in the other."""
        pairs = ((key, other), (other, key))
        return any(
            model in self.model and optim in self.optim and self.model[model] == self.optim[optim]
            for model, optim in pairs
        )


def leads(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What sections of ``checkpoint``, the named ones too, have before the names of parameters: wrappers, and the
    ``module.`` that all names of a section have, and that another section lacks.
    """
    contents = [checkpoint.model, checkpoint.optim, *(named.content for named in checkpoint.named)]
    listed = [list(each.params) if isinstance(each, ModelState) else _names(each) for each in contents]
    cleaned = [tuple(map(clean, keys)) for keys in listed]
    plain = list(map(set, cleaned))
    found: dict[str, None] = {}
    for keys, as_cleaned in zip(listed, cleaned, strict=True):
        names = without_module(as_cleaned, ())
        if all(names_of.isdisjoint(names) for names_of in plain):
            names = as_cleaned  # a module of this name
        for key, name in zip(keys, names, strict=True):
            if key.endswith(name) and key != name:
                lead = key.removesuffix(name)
                found.update({lead: None, clean(lead): None})
    return tuple(lead for lead in found if lead)


def normalise(checkpoint: Checkpoint, *, leading: str = "", like: Iterable[str] = ()) -> tuple[Checkpoint, RowNames]:
    """``checkpoint`` with the names of rows as the keys of model and optimizer. Also returns the names in the source.

    FSDP1's wrappers are not part of the names in a state dict, and ``FSDP.optim_state_dict`` drops them. So the names
    of an optimizer that is keyed by ``named_parameters()`` lose them for good, unless the names in the model, ``like``,
    have them. ``param_names`` in groups and the model's metadata are no keys and stay as they are. ``leading``: see
    ``RowNames``. Raises SourceUnsupportedError if two keys of one section would become one.
    """
    rows = RowNames.of(checkpoint, leading)
    if rows.plain:
        return checkpoint, rows
    _refuse_collisions(checkpoint, rows.model, "model")
    _refuse_collisions(checkpoint, rows.optim, "optim")
    named = with_spellings(checkpoint, rows.model, rows.optim)
    notes: list[Note] = []
    lost = [] if any(map(_in_fsdp, like)) else [key for key in rows.optim if _in_fsdp(key)]
    if lost:
        in_optim = {without_fsdp(key): row for key, row in rows.optim.items()}
        live = {without_fsdp(key): row for key, row in rows.live.items()}
        rows = replace(rows, optim=in_optim, live=live)
        message = f"{plural(len(lost), 'key')} of the optimizer lost the prefixes of FSDP1's wrappers: {lost[0]}, ..."
        notes.append(Note("normalised", message, keys=tuple(lost)))
    return named.noted(*notes), rows


def with_spellings(checkpoint: Checkpoint, in_model: Mapping[str, str], in_optim: Mapping[str, str]) -> Checkpoint:
    """``checkpoint`` with other keys (old to new) for what stays the same parameters; those without a new one stay, as
    ids and ``param_names`` do; ``checkpoint`` itself if there is none. A parameter that gets another name has it in the
    whole table (``ir.table``).
    """
    model, optim = checkpoint.model, checkpoint.optim
    if model is not None and in_model:
        model = replace(model, params={in_model.get(name, name): leaf for name, leaf in model.params.items()})
    if optim is not None and in_optim:
        spelled = {key: in_optim.get(key, key) if isinstance(key, str) else key for key in optim.all_keys()}
        optim = optim.renamed(spelled)
    same = model is checkpoint.model and optim is checkpoint.optim
    return checkpoint if same else replace(checkpoint, model=model, optim=optim)


def rename_shared_states(checkpoint: Checkpoint, units: Units) -> Checkpoint:
    """``checkpoint`` with the states of shared parameters under the name that ``units`` list. If a parameter is in
    several units, that is the name in the innermost; PyTorch's full state dicts have the model's first name.
    """
    optim = checkpoint.optim
    if optim is None or not units.shared:
        return checkpoint
    keys = set(optim.all_keys())
    later = {later: first for later, first in units.shared if first not in keys}
    return with_spellings(checkpoint, {}, later)


def _in_fsdp(name: str) -> bool:
    return FSDP_WRAPPER in name.split(".")


def _names(optim: Optimizer | None) -> list[str]:
    """The keys of an optimizer that is keyed by name."""
    if optim is None or optim.key_type != "name":
        return []
    return [key for key in optim.all_keys() if isinstance(key, str)]


def _without_module(names: Mapping[str, str], like: Iterable[str]) -> dict[str, str]:
    """``names`` (old to new), with ``without_module`` applied to the new ones."""
    return dict(zip(names, without_module(names.values(), tuple(like)), strict=True))


def _refuse_collisions(checkpoint: Checkpoint, names: Mapping[str, str], section: str) -> None:
    old_names: dict[str, list[str]] = {}
    for old, new in names.items():
        old_names.setdefault(new, []).append(old)
    collisions = {new: olds for new, olds in old_names.items() if len(olds) > 1}
    if collisions:
        first = next(iter(collisions.values()))
        raise SourceUnsupportedError(
            f"{checkpoint.source}: {section} keys that differ only in the prefixes of wrapper modules would become one",
            details=[f"{' and '.join(olds)} -> {new}" for new, olds in collisions.items()],
            why="the checkpoint holds a model and a compiled or wrapped copy of it",
            next_step=f"save one of the two, or convert only the other section with {flags.only}",
            key=first[0],
        )


def _metadata(metadata: Value) -> Value:
    """``_metadata`` with clean module paths. Of a wrapper and a module that get one path the module's entry stays."""
    if not isinstance(metadata, dict):
        return metadata
    return like(metadata, {clean(key) if isinstance(key, str) else key: value for key, value in metadata.items()})
