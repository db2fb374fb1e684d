"""Lets ``fsdpckpt.verify`` be a package and the function of the Python API.

Importing a module of the package binds the package to that name, over the function. So the package has to be callable,
and only what lies above it may know what a call does: the package itself uses nothing of ``fsdpckpt.api``.
"""

from __future__ import annotations

import os
from types import ModuleType

TYPE_CHECKING = False  # typing's own, without the time that importing it takes
if TYPE_CHECKING:
    from inspect import Signature

    from fsdpckpt.verify.integrity import Verification


class RootPackage(ModuleType):
    """The class of ``fsdpckpt``: its ``verify`` is callable, whichever of both it is."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "verify" and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


class _CallablePackage(ModuleType):
    @property
    def __signature__(self) -> Signature:
        """For ``help()`` and completion: that of the function."""
        from inspect import signature

        from fsdpckpt.api import verify

        return signature(verify)

    def __call__(self, source: str | os.PathLike[str], **options: object) -> Verification:
        from fsdpckpt.api import verify

        return verify(source, **options)  # type: ignore[arg-type]
