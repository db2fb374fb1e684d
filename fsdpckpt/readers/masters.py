"""Ties the master weights of a mixed-precision wrapper around an optimizer to the parameters of the model.

Such a wrapper saves ``{<masters>: [[tensor, ...], ...], <inner>: optimizer.state_dict(), ...}``: a list for each param
group, with the float32 weight of each parameter that the model holds in another dtype, in the order of the group.
DeepSpeed's ``FP16_UnfusedOptimizer`` (ZeRO 0 in fp16 or bf16), Megatron-LM's ``Float16OptimizerWithFloat16Params`` and
apex's ``FP16_Optimizer`` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note, Problem, Section, group_params
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, value_at, without
from fsdpckpt.readers.optimizer_forms import notes_on_copies
from fsdpckpt.readers.protocol import dotted
from fsdpckpt.transform.rekey import apply_key_type

_MASTERS = ("fp32_groups", "fp32_from_fp16_params", "fp32_from_fp16_groups", "fp32_from_fp16")
_MASTER_DTYPE = "float32"


def with_masters(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with the optimizer's master weights as its trained parameters, if a wrapper holds them.

    Masters that nothing ties to parameters stay extras, with a note; those of other shapes are a fatal problem.
    """
    found = _masters(checkpoint)
    if found is None or checkpoint.model is None:
        return checkpoint
    path, groups = found
    names = _member_names(checkpoint)
    pairs = _pairs(names, groups, checkpoint.model) if names is not None else None
    if pairs is None:
        message = (
            f"{dotted(path)} holds the optimizer's {_MASTER_DTYPE} weights, and nothing says whose they are: they stay "
            "an extra, and the model has the copies that it computed with"
        )
        return replace(checkpoint, notes=(*checkpoint.notes, Note("master-weights", message, dotted(path))))
    params = checkpoint.model.params
    misfits = [
        Problem(
            "state",
            f"model {name} is {list(copy.shape)}, and its master weight in {dotted(path)} is {list(master.shape)}",
            key=name,
            section=Section.MODEL,
        )
        for name, copy, master in pairs
        if copy.shape != master.shape
    ]
    if misfits:
        return replace(checkpoint, problems=(*checkpoint.problems, *misfits))
    masters = {_place(copy): master for _, copy, master in pairs}
    changed: dict[str, Tensor | Value] = {}
    copies: set[str] = set()
    for name, leaf in params.items():  # also the other names of a parameter
        master = masters.get(_place(leaf)) if isinstance(leaf, Tensor) else None
        changed[name] = leaf
        if isinstance(leaf, Tensor) and master is not None:
            copies |= {leaf.dtype.name} - {master.dtype.name}
            changed[name] = master if leaf.sharded is None else master.with_sharded(leaf.sharded)
    checkpoint = replace(
        checkpoint,
        model=ModelState(changed, checkpoint.model.metadata),
        notes=(*checkpoint.notes, *notes_on_copies(copies)),
    )
    return checkpoint.with_extras(lambda extra: _without(extra, path))


def _without(extra: dict[Key, Value], path: tuple[Key, ...]) -> dict[Key, Value]:
    rest = without(extra, path, prune=True)
    return rest if isinstance(rest, dict) else {}


def _masters(checkpoint: Checkpoint) -> tuple[tuple[Key, ...], list[list[Tensor]]] | None:
    """The place among the extras of master weights beside the optimizer, and the weights by param group."""
    place = checkpoint.nesting.get(Section.OPTIM, ())[:-1]
    try:
        wrapper = value_at(checkpoint.extra, place) if place else None
    except (KeyError, IndexError, TypeError):
        return None
    if not isinstance(wrapper, dict):
        return None
    for key in _MASTERS:
        groups = wrapper.get(key)
        if isinstance(groups, (list, tuple)) and groups and all(isinstance(group, (list, tuple)) for group in groups):
            tensors = [[leaf for leaf in group if isinstance(leaf, Tensor)] for group in groups]
            if list(map(len, tensors)) == list(map(len, groups)) and any(tensors):
                return (*place, key), tensors
    return None


def _member_names(checkpoint: Checkpoint) -> list[list[str]] | None:
    """The names of the parameters of each group, in its order; None if nothing proves them."""
    try:
        named = apply_key_type(checkpoint, "name", units=None, reference=None, parameters=None, buffers=())
    except FsdpckptError:  # rekeying for the target asks again, and says what is missing
        return None
    optim = named.optim
    if optim is None or optim.param_groups is None:
        return None
    groups = [group_params(group) for group in optim.param_groups]
    return [[str(key) for key in keys] for keys in groups if keys is not None]


def _pairs(
    names: Sequence[Sequence[str]], groups: Sequence[Sequence[Tensor]], model: ModelState
) -> list[tuple[str, Tensor, Tensor]] | None:
    """Each parameter with its copy in the model and its master; None if they are not as many.

    A wrapper keeps no master of a parameter that is float32 itself.
    """
    keys = {clean(name): name for name in model.params}
    copies: Mapping[str, Tensor] = {
        name: leaf for name, key in keys.items() if isinstance(leaf := model.params[key], Tensor)
    }
    if len(names) != len(groups) or any(clean(name) not in copies for group in names for name in group):
        return None
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for members, masters in zip(names, groups, strict=True):
        of_group = [clean(name) for name in members]
        if len(of_group) != len(masters):
            of_group = [name for name in of_group if copies[name].dtype.name != _MASTER_DTYPE]
        if len(of_group) != len(masters):
            return None
        pairs += [(keys[name], copies[name], master) for name, master in zip(of_group, masters, strict=True)]
    return pairs


def _place(tensor: Tensor) -> tuple[bytes, bytes, tuple[int, ...]]:
    """Where its bytes are: tied parameters share them."""
    return tensor.chunks.file.tobytes(), tensor.chunks.offset.tobytes(), tensor.shape
