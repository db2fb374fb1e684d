"""Named sections: the models and optimizers beside the main ones, or all of several of which none is the main one.

A named section is converted like the only one: as a checkpoint of its own (``alone``), by the same code. Writers find
it among the extras (``in_extras``), under the keys that it had in the source.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, NamedSection
from fsdpckpt.ir.frame import Frame, placed
from fsdpckpt.ir.names import clean, equal_at_start, without_module
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.values import Key, Value, leaf_tensors

# What says only that something is a model or an optimizer, not which one.
_KINDS = frozenset({
    "model", "models", "state_dict", "model_state_dict", "module", "model_state", "net", "network", "weights", "state",
    "optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "opt",
    "optimizer_states",
})  # fmt: skip


def section_names(paths: Sequence[tuple[Key, ...]]) -> list[str]:
    """A name for the section at each of ``paths``, all models or all optimizers: the keys that say which one it is.

    All keys joined by dots where the rest would be empty, a number, or the name of two.
    """
    short: list[str] = []
    for path in paths:
        telling = [str(key) for key in path if key not in _KINDS]
        short.append(".".join(telling))
    names: list[str] = []
    for path, name in zip(paths, short, strict=True):
        tells = bool(name) and not name.replace(".", "").isdigit() and short.count(name) == 1
        names.append(name if tells else ".".join(map(str, path)) or "''")
    return names


def alone(checkpoint: Checkpoint, named: NamedSection) -> Checkpoint:
    """``named`` as the only section of its kind. An optimizer comes with the model that it updates, which says what its
    ids mean. Extras, notes and problems stay behind. Units of its own, or that record its groups under its name, say
    all of its ids: no other optimizer is asked.
    """
    model, optim = (named.content, None) if isinstance(named.content, ModelState) else (None, named.content)
    if optim is not None:
        model = model_of(checkpoint, named)
    nesting = dict(checkpoint.origin.nesting)
    nesting.pop(named.section, None)
    origin = replace(checkpoint.origin, nesting={**nesting, named.section: named.path})
    own = named.units
    if optim is not None and own is None and checkpoint.units is not None:
        own = checkpoint.units.of_optimizer([named.name])
    if named.units is not None and origin.manifest is not None:
        origin = replace(origin, units_from=origin.manifest.path)
    ledger = replace(checkpoint.ledger, problems=(), notes=())
    return replace(
        checkpoint,
        origin=origin,
        model=model,
        optim=optim,
        extra={},
        rank_extra=(),
        named=(),
        beside=_beside(checkpoint, model, optim) if own is None else (),
        units=checkpoint.units if own is None else own,
        ledger=ledger,
    )


def main_alone(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` without its named sections."""
    if not checkpoint.named:
        return checkpoint
    return replace(checkpoint, named=(), beside=_beside(checkpoint, checkpoint.model, checkpoint.optim))


def _beside(checkpoint: Checkpoint, model: ModelState | None, optim: Optimizer | None) -> tuple[Optimizer, ...]:
    """The optimizers of ``model``, which a checkpoint may lack, other than ``optim``."""
    if optim is None and model is None:
        return ()
    named = [each for each in checkpoint.named if isinstance(each.content, Optimizer)]
    others = [each.content for each in named if model_of(checkpoint, each) is model]
    main = checkpoint.optim if model is checkpoint.model else None
    return tuple(other for other in (main, *others) if isinstance(other, Optimizer) and other is not optim)


def model_of(checkpoint: Checkpoint, optimizer: NamedSection) -> ModelState | None:
    """The model that ``optimizer`` updates: the only one, else the one that has all of its names, or shares most of its
    outer containers, or has a key in common with its path (``critic`` and ``critic_optimizer``), or its number; else
    the main one, None without any or where its ids fit another one as well.
    """
    others = [named for named in checkpoint.named if isinstance(named.content, ModelState)]
    listed = [((), checkpoint.model), *((named.path, named.content) for named in others)]
    candidates = [(path, content) for path, content in listed if isinstance(content, ModelState)]
    optim = optimizer.content
    if len(candidates) > 1 and isinstance(optim, Optimizer) and optim.key_type == "name":
        keys = [clean(str(key)) for key in optim.keys]
        with_names = [each for each in candidates if _are_names_of(keys, list(map(clean, each[1].params)))]
        candidates = with_names or candidates
    if len(candidates) > 1:
        beside = [equal_at_start(each[0][:-1], optimizer.path[:-1]) for each in candidates]  # outer containers
        closest = [each for each, keys in zip(candidates, beside, strict=True) if keys == max(beside) > 0]
        if len(closest) == 1:  # ``{"stages": {0: {"model": ..., "optimizer": ...}, 1: ...}}``
            return closest[0][1]
        near = [each for each in candidates if _alike(each[0], optimizer.path)]
        near = [each for each in near if not any(_is_more_exact(path, each[0]) for path, _ in near)]
        numbered = [each for each in candidates if _number(each[0]) == _number(optimizer.path) is not None]
        main = [each for each in candidates if not each[0]]
        if main and _may_update_another(checkpoint, optimizer, main[0][1]):
            main = []
        candidates = next((found for found in (near, numbered) if len(found) == 1), main)
    return candidates[0][1] if candidates else None


