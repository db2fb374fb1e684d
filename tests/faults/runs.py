"""Conversions in processes of their own, which are disturbed: by signals, by a hook at the n-th write, by the shim."""

from __future__ import annotations

import filecmp
import os
from dataclasses import dataclass
from pathlib import Path

from tests.oracle.forked import run

__all__ = ["Done", "Hook", "convert", "faulty", "finished", "hidden", "removing", "same"]

Hook = tuple[int, str]
"""(n, code): what the process does before its n-th write."""

CODE = """
import os, sys, threading
from fsdpckpt.execute import journal
from fsdpckpt.storage.local_target import WritableFile
journal.SYNC_SECONDS = 0.002
exec(os.environ.get("BEFORE", ""))
written, write, counting = [], WritableFile.write, threading.Lock()
def hooked(self, *arguments):
    with counting:  # two threads that count at once would both miss the n-th write
        written.append(self.path)
        reached = len(written) == int(os.environ["HOOK_AT"])
    if reached:
        exec(os.environ["HOOK"])
    write(self, *arguments)
if "HOOK" in os.environ:
    WritableFile.write = hooked
from fsdpckpt.cli import main
main()
"""
SMALL = ["--threads", "2", "--max-memory", "1MiB"]  # many windows


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def convert(
    source: Path,
    target: Path,
    *options: str,
    hook: Hook | None = None,
    limit: float = 60,
    **environment: str,
) -> Done:
    """``fsdpckpt convert`` as a process, whose journal is synced all the time. ``BEFORE``: code that runs first."""
    if hook is not None:
        environment |= {"HOOK_AT": str(hook[0]), "HOOK": hook[1]}
    words = ["-c", CODE, "convert", str(source), str(target), *SMALL, *options]
    done = run(words, kind="plain", timeout=limit, env=environment)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def faulty(shim: str, calls: str, path: str | Path, nth: int, action: object, **more: str) -> dict[str, str]:
    """The environment in which the ``nth`` of ``calls`` on ``path`` comes to ``action``."""
    where = {"LD_PRELOAD": shim, "FAULT_CALLS": calls, "FAULT_PATH": str(path)}
    return {**where, "FAULT_NTH": str(nth), "FAULT_DO": str(action), **more}


def removing(path: Path) -> str:
    """Code that removes a directory at once: others may be creating files in it."""
    gone = f"{path}.gone"
    return f"import shutil; os.rename({str(path)!r}, {gone!r}); shutil.rmtree({gone!r})"


def hidden(target: Path, suffix: str = "staging") -> Path:
    return target.parent / f".{target.name}.fsdpckpt-{suffix}"


def same(expected: Path, found: Path) -> bool:
    """Whether two files, or all files of two directories, are equal byte for byte."""
    if expected.is_file():
        return found.is_file() and filecmp.cmp(expected, found, shallow=False)
    names = sorted(os.listdir(expected))
    return names == sorted(os.listdir(found)) and filecmp.cmpfiles(expected, found, names, shallow=False)[0] == names


def finished(source: Path, target: Path, *options: str, expected: Path) -> Done:
    """A run that succeeds, makes what is ``expected``, and leaves nothing else."""
    done = convert(source, target, *options)
    assert done.code == 0, done.err
    assert same(expected, target)
    assert not hidden(target).exists() and not hidden(target, "lock").exists()
    return done
