"""Keep what fuzzing found: ``python -m tests.fuzz.found fuzz-run tests/fuzz/found.tar.xz``.

Of each target's inputs, smallest first, those are kept that lead from one line of a parser to another one as none
before did. Beside each stands what came of it: a later parser that comes to another end is looked at by a person.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.targets import TARGETS, Target, harmless

FOUND = Path(__file__).parent / "found.tar.xz"

__all__ = ["FOUND", "found"]

_Step = tuple[CodeType, int, int]
_WATCHED = tuple(f"/fsdpckpt/{package}/" for package in ("formats", "readers", "ir", "flat", "storage"))


def found(target: str) -> Iterator[tuple[str, bytes, bool]]:
    """Name, bytes, and whether the parser took it, of each input kept for ``target``."""
    with tarfile.open(FOUND) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if member.name.startswith(f"{target}/") and file is not None:
                yield member.name, file.read(), "parsed" in member.name


def _steps(target: Target, data: bytes) -> tuple[set[_Step], bool]:
    """From which line to which line the parsers went, and whether they took ``data``."""
    steps: set[_Step] = set()

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if not any(package in code.co_filename for package in _WATCHED):
            return None
        last = 0

        def line(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal last
            if event == "line":
                steps.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line

    sys.settrace(enter)
    try:
        parsed = harmless(target, data)
    finally:
        sys.settrace(None)
    return steps, parsed


def main(run: str, archive: str) -> None:
    with tarfile.open(archive, "w:xz") as out:
        for name, target in TARGETS.items():
            inputs = sorted(
                (path.read_bytes() for path in Path(run, name, "corpus").glob("*")), key=lambda data: (len(data), data)
            )
            seen: set[_Step] = set()
            kept = 0
            for data in inputs:
                steps, parsed = _steps(target, data)
                if not steps <= seen:
                    seen |= steps
                    entry = tarfile.TarInfo(f"{name}/{kept}-{'parsed' if parsed else 'refused'}")
                    entry.size = len(data)
                    out.addfile(entry, io.BytesIO(data))
                    kept += 1
            print(f"{name}: {kept} of {len(inputs)} inputs, {len(seen)} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