def _may_update_another(checkpoint: Checkpoint, optimizer: NamedSection, main: ModelState) -> bool:
    """Whether ``optimizer``, whose keys and ids name no model, may be that of another one than ``main``: it has states
    in the shapes of all parameters of that one, which the keys of no optimizer name.
    """
    optim = optimizer.content
    if not isinstance(optim, Optimizer) or optim.key_type == "name" or all(key in _KINDS for key in optimizer.path):
        return False
    of_optimizers = [named.path for named in checkpoint.named if isinstance(named.content, Optimizer)]
    names = set(map(clean, main.params))
    shapes = Counter(_largest_shape(each.values()) for each in optim.state.values())
    for named in checkpoint.named:
        other = named.content
        if not isinstance(other, ModelState) or any(_alike(named.path, path) for path in of_optimizers):
            continue
        fits = Counter(_largest_shape([leaf]) for leaf in other.params.values()) == shapes
        if fits and set(map(clean, other.params)) != names:
            return True
    return False


def _largest_shape(values: Iterable[Value]) -> tuple[int, ...]:
    """The shape of a parameter, or that of its states: a step has no dimensions."""
    return max((leaf.shape for value in values for _, leaf in leaf_tensors(value)), key=len, default=())


def _are_names_of(keys: Sequence[str], names: Sequence[str]) -> bool:
    """Whether ``keys`` are among ``names``. One of both may be from before DistributedDataParallel."""
    return set(without_module(keys, names)) <= set(without_module(names, keys))


def _number(path: Sequence[Key]) -> int | None:
    """The number that the last of the keys ends with: accelerate numbers models and their optimizers alike."""
    match = re.search(r"\d+$", str(path[-1])) if path else None
    return None if match is None else int(match[0])


def _alike(model: Iterable[Key], optimizer: Iterable[Key]) -> bool:
    """Whether a key that says which model it is stands in a key of the optimizer too, or all words of it do:
    ``critic_model`` and ``critic_optimizer``.
    """
    keys = [str(key) for key in model if key not in _KINDS]
    others = [_words(str(key)) for key in optimizer if key not in _KINDS]
    return any(key in "_".join(words) or set(_words(key)) <= set(words) for key in keys for words in others)


def _words(key: str) -> list[str]:
    """The words in ``key``, without those that say only that it is a model or an optimizer if there are others."""
    words = key.split("_")
    return [word for word in words if word not in _KINDS] or words


def _is_more_exact(model: Iterable[Key], other: Iterable[Key]) -> bool:
    """Whether ``model`` says all that ``other`` says, and more: ``actor_ref`` is not ``actor``."""
    return _alike(other, model) and not _alike(model, other)


def optimizers(checkpoint: Checkpoint) -> list[Optimizer]:
    """The main optimizer, if there is one, and the named ones."""
    contents = [checkpoint.optim, *(named.content for named in checkpoint.named)]
    return [content for content in contents if isinstance(content, Optimizer)]


def with_each_optimizer(
    checkpoint: Checkpoint, change: Callable[[Checkpoint, NamedSection | None], Checkpoint]
) -> Checkpoint:
    """``checkpoint`` with every optimizer as ``change`` makes it of a checkpoint that has no other one, and of its
    named section, None for the main one.
    """
    named: list[NamedSection] = []
    for section in checkpoint.named:
        changed = None
        if isinstance(section.content, Optimizer):
            changed = change(alone(checkpoint, section), section).optim
        named.append(section if changed is None else replace(section, content=changed))
    main = replace(checkpoint, beside=main_alone(checkpoint).beside)
    return replace(change(main, None), named=tuple(named), beside=checkpoint.beside)


def model_dict(model: ModelState) -> dict[Key, Value]:
    """The state dict that ``nn.Module.load_state_dict`` takes, with ``_metadata`` if the source had it."""
    if model.metadata is None:
        return model.params  # type: ignore[return-value]  # a dict of str is one of Key
    params: OrderedDict[Key, Value] = OrderedDict(model.params)
    vars(params)["_metadata"] = model.metadata
    return params


def optimizer_dict(optim: Optimizer) -> dict[Key, Value]:
    """The dict that ``Optimizer.load_state_dict`` takes, with the entries that users added."""
    root: dict[Key, Value] = {"state": optim.stored_state()}  # type: ignore[dict-item]
    if optim.param_groups is not None:
        root["param_groups"] = optim.param_groups  # type: ignore[assignment]
    return {**root, **optim.extra}


def state_dict_of(named: NamedSection) -> Value:
    """The state dict that ``load_state_dict`` takes."""
    content = named.content
    return model_dict(content) if isinstance(content, ModelState) else optimizer_dict(content)


def in_extras(
    extra: Mapping[Key, Value],
    named: Iterable[NamedSection],
    frame: Frame,
    state_dict_of: Callable[[NamedSection], Value] = state_dict_of,
) -> dict[Key, Value]:
    """``extra`` with the ``named`` sections at their places, in the containers of ``frame``. ``state_dict_of``: what is
    written of each.
    """
    root: Value = dict(extra)
    for section in named:
        root = placed(root, section.path, state_dict_of(section), frame)
    return root if isinstance(root, dict) else {}
