"""Compares the shape of every optimizer state with that of its parameter, as soon as both have been read.

A shape stands in two places, and each can be wrong alone: a shard of the model is missing, a rank saved what it holds
of a tensor as if it were the tensor, or files of two jobs were mixed. ``ir.state_shapes`` knows which states show a
parameter's shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from fsdpckpt.ir.adapters import without_adapter
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, ModelState, Problem, Section
from fsdpckpt.ir.files import path_of
from fsdpckpt.ir.names import clean, without_module
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.placements import OneSlice, Slices
from fsdpckpt.ir.sections import model_of
from fsdpckpt.ir.state_shapes import Shape, ShownShapes, is_part, may_mirror
from fsdpckpt.ir.tensors import Tensor


def misshapen_states(checkpoint: Checkpoint) -> Iterator[Problem]:
    """A fatal problem for each parameter of which a state has another shape.

    Its section is the one that has too few elements; None if that cannot be said. Ids without names are compared with
    all parameters of all models, unless they may be slices of flat parameters: all states are vectors, or the layout is
    flattened. An optimizer beside the main one is compared with the model that has all of its names.
    """
    named_models = [named.content for named in checkpoint.named if isinstance(named.content, ModelState)]
    models = [*([checkpoint.model] if checkpoint.model is not None else []), *named_models]
    shapes = {param.shape for model in models for param in _comparable(model).values()}
    if checkpoint.optim is not None:
        yield from _of_optimizer(checkpoint, checkpoint.optim, checkpoint.model, shapes)
    for named in checkpoint.named:
        if isinstance(named.content, Optimizer):
            model = model_of(checkpoint, named)
            for problem in _of_optimizer(checkpoint, named.content, model, shapes):
                key = f"{named.dotted}.{problem.key}" if problem.section is Section.OPTIM else problem.key
                yield replace(problem, message=f"{named.label}: {problem.message}", key=key)


def _of_optimizer(
    checkpoint: Checkpoint, optim: Optimizer, model: ModelState | None, shapes: Collection[Shape]
) -> Iterator[Problem]:
    """``model``: the one that has its names; ``shapes``: those of the parameters of all models."""
    names = param_keys(model.params, optim) if model is not None else {}
    if model is not None:
        yield from _by_name(checkpoint, model, optim)
    if checkpoint.layout is not Layout.FLATTENED:
        unnamed = [key for key in optim.state if isinstance(key, int) and key not in names]
        # One rank holds FSDP1's flat parameters whole: vectors, each in place of several parameters.
        fewer = model is None or len(optim.keys) < len(_comparable(model))
        yield from _unmatched_ids(unnamed, ShownShapes(optim), shapes, may_be_flat=fewer)


def _by_name(checkpoint: Checkpoint, model: ModelState, optim: Optimizer) -> Iterator[Problem]:
    params = _comparable(model)
    names = param_keys(model.params, optim)
    shown = ShownShapes(optim)
    for key in optim.state:
        name = names.get(key)
        param = params.get(name) if name is not None else None
        if name is None or param is None:
            continue
        for state, shape in shown.mirrored(key):
            if not may_mirror(state, shape, param.shape):
                yield _of_one(checkpoint, name, param, f"{key}.{state}", shape)
                break  # one problem for each parameter: its other states say the same


def _comparable(model: ModelState) -> dict[str, Tensor]:
    """The tensors that may have states, and whose shape is a parameter's: no slices, no integers."""
    return {
        name: leaf
        for name, leaf in model.params.items()
        if isinstance(leaf, Tensor)
        and not isinstance(leaf.cut, (Slices, OneSlice))
        and leaf.dtype.kind in ("float", "complex")
    }


def param_keys(model_keys: Collection[str], optim: Optimizer) -> dict[ParamKey, str]:
    """The model key of each key of ``optim`` for which names say it: the key itself, or its name in ``param_names``.

    Prefixes of wrappers and the name of an adapter do not count. A name that stands for two keys, or that the model
    lacks, is left out.
    """
    names: dict[ParamKey, str] = {key: clean(key) for key in optim.all_keys() if isinstance(key, str)}
    for group, keys in zip(optim.groups or (), optim.in_groups(), strict=False):
        words = group.words()
        if len(words) == len(keys):
            pairs = zip(keys, words, strict=True)
            names.update({key: clean(word) for key, word in pairs if isinstance(key, int) and isinstance(word, str)})
    in_model = [clean(key) for key in model_keys]
    in_optim = without_module(names.values(), in_model)
    in_model = list(without_module(in_model, list(names.values())))
    in_optim = without_adapter(in_optim, in_model)
    by_name = _unique(in_model, model_keys)
    return {key: by_name[name] for key, name in zip(names, in_optim, strict=True) if name in by_name}


def _unique(names: Iterable[str], keys: Iterable[str]) -> Mapping[str, str]:
    """Each name with its key, without those that several keys have."""
    pairs = list(zip(names, keys, strict=True))
    times = Counter(name for name, _ in pairs)
    return {name: key for name, key in pairs if times[name] == 1}


def _of_one(checkpoint: Checkpoint, name: str, param: Tensor, state: str, shape: Shape) -> Problem:
    held = "each rank holds" if len(param.chunks) > 1 and not param.sharded else "its shape is"
    message = f"model {name}: {held} {list(param.shape)}, and optim {state} has the shape {list(shape)}"
    section = _short_section([param.shape], shape)
    key = state if section is Section.OPTIM else name
    return Problem("shape", message, key=key, file=_first_file(checkpoint, param), section=section)


def _first_file(checkpoint: Checkpoint, tensor: Tensor) -> str | None:
    numbers: list[int] = tensor.chunks.file[:1].tolist()
    return path_of(checkpoint.files, numbers[0]) if numbers else None


def _short_section(params: Iterable[Shape], state: Shape) -> Section | None:
    """The section whose tensor can be a part of the other's; None if both can, or neither."""
    shapes = list(params)
    of_model = any(is_part(shape, state) for shape in shapes)
    of_optim = any(is_part(state, shape) for shape in shapes)
    if of_model is of_optim:
        return None
    return Section.MODEL if of_model else Section.OPTIM


def _unmatched_ids(
    keys: Iterable[ParamKey], shown: ShownShapes, shapes: Collection[Shape], *, may_be_flat: bool
) -> Iterator[Problem]:
    """A problem for each of the ids ``keys`` with a state that fits no tensor of the model at all.

    ``may_be_flat``: whether a vector may be the state of a flat parameter.
    """
    mirrored = {key: list(shown.mirrored(key)) for key in keys}
    if not shapes or all(len(shape) < 2 for states in mirrored.values() for _, shape in states):
        return
    for key, states in mirrored.items():
        for state, shape in states:
            if may_be_flat and len(shape) == 1:
                continue
            if shape not in shapes and not any(may_mirror(state, shape, other) for other in shapes):
                message = f"optim {key}.{state} has the shape {list(shape)}, which no tensor of the model has"
                yield Problem("shape", message, key=f"{key}.{state}", section=_short_section(shapes, shape))
                break
