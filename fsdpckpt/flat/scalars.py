"""States that a flat parameter has once: its parameters must agree on them, as FSDP1 requires.

The rule is that of ``_flatten_zero_dim_tensor_optim_state`` and ``_flatten_non_tensor_optim_state``: equal dtype and
value for all parameters of the unit.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, OptimState
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Unit, UnitParam, Units
from fsdpckpt.ir.values import Value
from fsdpckpt.storage.sources import Sources

__all__ = ["require_equal_scalars"]

SHOWN = 4  # parameters named for each value


def require_equal_scalars(checkpoint: Checkpoint, units: Units, sources: Sources) -> None:
    """Raises SourceUnsupportedError that lists every state on which the parameters of one unit disagree."""
    optim = checkpoint.optim
    if optim is None:
        return
    wrong = [text for unit in units.units for text in _disagreements(unit, optim, checkpoint, sources)]
    if wrong:
        raise SourceUnsupportedError(
            f"{checkpoint.source}: parameters of one unit have different states where a flat parameter has one",
            details=wrong,
            why="with use_orig_params=False all parameters of a unit share one step and one value of each such state",
            next_step="add --use-orig-params, under which each parameter keeps its own, or check the source: "
            "fsdpckpt verify",
        )


def _disagreements(unit: Unit, optim: OptimState, checkpoint: Checkpoint, sources: Sources) -> Iterator[str]:
    values: dict[str, dict[tuple[str, object], list[str]]] = {}
    for param in unit.params:
        for state, leaf in optim.state.get(param.name, {}).items():
            # A parameter without elements holds nothing that took a step.
            if param.numel and (not isinstance(leaf, Tensor) or _is_scalar(state, leaf, param)):
                seen = values.setdefault(state, {})
                seen.setdefault(_identity(leaf, checkpoint, sources), []).append(param.name)
    for state, seen in values.items():
        if len(seen) > 1:
            told = "; ".join(f"{_shown(value)} for {_names(names)}" for value, names in seen.items())
            yield f"unit {unit.prefix or 'root'!r}, state {state}: {told}"


def _is_scalar(state: str, leaf: Tensor, param: UnitParam) -> bool:
    return leaf.numel == 1 and (state == "step" or leaf.shape != param.shape)


def _identity(leaf: Tensor | Value, checkpoint: Checkpoint, sources: Sources) -> tuple[str, object]:
    """Type and content, hashable: equal for equal values of equal type."""
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__, repr(leaf)
    row = 0
    file = checkpoint.files[int(leaf.chunks.file[row])]
    data = sources.open(file.path).read(int(leaf.chunks.offset[row]), leaf.dtype.itemsize)
    return leaf.dtype.name, bytes(data)


def _shown(value: tuple[str, object]) -> str:
    kind, content = value
    return f"{kind} 0x{content.hex()}" if isinstance(content, bytes) else str(content)


def _names(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
