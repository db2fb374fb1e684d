"""Stubs of modules that a producer's package imports and its checkpoints do not use.

Their lists of requirements are those of whole training systems (verl's: 2 GB), so the packages are installed alone.
A name that is really installed is never replaced. What is taken from a stand-in cannot be called, nor be an instance
of anything: a checkpoint that did need it would fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["stand_in_for", "without_running"]


class _OfAbsent(type):
    def __getattr__(cls, name: str) -> type[Absent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class Absent(metaclass=_OfAbsent):
    """Stands for any name of a missing package, in annotations and as a base class."""


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type[Absent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for(*names: str) -> None:
    """Let packages of these names, which are not installed, be imported in this process."""
    sys.meta_path.append(_Finder(frozenset(name for name in names if find_spec(name) is None)))


def without_running(package: str, *below: str) -> None:
    """Let modules of ``package``, and of its packages ``below``, be imported without running their ``__init__``."""
    if package in sys.modules and sys.modules[package].__spec__ is None:
        return  # asked for before, by whoever forked this process
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(package)
    for name in (package, *below):
        module = ModuleType(name)
        module.__path__ = [os.path.join(spec.submodule_search_locations[0], *name.split(".")[1:])]
        sys.modules[name] = module
