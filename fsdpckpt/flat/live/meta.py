"""``units --model``: the units of a model that is built, on the meta device, and never wrapped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from fsdpckpt.errors import SourceUnsupportedError, UsageError
from fsdpckpt.flat.live.importing import imported
from fsdpckpt.flat.live.strides import dtype_of, flattens_in_memory_order, stride_of
from fsdpckpt.flat.live.wrapping import Wrapping
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.units import Strategy, Unit, UnitParam, Units, flaws

__all__ = ["built", "units_from_model", "units_of_unwrapped"]


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
    ``transformer_auto_wrap_policy``. ``ignored``: globs of module paths and parameter names that FSDP was told to
    ignore. With a ``param_dtype`` normalisations over batches are units of their own, without it, as FSDP makes them.
    The factory is the caller's own code, and is run. Raises UsageError.
    """
    classes = [_module_class(one) for one in wrap_classes]
    return units_of_unwrapped(
        built(factory),
        classes,
        use_orig_params=use_orig_params,
        param_dtype=param_dtype,
        strategy=strategy,
        shard_size=shard_size,
        ignored=ignored,
    )


def _module_class(given: str | type[nn.Module]) -> type[nn.Module]:
    found = imported(given, "--wrap") if isinstance(given, str) else given
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise UsageError(f"{given} is no module class", next_step="--wrap package.module:Class")
    return found


def built(factory: str | Callable[[], nn.Module]) -> nn.Module:
    """The model that ``factory`` makes under ``torch.device("meta")``: no memory, no weights."""
    make = imported(factory, "--model") if isinstance(factory, str) else factory
    if not callable(make):
        raise UsageError(f"{factory} is nothing that can be called", next_step="--model package.module:make_model")
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
            f"{factory} made no torch.nn.Module",
            expected="a torch.nn.Module",
            found=type(model).__name__,
            next_step="--model package.module:make_model",
        )
    return model


def units_of_unwrapped(
    model: nn.Module,
    wrap_classes: Sequence[type[nn.Module]],
    *,
    use_orig_params: bool,
    param_dtype: DType | None = None,
    strategy: Strategy = Strategy.FULL_SHARD,
    shard_size: int | None = None,
    ignored: Sequence[str] = (),
) -> Units:
    """The units that FSDP1 would make of ``model``, which stays as it is; see ``units_from_model``."""
    _refuse_wrapped(model)
    modules, params = _ignored(model, ignored)
    batch_norms = _left_out(model, modules) if param_dtype is not None else set()
    chosen = {
        id(module)
        for module in model.modules()
        if id(module) in batch_norms or (isinstance(module, tuple(wrap_classes)) and id(module) not in modules)
    }
    _require_found(model, wrap_classes)
    wrapping = Wrapping(model, use_orig_params, params)
    wrapping.run(chosen)
    parameters = list(wrapping.parameters())
    units = tuple(
        Unit(
            unit.prefix,
            tuple(_param(name, param) for name, param in unit.params),
            strategy,
            None if id(unit.module) in batch_norms and unit.prefix else param_dtype,
        )
        for unit in wrapping.units
    )
    managed = {param.name for unit in units for param in unit.params}
    found = Units(
        units=units,
        use_orig_params=use_orig_params,
        parameters=tuple(name for name, _ in parameters),
        unmanaged=tuple(_param(name, param) for name, param in parameters if name not in managed),
        shared=_shared(wrapping, parameters, managed, use_orig_params=use_orig_params),
        shard_size=shard_size,
    )
    _check(found)
    return found


def _shared(
    wrapping: Wrapping, parameters: list[tuple[str, nn.Parameter]], managed: set[str], *, use_orig_params: bool
) -> tuple[tuple[str, str], ...]:
    listed = {name for name, _ in parameters if use_orig_params or name not in managed}
    found = dict(wrapping.shared)
    for later, first in wrapping.aliases(listed):
        found.setdefault(later, first)
    return tuple(found.items())


def _refuse_wrapped(model: nn.Module) -> None:
    from fsdpckpt.flat.live.states import managed_modules

    if managed_modules(model):
        raise UsageError(
            "this model is wrapped already",
            why="its units can be read from it",
            next_step="call save_units(model, optimizer, path) in the training script",
        )


def _require_found(model: nn.Module, wrap_classes: Sequence[type[nn.Module]]) -> None:
    for one in wrap_classes:
        if not any(isinstance(module, one) for module in model.modules()):
            kinds = list(dict.fromkeys(f"{type(m).__module__}:{type(m).__qualname__}" for m in model.modules()))
            raise UsageError(
                f"the model has no module of class {one.__module__}:{one.__qualname__}",
                details=kinds,
                why="a class that is not there would leave its parameters in the root's unit; these are the classes",
                next_step="--wrap with the class that FSDP was told to wrap",
            )


def _left_out(model: nn.Module, ignored: Collection[int]) -> set[int]:
    """Modules that ``MixedPrecision._module_classes_to_ignore`` wraps on their own (its default)."""
    return {
        id(module)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and id(module) not in ignored
    }


def _ignored(model: nn.Module, globs: Sequence[str]) -> tuple[set[int], set[int]]:
    """(modules, parameters), by identity, that the globs name: a module with everything below it."""
    modules: set[int] = set()
    params: set[int] = set()
    for glob in globs:
        below = [module for path, module in model.named_modules() if path and _matches(path, glob)]
        single = [param for name, param in model.named_parameters(remove_duplicate=False) if _matches(name, glob)]
        if not below and not single:
            raise UsageError(
                f"--ignore {glob} matches no module and no parameter of this model",
                details=[path for path, _ in model.named_modules() if path],
                next_step="--ignore 'layers.*.adapter'; * does not cross dots",
            )
        modules |= {id(child) for module in below for child in module.modules()}
        params |= {id(param) for param in [*single, *(param for module in below for param in module.parameters())]}
    return modules, params


def _matches(path: str, glob: str) -> bool:
    words, globs = path.split("."), glob.split(".")
    return len(words) == len(globs) and all(fnmatchcase(word, one) for word, one in zip(words, globs, strict=True))


def _param(name: str, param: nn.Parameter) -> UnitParam:
    shape = tuple(param.shape)
    row_major = param.is_contiguous() or not flattens_in_memory_order()
    stride = None if row_major else stride_of(shape, tuple(param.stride()))
    return UnitParam(name, shape, dtype_of(param.dtype), stride, param.requires_grad)


def _check(units: Units) -> None:
    wrong = list(_refused(units)) or flaws(units)
    if wrong:
        raise SourceUnsupportedError(
            "FSDP1 would not wrap this model so",
            details=wrong,
            why="the classes to wrap, use_orig_params or the dtype of the model are not those of the training script",
            next_step="give the same as the training script does, or call save_units there",
        )


def _refused(units: Units) -> Iterator[str]:
    if not units.units:
        yield "no parameter is left for any unit"
    for unit in units.units:
        yield from (
            f"{p.name} is {p.dtype.name}, and FSDP1 flattens only floats"
            for p in unit.params[:1]
            if not p.dtype.floating
        )
        yield from (f"{p.name} has no dimensions, which FSDP1 refuses" for p in unit.params if not p.shape)
