"""Finds the units of a model that is built on the meta device (``units --model``): FSDP1 itself wraps it.

The parameters are replaced by fake tensors, which have shapes and no memory, so FSDP1 runs without a GPU, ranks or
weights.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnsupportedError, UsageError, to_copy
from fsdpckpt.flags import Flag
from fsdpckpt.flat.live.modules import fsdp_modules, unit_param
from fsdpckpt.flat.live.save import units_of
from fsdpckpt.flat.units import module_pattern
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import flaws
from fsdpckpt.ir.units import Strategy, Units


def units_from_model(
    factory: str | Callable[[], nn.Module],
    wrap_classes: Sequence[str | type[nn.Module]],
    *,
    use_orig_params: bool,
    param_dtype: DType | None = None,
    strategy: Strategy = Strategy.FULL_SHARD,
    shard_size: int | None = None,
    ignored: Sequence[str] = (),
) -> Units:
    """The units of the model that ``factory`` (a callable or ``package.module:name``) makes, for any world size.

    Every module of ``wrap_classes`` is a unit, and the root, as under ``ModuleWrapPolicy`` and
    ``transformer_auto_wrap_policy``. ``ignored``: globs of the module paths and parameter names that FSDP ignores. With
    a ``param_dtype`` batch normalisations are separate units without it, as FSDP makes them. The factory is the
    caller's own code, and is run; the model that it makes is wrapped. Raises UsageError, SourceUnsupportedError for
    what FSDP1 cannot wrap.
    """
    classes = tuple(map(_module_class, wrap_classes))
    model = build_on_meta(factory)
    if fsdp_modules(model):
        raise UsageError(
            "this model is wrapped already",
            why="its units can be read from it",
            next_step="call save_units(model, optimizer, path) in the training script",
        )
    _require_classes(model, classes)
    ignored_params = _ignored_params(model, ignored)
    params = dict(model.named_parameters(remove_duplicate=False))
    wrapped = _units_as_wrapped(model, classes, ignored_params, param_dtype, use_orig_params=use_orig_params)
    positions = {name: position for position, name in enumerate(params)}

    def as_built(param: Parameter) -> Parameter:
        return unit_param(param.name, params[param.name])

    units = replace(
        wrapped,
        units=tuple(
            replace(unit, params=tuple(map(as_built, unit.params)), strategy=strategy) for unit in wrapped.units
        ),
        # With use_orig_params=False, FSDP forgets where the ignored parameters of a module are among the others.
        order=wrapped.order
        if use_orig_params
        else tuple(sorted(wrapped.order, key=lambda row: positions[wrapped.rows[row].name])),
        unmanaged=tuple(map(as_built, wrapped.unmanaged)),
        world_size=None,
        shard_size=shard_size,
    )
    _refuse([*_cannot_flatten(units)] or flaws(units))
    return units


def _units_as_wrapped(
    model: nn.Module,
    classes: tuple[type[nn.Module], ...],
    ignored: set[nn.Parameter],
    param_dtype: DType | None,
    *,
    use_orig_params: bool,
) -> Units:
    """The units of ``model`` after FSDP1 has wrapped it on 2 ranks, with parameters of ``float32``."""
    mixed = MixedPrecision(param_dtype=getattr(torch, param_dtype.name)) if param_dtype is not None else None
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fakes = _replace_by_fakes(model)
        try:
            wrapped = FullyShardedDataParallel(
                model,
                process_group=dist.ProcessGroup(0, 2),  # type: ignore[call-arg]  # rank 0 of 2, of no real ranks
                auto_wrap_policy=ModuleWrapPolicy(set(classes)),
                ignored_states=[fakes[param] for param in ignored] or None,  # type: ignore[arg-type]
                mixed_precision=mixed,
                use_orig_params=use_orig_params,
                device_id=torch.device("cpu"),
            )
        except ValueError as error:
            _refuse([str(error)])
        except AssertionError as error:
            _refuse([f"FSDP1 fails an assertion, as it does for a unit without elements: {error}"])
        if not fsdp_modules(wrapped):
            _refuse(["no parameter is left for any unit"])
        units = units_of(wrapped)
        for module in fsdp_modules(wrapped):
            vars(module.flat_param).clear()  # torch 2.4 prints a warning when it frees tensors in reference cycles
        return units


def _replace_by_fakes(model: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Replace every parameter and buffer, shared ones by one fake. Must run under ``FakeTensorMode``."""
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in fakes:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), device="cpu")
                    fakes[tensor] = nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake
                tensors[name] = fakes[tensor]  # type: ignore[assignment]
    return fakes


