"""Recognise FSDP1's flat-parameter shards: one-dimensional slices that look like tensors and are not.

Their shapes say nothing about the parameters. Two forms exist (``torch/distributed/fsdp/_state_dict_utils.py``,
``_optim_utils.py``): ``LOCAL_STATE_DICT`` files with keys ``<unit>._flat_param``, and the optimizer's own state dict on
each rank, whose states are one slice per unit or per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fsdpckpt.containers.torch_distributed import Distributed
from fsdpckpt.containers.torch_storages import StoredTensor
from fsdpckpt.ir.checkpoint import Problem, Section
from fsdpckpt.ir.values import Key, Value

__all__ = ["flat_parameter_keys", "flattened_problem", "sliced_optimizer"]

_DEPTH = 4  # how deep an optimizer may lie; composer, the deepest producer, needs 3
_FLAT = "_flat_param"


def _mappings(value: object, depth: int = 0) -> Iterator[dict[Key, Value]]:
    """The dicts that may be a section, outermost first; the states and groups of an optimizer are not among them."""
    if isinstance(value, dict):
        yield value
        if depth < _DEPTH and not _is_optimizer(value):
            for child in value.values():
                if isinstance(child, (dict, list)):
                    yield from _mappings(child, depth + 1)
    elif isinstance(value, list) and len(value) <= 16 and depth < _DEPTH:
        for child in value:
            yield from _mappings(child, depth + 1)


def _is_optimizer(value: Mapping[Key, Value]) -> bool:
    return isinstance(value.get("state"), dict) and "param_groups" in value


def flat_parameter_keys(root: object) -> list[str]:
    """The keys in ``root`` that name a flat parameter: ``_flat_param`` and ``<unit>._flat_param``."""
    found: dict[str, None] = {}
    for mapping in _mappings(root):
        inner = mapping.get("state")
        for keys in (mapping, inner if _is_optimizer(mapping) and isinstance(inner, dict) else {}):
            found.update({key: None for key in keys if isinstance(key, str) and key.endswith(_FLAT)})
    return [key for key in found if key == _FLAT or key.endswith(f".{_FLAT}")]


def sliced_optimizer(roots: Sequence[Value]) -> str | None:
    """Why the optimizer in these rank files is FSDP1's own, in slices; None when it is not, or there is none.

    It is when all its states with dimensions are plain one-dimensional tensors, unless the model in the same files
    has parameters of exactly these shapes. Full states of more dimensions are replicas (NO_SHARD, DDP).
    """
    shapes: list[list[tuple[int, ...]]] = []
    for root in roots:
        own: list[tuple[int, ...]] = []
        for mapping in _mappings(root):
            if _is_optimizer(mapping):
                for leaf in _states(mapping):
                    if not isinstance(leaf, StoredTensor) or len(leaf.shape) > 1:
                        return None
                    own.append(leaf.shape)
        shapes.append(own)
    if not any(shapes):
        return None
    known = _model_shapes(roots[0])
    same = all(own == shapes[0] for own in shapes)
    if same and known and all(shape in known for shape in shapes[0]):
        return None
    sizes = sorted({shape[0] for own in shapes for shape in own})
    text = ", ".join(map(str, sizes[:6])) + (", ..." if len(sizes) > 6 else "")
    return f"all optimizer states are plain one-dimensional tensors (of {text} elements), in {len(roots)} rank files"


def _states(optimizer: Mapping[Key, Value]) -> Iterator[object]:
    """Every tensor state with at least one dimension."""
    state = optimizer["state"]
    for entry in state.values() if isinstance(state, dict) else ():
        for leaf in entry.values() if isinstance(entry, dict) else ():
            if isinstance(leaf, (StoredTensor, Distributed)) and leaf.shape:
                yield leaf


def _model_shapes(root: Value) -> set[tuple[int, ...]]:
    """The shapes of all tensors in ``root`` outside its optimizers."""
    found: set[tuple[int, ...]] = set()
    for mapping in _mappings(root):
        if not _is_optimizer(mapping):
            leaves: list[object] = list(mapping.values())
            found.update(leaf.shape for leaf in leaves if isinstance(leaf, (StoredTensor, Distributed)))
    return found


def flattened_problem(evidence: Sequence[str] | str, file: str) -> Problem:
    """The fatal problem of a flattened checkpoint, said of the section it is about."""
    if isinstance(evidence, str):
        reason, section, key = evidence, Section.OPTIM, None
    else:
        section, key = Section.MODEL, evidence[0]
        names = ", ".join(evidence[:3]) + (", ..." if len(evidence) > 3 else "")
        reason = f"{len(evidence)} keys are flat parameters ({names})"
    return Problem(
        "flattened",
        f"these are FSDP1's flattened shards: {reason}. A slice of a flat parameter does not say which parameters, of "
        "which shapes, lie in it, and this version converts full and sharded checkpoints only: save again with "
        "FSDP.optim_state_dict or a FULL_STATE_DICT or SHARDED_STATE_DICT type, or convert the other section (--only)",
        file=file,
        key=key,
        section=section,
    )
