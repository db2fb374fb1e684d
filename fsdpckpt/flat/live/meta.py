"""Finds the units of a model that is built on the meta device and never wrapped (``units --model``).

Follows ``torch/distributed/fsdp``: ``wrap._post_order_apply`` and ``ModuleWrapPolicy`` (which modules, in which order),
``_init_utils._get_orig_params`` (which parameters are left for a unit), and
``FlatParamHandle._init_flat_param_and_metadata`` (their order, and shared ones).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module

import torch
from torch import nn

from fsdpckpt.errors import SourceUnsupportedError, UsageError, to_copy
from fsdpckpt.flat.live import unit_param
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.names import joined
from fsdpckpt.ir.units import Strategy, Unit, Units, flaws


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
    caller's own code, and is run. Raises UsageError.
    """
    classes = tuple(_module_class(one) for one in wrap_classes)
    model = build_on_meta(factory)
    _refuse_wrapped(model)
    modules, params = _ignored(model, ignored)
    # With a param_dtype these are wrapped on their own (``MixedPrecision._module_classes_to_ignore``, its default).
    norms = (nn.modules.batchnorm._BatchNorm,) if param_dtype is not None else ()
    chosen = {module for module in model.modules() if isinstance(module, (*classes, *norms)) and module not in modules}
    _require_found(model, classes)
    wrapping = SimulatedWrapping(model, use_orig_params, params)
    wrapping.run(chosen)
    parameters = list(wrapping.parameters())
    units = tuple(
        Unit(
            unit.prefix,
            tuple(unit_param(name, param) for name, param in unit.params),
            strategy,
            None if isinstance(unit.module, norms) and unit.prefix else param_dtype,
        )
        for unit in wrapping.units
    )
    in_units = {param.name for unit in units for param in unit.params}
    listed = {name for name, _ in parameters if use_orig_params or name not in in_units}
    shared = dict(wrapping.shared)
    for later, first in wrapping.aliases(listed):
        shared.setdefault(later, first)
    made = Units(
        units=units,
        use_orig_params=use_orig_params,
        parameters=tuple(name for name, _ in parameters),
        unmanaged=tuple(unit_param(name, param) for name, param in parameters if name not in in_units),
        shared=tuple(shared.items()),
        shard_size=shard_size,
    )
    _check(made)
    return made


def _module_class(given: str | type[nn.Module]) -> type[nn.Module]:
    module_class = import_object(given, "--wrap") if isinstance(given, str) else given
    if not isinstance(module_class, type) or not issubclass(module_class, nn.Module):
        raise UsageError(f"{given} is not an nn.Module class", next_step="--wrap package.module:Class")
    return module_class


def build_on_meta(factory: str | Callable[[], nn.Module]) -> nn.Module:
    """The model that ``factory`` makes under ``torch.device("meta")``: no memory, no weights."""
    make = import_object(factory, "--model") if isinstance(factory, str) else factory
    if not callable(make):
        raise UsageError(f"{factory} is not callable", next_step="--model package.module:make_model")
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
            next_step="--model package.module:make_model",
        )
    return model


def _refuse_wrapped(model: nn.Module) -> None:
    from fsdpckpt.flat.live import fsdp_modules

    if fsdp_modules(model):
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
                next_step="--wrap with the class that the training job wraps",
            )


def _ignored(model: nn.Module, globs: Sequence[str]) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """(modules, parameters) that the globs match: a module with everything below it."""
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    for glob in globs:
        below = [module for path, module in model.named_modules() if path and _matches(path, glob)]
        single = [param for name, param in model.named_parameters(remove_duplicate=False) if _matches(name, glob)]
        if not below and not single:
            raise UsageError(
                f"--ignore {glob} matches no module and no parameter of this model",
                details=[path for path, _ in model.named_modules() if path],
                next_step="--ignore 'layers.*.adapter'; * does not cross dots",
            )
        modules.update(child for module in below for child in module.modules())
        params.update(single, (param for module in below for param in module.parameters()))
    return modules, params


def _matches(path: str, glob: str) -> bool:
    words, globs = path.split("."), glob.split(".")
    return len(words) == len(globs) and all(fnmatchcase(word, one) for word, one in zip(words, globs, strict=True))


