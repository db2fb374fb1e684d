"""Logical compare, digests, statistics and integrity. Reads through ``readers``; shares nothing with ``execute``.

``fsdpckpt.verify`` is this package and, in the Python API, a function: calling the package is ``api.verify``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpckpt.verify.integrity import Verification


class _CallablePackage(ModuleType):
    """Importing a submodule binds the package to ``fsdpckpt.verify``; so the package itself has to be the function."""

    @property
    def __signature__(self) -> Signature:
        """For ``help()`` and completion: that of the function."""
        return signature(import_module("fsdpckpt.api").verify)

    def __call__(self, source: str | os.PathLike[str], **options: object) -> Verification:
        # By name: the API lies above this package, which uses nothing of it.
        verify: Callable[..., Verification] = import_module("fsdpckpt.api").verify
        return verify(source, **options)


sys.modules[__name__].__class__ = _CallablePackage
