"""Writes a units file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from fsdpckpt.errors import TargetUnwritableError, UsageError
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.units_json import UNITS_FILE, encode, render
from fsdpckpt.storage.protocols import is_url


def units_path(path: str) -> str:
    """The file that ``path`` means: itself when it ends in ``.json``, else ``units.json`` in that directory."""
    if path.endswith(".json") and not os.path.isdir(path):
        return path
    return os.path.join(path, UNITS_FILE)


def write_units(units: Units, target: str, *, how: Sequence[str] = ()) -> bytes:
    """Write ``units`` to the file ``target`` through a temporary file beside it; ``how`` as for ``encode``.

    Returns its content. Makes missing directories; replaces an earlier file. Raises TargetUnwritableError.
    """
    if is_url(target):
        raise UsageError(
            f"{target}: units files are written to local disks only",
            next_step="write it to a local file and copy that beside the checkpoint",
        )
    folder = os.path.dirname(os.path.abspath(target))
    content = render(encode(units, how=how)).encode()
    try:
        os.makedirs(folder, exist_ok=True)
        handle, staged = tempfile.mkstemp(prefix=".units-", suffix=".partial", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(staged, 0o666 & ~_umask())
            os.replace(staged, target)
        except BaseException:
            os.unlink(staged)
            raise
    except OSError as error:
        raise TargetUnwritableError(f"{target}: {error.strerror or error}", file=target) from error
    return content


def _umask() -> int:
    """The mask of new files: ``mkstemp`` makes them for the owner alone, and others read checkpoints too."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
