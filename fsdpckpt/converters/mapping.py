"""Applies ``--map``: finds the map and its numbers, and makes of what was read the checkpoint that is converted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from fsdpckpt import flags
from fsdpckpt.converters.huggingface import configuration_of
from fsdpckpt.errors import NeedsInformationError, UsageError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.model_config import CONFIG
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.maps import AppliedMap, LayoutMap, Reading, apply_map, map_names, named_map, read_map
from fsdpckpt.option_fields import Scope, options_of
from fsdpckpt.options import ConvertOptions
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.elements import first_difference

_FILES = (".toml", ".json")
_SAID_AGAIN = ("missing-state", "undetermined", "unused")


def mapped(
    checkpoint: Checkpoint, opened: Checkpoint, options: ConvertOptions, sources: Sources
) -> tuple[Checkpoint, AppliedMap]:
    """``checkpoint``, whose optimizer is keyed by name, as the map of ``options`` makes it.

    ``opened``: the source with the sections that are left out. Raises what ``apply_map`` raises, NeedsInformationError
    for a number that nothing gives, UsageError.
    """
    layout_map = find_map(options)
    values = _values(layout_map, opened, options, sources)

    def number(tensor: Tensor) -> bytes:
        return sources.read_elements(checkpoint.files, tensor)

    def equal(first: Tensor, other: Tensor) -> bool:
        files = (checkpoint.files, sources)
        same_form = first.shape == other.shape and first.dtype is other.dtype
        return same_form and first_difference((first, *files), (other, *files), None) is None

    shapes: dict[str, tuple[int, ...]] = {}
    for model in (opened.model, checkpoint.model):  # the second has names without prefixes of wrappers
        for name, leaf in model.params.items() if model is not None else ():
            if isinstance(leaf, Tensor):
                shapes[name] = leaf.shape
    # What is said of names is said again of the new ones.
    notes = tuple(note for note in checkpoint.ledger.notes if note.kind not in _SAID_AGAIN)
    checkpoint = replace(checkpoint, ledger=replace(checkpoint.ledger, notes=notes))
    return apply_map(checkpoint, layout_map, values, Reading(number, equal), shapes)


def find_map(options: ConvertOptions) -> LayoutMap:
    """The map that ``--map`` names, or its inverse."""
    name = str(options.map)
    if name.endswith(_FILES) or "/" in name:
        found = read_map(name)
    else:
        names = map_names()
        if name not in names:
            near = get_close_matches(name, names, n=1, cutoff=0.4)
            raise UsageError(
                f"there is no built-in map {name}",
                expected=", ".join(names) + ", or the path of a .toml or .json file",
                found=name,
                next_step=f"did you mean {flags.map_(near[0])}?"
                if near
                else f"{flags.map_('./' + name)} if it is a file",
            )
        found = named_map(name)
    return found.inverse() if options.inverse else found


def _values(layout_map: LayoutMap, opened: Checkpoint, options: ConvertOptions, sources: Sources) -> Mapping[str, int]:
    """The numbers that the map leaves open: given, of a ``config.json``, or what the map itself states."""
    given: dict[str, int] = {}
    for name, text in options.map_value:
        if name not in layout_map.values:
            raise UsageError(
                f"{flags.map_value(f'{name}={text}')}: {layout_map.name} has no value {name}",
                expected=", ".join(layout_map.values) or "none",
                found=name,
                next_step=f"drop {flags.map_value}",
            )
        if not text.isdigit() or not int(text):
            raise UsageError(f"{flags.map_value(f'{name}={text}')} is no whole number from 1 on", found=text)
        given[name] = int(text)
    numbers: dict[str, int] = {}
    configuration = configuration_of(opened, options, sources) if layout_map.values else {}
    fields = {name: value for name, value in configuration.items() if type(value) is int and value > 0}
    for name, value in layout_map.values.items():
        stated = next((size.value(fields) for size in value.fields if all(each in fields for each in size.names)), None)
        if name in given and stated not in (None, given[name]):
            raise UsageError(
                f"{flags.map_value(f'{name}={given[name]}')} contradicts {CONFIG}",
                expected=str(stated),
                found=str(given[name]),
                why=f"{CONFIG} describes the model, and says {stated}",
                next_step=f"drop {flags.map_value}, or correct {CONFIG}",
            )
        number = given.get(name, stated if stated is not None else value.default)
        if number is None:
            listed = " or ".join(size.text for size in value.fields)
            raise NeedsInformationError(
                f"nothing says what {name} is, which {layout_map.name} needs",
                why=f"no {CONFIG} beside {opened.source} has {listed}" if listed else None,
                next_step=f"add {flags.map_value(f'{name}=N')}, or {flags.reference('DIR')} of a directory with the "
                f"model's {CONFIG}",
            )
        numbers[name] = number
    return numbers


def refuse_ids(checkpoint: Checkpoint, options: ConvertOptions) -> None:
    """Raises NeedsInformationError for a target whose optimizer would be keyed by id."""
    if checkpoint.optim is not None and checkpoint.optim.keys:
        source = shlex.quote(checkpoint.source)
        raise NeedsInformationError(
            f"{flags.map_(options.map)} makes other parameters, and nothing says in which order the optimizer of the "
            "new model lists them",
            why=f"the optimizer of {source} is keyed by id, and an id is a position in that list",
            next_step=f"{flags.key_type('name')}; a second conversion with {flags.key_type('id')} and "
            f"{flags.parameters('FILE')} makes ids of the names",
        )


def before_mapping(options: ConvertOptions, *, of_target: bool) -> ConvertOptions:
    """``options`` for reading the checkpoint that a map is applied to.

    ``of_target``: whether what they say of units, names and order is about the target; else it is about the source.
    """
    later: dict[str, Any] = {"map": None, "inverse": False, "map_value": (), "key_type": "name", "clean_names": False}
    later |= {"strip_prefix": None, "add_prefix": None, "rename": (), "dtype": None, "optim_dtype": None}
    later |= {"missing_state": None, "placements": None, "like": None, "mesh": ()}
    return replace(options, **later, **(_without_knowledge(options) if of_target else {}))


def after_mapping(options: ConvertOptions, *, of_target: bool) -> ConvertOptions:
    """``options`` for the checkpoint that a map has made. ``of_target``: see ``before_mapping``."""
    used: dict[str, Any] = {"map": None, "inverse": False, "map_value": (), "include": (), "exclude": ()}
    used |= {"no_weight_decay": (), "clean_names": False}
    return replace(options, **used, **({} if of_target else _without_knowledge(options)))


def _without_knowledge(options: ConvertOptions) -> dict[str, Any]:
    """The options of which each describes one model, with their defaults."""
    scopes = Scope.KNOWLEDGE | Scope.FLAT_PARAMETERS
    declared = options_of(type(options))
    return {option.name: option.default for option in declared if option.scope & scopes and option.name != "buffers"}