def _check(units: Units) -> None:
    wrong = list(_refused(units)) or flaws(units)
    if wrong:
        raise SourceUnsupportedError(
            "FSDP1 would not wrap this model like this",
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


Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class WrappedUnit:
    """One unit: the FQN of its module, its parameters in flattened order, and further names (later, first) of them."""

    prefix: str
    module: nn.Module
    params: Named
    shared: list[tuple[str, str]]


@dataclass(slots=True)
class SimulatedWrapping:
    """A model during wrapping. ``params``: the parameters that each module still has, in its own order.

    With ``use_orig_params=True`` flattened parameters stay where they are and are not flattened again; otherwise they
    are gone from the unit's modules, and a parameter shared with a module outside is flattened there once more.
    """

    model: nn.Module
    use_orig_params: bool
    ignored: AbstractSet[nn.Parameter]
    params: dict[nn.Module, Named] = field(init=False)
    units: list[WrappedUnit] = field(init=False, default_factory=list)
    shared: list[tuple[str, str]] = field(init=False, default_factory=list)
    names: dict[tuple[nn.Module, str], str] = field(init=False, default_factory=dict)
    """(module, name in it) of each flattened parameter to its FQN."""
    _done: set[nn.Parameter] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.params = {module: _params_of(module) for module in self.model.modules()}

    def run(self, chosen: Collection[nn.Module]) -> None:
        """Wrap the modules ``chosen``, children before parents, the root last and always."""
        modules: list[tuple[str, nn.Module]] = []
        _post_order(self.model, "", modules, {self.model})
        for prefix, module in modules:
            if module is self.model or module in chosen:
                self._wrap(prefix, module)
        # Found children first, and listed as model.parameters() lists flat parameters: parents first.
        places = {prefix: number for number, (prefix, _) in enumerate(self.model.named_modules())}
        self.units.sort(key=lambda unit: places[unit.prefix])
        self.shared = [pair for unit in self.units for pair in unit.shared]

    def _wrap(self, prefix: str, root: nn.Module) -> None:
        in_units = {
            param
            for module in root.modules()
            for _, param in self.params[module]
            if param not in self.ignored and param not in self._done
        }
        if not in_units:
            return
        first: dict[nn.Parameter, str] = {}
        unit = WrappedUnit(prefix, root, [], [])
        touched: dict[tuple[nn.Module, str], nn.Parameter] = {}
        again: dict[tuple[nn.Module, str], nn.Parameter] = {}
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for name, param in self.params[module]:
                if param not in in_units:
                    continue
                if param in first:
                    unit.shared.append((joined(path, name), first[param]))
                    again[module, name] = param
                    continue
                first[param] = joined(path, name)
                unit.params.append((joined(path, name), param))
                self.names[module, name] = joined(path, name)
                touched[module, name] = param
        self.units.append(unit)
        self._done |= in_units if self.use_orig_params else set()
        self._register(touched | again)

    def _register(self, touched: dict[tuple[nn.Module, str], nn.Parameter]) -> None:
        """What flattening does to the modules' own parameters (``_safe_setattr_tensor_or_param``): each is deleted,
        and with ``use_orig_params=True`` set again, which puts it last."""
        for (module, name), param in touched.items():
            self.params[module] = [one for one in self.params[module] if one[0] != name]
            if self.use_orig_params:
                self.params[module].append((name, param))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """``model.named_parameters()``: of the wrapped model with ``use_orig_params=True``, else of the original."""
        known = {param: name for unit in self.units for name, param in unit.params} if self.use_orig_params else {}
        seen: set[nn.Parameter] = set()
        for path, module in self.model.named_modules():
            params = self.params[module] if self.use_orig_params else _params_of(module)
            left = {param for _, param in self.params[module]}
            for name, param in params:
                flattened_name = self.names.get((module, name))
                if not self.use_orig_params and flattened_name is not None:
                    yield flattened_name, param
                elif param in left and param not in seen:
                    seen.add(param)
                    yield known.get(param, joined(path, name)), param

    def aliases(self, listed: Collection[str]) -> Iterator[tuple[str, str]]:
        """(later name, listed name) of parameters that are still in the modules under another name too."""
        names = {param: name for name, param in self.parameters()}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for name, param in self.params[module]:
                first = names.get(param)
                if first is not None and first in listed and first != joined(path, name):
                    yield joined(path, name), first


def _params_of(module: nn.Module) -> Named:
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def _post_order(module: nn.Module, prefix: str, modules: list[tuple[str, nn.Module]], seen: set[nn.Module]) -> None:
    for name, child in module.named_children():
        if child not in seen:
            seen.add(child)
            _post_order(child, joined(prefix, name), modules, seen)
    modules.append((prefix, module))


def import_object(reference: str, option: str) -> object:
    """Import the object that ``package.module:name`` (or ``:Outer.name``) refers to. ``option`` is named in errors.

    Also searches the current directory, like ``python -m``. Raises UsageError.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise UsageError(
            f"{option} takes package.module:name, not {reference!r}", next_step=f"{option} package.module:name"
        )
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        target: object = import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything, or be a script
        raise UsageError(
            f"{option} {reference}: {module_name} could not be imported: {type(error).__name__}: {error}",
            why="it is imported as `python -m` would do from the current directory",
            next_step=to_copy("see where it fails", f"python -c 'import {module_name}'"),
        ) from error
    for word in name.split("."):
        if not hasattr(target, word):
            raise UsageError(f"{option} {reference}: there is no {word!r}", next_step=f"{option} package.module:name")
        target = getattr(target, word)
    return target
