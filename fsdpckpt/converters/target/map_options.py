"""Divides the options of a conversion with ``--map`` between the model that is read and the one that the map makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpckpt.converters.target.decision import Decision, MapDecision
from fsdpckpt.ir import Container, Layout
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.declare import Scope, options_of


def with_mapping(decision: Decision, folders: tuple[str, ...] = ()) -> Decision:
    """``decision`` about the model that ``--map`` makes, with how the source is read; unchanged without a map.

    ``folders``: where a ``config.json`` of the model may be, beside those of the source.
    """
    options = decision.options
    if not options.map:
        return decision
    # Units, names and order are those of one of the two models: of the written one if its form needs them, else each is
    # about the one whose names it has (``converters.map_order``).
    exports_weights = decision.form is not None and decision.form.weights
    of_target = decision.layout is Layout.FLATTENED or exports_weights
    later: dict[str, Any] = {"key_type": "name", "clean_names": False, "missing_state": None}
    later |= {"strip_prefix": None, "add_prefix": None, "rename": (), "dtype": None, "optim_dtype": None}
    later |= {"placements": None, "like": None, "mesh": ()}
    used: dict[str, Any] = {"include": (), "exclude": (), "no_weight_decay": (), "clean_names": False}
    unknown = _without_knowledge(options)
    before = replace(options, **later, **(unknown if of_target else {}))
    after = replace(options, **used, **({} if of_target else unknown))
    read = Decision(Layout.FULL, Container.TORCH, None, before, directory=False)
    return replace(decision, options=after, mapping=MapDecision(options, read, of_target, folders))


def _without_knowledge(options: ConvertOptions) -> dict[str, Any]:
    """The options of which each describes one model, with their defaults."""
    scopes = Scope.KNOWLEDGE | Scope.FLAT_PARAMETERS
    declared = options_of(type(options))
    return {option.name: option.default for option in declared if option.scope & scopes and option.name != "buffers"}
