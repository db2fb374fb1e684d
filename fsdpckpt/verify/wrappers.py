"""Removes from names the prefixes of wrapper modules that depend on how a checkpoint was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from fsdpckpt import flags
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Section
from fsdpckpt.ir.names import clean, without_fsdp
from fsdpckpt.ir.optimizer import ParamKey
from fsdpckpt.ir.row_names import with_spellings
from fsdpckpt.producers.recognition import flavor_named
from fsdpckpt.text import plural
from fsdpckpt.verify.difference import ComparedKey

UNWRAPPED = "prefixes of wrapper modules in the names do not count as differences"


def is_weights_only(checkpoint: Checkpoint) -> bool:
    """Whether it is in a format for weights alone."""
    flavor = flavor_named(checkpoint.flavor)
    return flavor is not None and bool(flavor.forms) and all(form.weights for form in flavor.forms)


def has_bare_names(checkpoint: Checkpoint) -> bool:
    """Whether its format has no prefixes of wrapper modules: flat parameters, and weights for other libraries."""
    flat = checkpoint.units is not None and checkpoint.units.flat
    return checkpoint.layout is Layout.FLATTENED or flat or is_weights_only(checkpoint)


_Place: TypeAlias = tuple[Section, str, str | None]  # section, parameter without prefixes, and state of it


class Unwrapped(NamedTuple):
    """A checkpoint without prefixes of wrapper modules; ``shortened``: whether a name had one."""

    checkpoint: Checkpoint
    shortened: bool


def without_wrappers(checkpoint: Checkpoint, *, bare: bool) -> Unwrapped:
    """``checkpoint`` without the prefixes of wrapper modules that depend on the layout: those of FSDP1 in the
    optimizer's names, which ``FSDP.optim_state_dict`` drops. ``bare``: without all of them.
    """
    model, optim = checkpoint.model, checkpoint.optim
    of_optim = _shortened(optim.all_keys() if optim is not None else (), clean if bare else without_fsdp)
    of_model = _shortened(model.params if model is not None and bare else (), clean)
    return Unwrapped(with_spellings(checkpoint, of_model, of_optim), bool(of_model or of_optim))


def _shortened(keys: Iterable[ParamKey], shorten: Callable[[str], str]) -> dict[str, str]:
    """The shortened name of each key that is one; empty if none is shorter, or if two would become one."""
    names = {key: shorten(key) for key in keys if isinstance(key, str)}
    distinct = len(set(names.values())) == len(names)
    return names if distinct and any(old != new for old, new in names.items()) else {}


def differ_by_wrappers(entries: Iterable[ComparedKey]) -> list[str]:
    """A note if names that only one side has are names of the other side with other prefixes of wrapper modules."""
    only: dict[str, dict[_Place, str]] = {"-": {}, "+": {}}
    for entry in entries:
        if entry.sigil in only and entry.param is not None:
            only[entry.sigil][entry.section, clean(entry.param), entry.state] = entry.param
    before, after = only["-"], only["+"]
    alike = {tensor[1] for tensor in before.keys() & after.keys() if before[tensor] != after[tensor]}
    if not alike:
        return []
    return [
        f"the names of {plural(len(alike), 'parameter')} differ only in the prefixes of wrapper modules, which "
        f"load_state_dict wants as they are; a conversion with {flags.clean_names} removes them"
    ]
