"""What is in a staging directory and beside it: its own name, those of the journals, and the locks of who writes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os

from fsdpckpt.storage.targets import target_errors

__all__ = ["NAME_LIMIT", "has_writers", "hidden_name", "hold", "journal_of", "journals_at", "staging_root"]

JOURNAL, WRITER = "journal", "writer"
NAME_LIMIT = 255  # bytes of one file name on every file system in use; some allow fewer


def hidden_name(name: str, suffix: str) -> str:
    """A name beside DST's, its own where that fits."""
    found = f".{name}.fsdpckpt-{suffix}"
    if len(os.fsencode(found)) <= NAME_LIMIT:
        return found
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.fsdpckpt-{suffix}"


def staging_root(target: str) -> str:
    """Where the staging directory of ``target`` is, or would be."""
    parent, name = os.path.split(os.path.realpath(target))
    return os.path.join(parent, hidden_name(name, "staging"))


def journal_of(root: str, writer: int | None = None) -> str:
    """The journal of a process alone, or of number ``writer`` of several, in the staging directory ``root``."""
    return os.path.join(root, JOURNAL if writer is None else f"{JOURNAL}-{writer}")


def journals_at(root: str) -> list[str]:
    """All journals in the staging directory ``root``; none where there is no such directory."""
    return [os.path.join(root, name) for name in _names(root, JOURNAL)]


def hold(root: str, writer: int) -> int:
    """Lock ``root`` as number ``writer`` of several that write there, until the descriptor returned is closed."""
    path = os.path.join(root, f"{WRITER}-{writer}")
    with target_errors(path):
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(held, fcntl.LOCK_EX)
    return held


def has_writers(root: str) -> bool:
    """Whether a process that holds a lock in the staging directory ``root`` is still there."""
    return not all(_is_free(os.path.join(root, name)) for name in _names(root, WRITER))


def _is_free(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
    return True


def _names(root: str, kind: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(root) if name == kind or name.startswith(f"{kind}-"))
    except (FileNotFoundError, NotADirectoryError):
        return []
