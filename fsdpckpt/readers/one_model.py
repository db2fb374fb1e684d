"""Whether a model and an optimizer that lie in different files can be of one model: they name parameters alike."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import LOOSE, Note, OptimState, group_params
from fsdpckpt.ir.fqn import clean

__all__ = ["strange_names"]

_SHOWN = 3  # names in a message
_FLAT = "flat_param"  # in the names of flat parameters, of every version of FSDP1


def strange_names(source: str, model: tuple[str, Collection[str]], optim: tuple[str, OptimState]) -> list[Note]:
    """A note of the optimizer's names that the model lacks. ``model``, ``optim``: their labels, and what they hold.

    Names that differ by a prefix only are alike, and those of flat parameters say nothing. Raises
    NeedsInformationError when the two have no name in common: torchtune keeps its own names for the optimizer, and
    saves the weights under those of Hugging Face.
    """
    (where, names), (other, state) = model, optim
    named = _named(state) if state.key_type == "name" else []
    missing = [name for name in named if name not in names]
    if not missing or any(_FLAT in name for name in (*names, *named)):
        return []
    held = {clean(name) for name in names}
    ends = {end for name in held for end in _ends(name)}
    missing = [name for name in missing if clean(name) not in ends and held.isdisjoint(_ends(clean(name)))]
    if not missing:
        return []
    shown = _first(missing)
    if len(missing) < len(named):
        keys = "1 optimizer key is" if len(missing) == 1 else f"{len(missing)} optimizer keys are"
        return [Note("unmatched", f"{keys} none of the model's: {shown}", keys=tuple(missing))]
    raise NeedsInformationError(
        f"{source} holds a model and an optimizer that have no parameter name in common",
        details=[f"{where}: {_first(list(names))}", f"{other}: {shown}"],
        why="they are of different models, or a tool renamed the parameters of one of them (torchtune saves weights "
        "under Hugging Face's names, and its optimizer under its own)",
        next_step=f"name the one to read, for example {shlex.quote(where)}",
        file=source,
    )


def _named(optim: OptimState) -> list[str]:
    """The parameters' names among the optimizer's keys, each once."""
    stated = [key for key, states in optim.state.items() if LOOSE not in states]
    listed = [key for group in optim.param_groups or () for key in group_params(group) or ()]
    return list(dict.fromkeys(key for key in (*stated, *listed) if isinstance(key, str)))


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _ends(name: str) -> list[str]:
    """``a.b.c``: itself, ``b.c`` and ``c``."""
    words = name.split(".")
    return [".".join(words[at:]) for at in range(len(words))]