def _module_class(given: str | type[nn.Module]) -> type[nn.Module]:
    module_class = import_object(given, flags.wrap) if isinstance(given, str) else given
    if not isinstance(module_class, type) or not issubclass(module_class, nn.Module):
        raise UsageError(f"{given} is not an nn.Module class", next_step=f"{flags.wrap('package.module:Class')}")
    return module_class


def build_on_meta(factory: str | Callable[[], nn.Module]) -> nn.Module:
    """The model that ``factory`` makes under ``torch.device("meta")``: no memory, no weights."""
    make = import_object(factory, flags.model) if isinstance(factory, str) else factory
    if not callable(make):
        raise UsageError(f"{factory} is not callable", next_step=f"{flags.model('package.module:make_model')}")
    try:
        with torch.device("meta"):
            model = make()
    except (Exception, SystemExit) as error:  # the caller's own code, which may raise anything
        raise UsageError(
            f"{factory} did not make a model on the meta device: {type(error).__name__}: {error}",
            why="it is called without arguments under torch.device('meta'), where tensors have shapes and no values",
            next_step="give a function that only builds the model, or call save_units in the training script",
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{factory} did not return a torch.nn.Module",
            expected="a torch.nn.Module",
            found=type(model).__name__,
            next_step=f"{flags.model('package.module:make_model')}",
        )
    return model


def _require_classes(model: nn.Module, wrap_classes: Sequence[type[nn.Module]]) -> None:
    for module_class in wrap_classes:
        if not any(isinstance(module, module_class) for module in model.modules()):
            kinds = list(dict.fromkeys(f"{type(m).__module__}:{type(m).__qualname__}" for m in model.modules()))
            raise UsageError(
                f"the model has no module of class {module_class.__module__}:{module_class.__qualname__}",
                details=kinds,
                why="a class that is not there would leave its parameters in the root's unit; these are the classes",
                next_step=f"{flags.wrap} with the class that the training job wraps",
            )


def _ignored_params(model: nn.Module, globs: Sequence[str]) -> set[nn.Parameter]:
    """The parameters that the globs match, by their own names or in a module that is matched."""
    params: set[nn.Parameter] = set()
    for glob in globs:
        pattern = module_pattern(glob, flags.ignore)
        modules = [module for path, module in model.named_modules() if path and pattern.fullmatch(path)]
        single = [param for name, param in model.named_parameters(remove_duplicate=False) if pattern.fullmatch(name)]
        if not modules and not single:
            raise UsageError(
                f"{flags.ignore(glob)} matches no module and no parameter of this model",
                details=[path for path, _ in model.named_modules() if path],
                next_step=f"{flags.ignore('layers.*.adapter')}; * does not cross dots",
            )
        params.update(single, (param for module in modules for param in module.parameters()))
    return params


def _cannot_flatten(units: Units) -> Iterator[str]:
    for unit in units.units:
        first = unit.params[0]
        if not first.dtype.floating:
            yield f"{first.name} is {first.dtype.name}, and FSDP1 flattens only floats"
        for param in unit.params:
            if not param.shape:  # torch 2.4 accepts them
                yield f"{param.name} has no dimensions, which FSDP1 refuses"


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise SourceUnsupportedError(
            "FSDP1 would not wrap this model like this",
            details=wrong,
            why="the classes to wrap, use_orig_params or the dtype of the model are not those of the training script",
            next_step="give the same as the training script does, or call save_units there",
        )


def import_object(reference: str, option: Flag) -> object:
    """Import the object that ``package.module:name`` (or ``:Outer.name``) refers to. ``option`` is named in errors.

    Also searches the current directory, like ``python -m``. Raises UsageError.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise UsageError(
            f"{option} takes package.module:name, not {reference!r}", next_step=f"{option('package.module:name')}"
        )
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        target: object = import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything, or be a script
        raise UsageError(
            f"{option(reference)}: {module_name} could not be imported: {type(error).__name__}: {error}",
            why="it is imported as `python -m` would do from the current directory",
            next_step=to_copy("see where it fails", f"python -c 'import {module_name}'"),
        ) from error
    for word in name.split("."):
        if not hasattr(target, word):
            raise UsageError(f"{option(reference)}: there is no {word!r}", next_step=f"{option('package.module:name')}")
        target = getattr(target, word)
    return target
