"""Hostile pickles as ``data.pkl`` of a torch file and as DCP ``.metadata``: refused in seconds, and nothing runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.opcodes import P2, call_forms
from tests.hostile.pickles import ATTACKS, BOMBS, GADGETS, dcp_directory, torch_file

SECONDS = 5  # of processor time, for one file
ROOT = Path(__file__).parents[2]
DCP = "torch-2.4/f2_default/ckpt"


def _watched(directory: Path, pickles: dict[str, bytes]) -> dict[str, list[dict[str, Any]]]:
    """What the sentry saw of each pickle, as a torch file and as DCP metadata."""
    directory.mkdir()
    paths: dict[str, str] = {}
    for number, (title, data) in enumerate(pickles.items()):
        paths[str(dcp_directory(directory / f"{number}.dcp", data))] = title
        paths[str(torch_file(directory / f"{number}.pt", data))] = title
    warm = [torch_file(directory / "warm.pt", P2 + b"}."), torch_file(directory / "cold.pt", P2)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.sentry", *map(str, warm), str(ROOT / "tests/golden" / DCP)],
        input="".join(f"{path}\n" for path in paths),
        capture_output=True,
        text=True,
        timeout=280,
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    last = next(iter(list(paths.values())[len(done.stdout.splitlines()) :]), None)
    assert done.returncode == 0, (f"ended with {done.returncode} at: {last}", done.stderr[-2000:])
    found: dict[str, list[dict[str, Any]]] = {title: [] for title in pickles}
    for line in done.stdout.splitlines():
        seen = json.loads(line)
        found[paths[seen["path"]]].append(seen)
    assert not (directory / "CANARY").exists()
    assert all(len(seen) == 2 for seen in found.values())
    return found


FORMS = {
    f"{module}.{attribute} by {form}": data
    for (module, attribute), arguments in GADGETS.items()
    for form, data in call_forms(module, attribute, *arguments).items()
}


def _trouble(seen: dict[str, Any]) -> str | None:
    if seen["acts"]:
        return f"did {seen['acts']}"
    if seen["seconds"] > SECONDS:
        return f"took {seen['seconds']} s"
    if seen["code"] != 3 or not seen["ours"]:
        return f"ended with {seen['code']}, {seen.get('error')}: {seen.get('text')}"[:300]
    return None


def test_no_way_of_calling_runs_anything_and_each_name_is_told(tmp_path: Path) -> None:
    wrong = {}
    for title, both in _watched(tmp_path / "d", FORMS).items():
        gadget = title.partition(" by ")[0]
        for seen in both:
            # getattr itself may be named, for one pair of names: the message then names what it was asked for.
            named = gadget in seen["text"] or (gadget == "builtins.getattr" and "os.path" in seen["text"])
            trouble = _trouble(seen) or (None if named else f"does not name it: {seen['text'][:300]}")
            if trouble:
                wrong[title] = trouble
    assert wrong == {}


@pytest.mark.parametrize("group", ["attacks", "bombs"])
def test_lies_and_bombs_are_refused_within_seconds_and_a_gigabyte(tmp_path: Path, group: str) -> None:
    found = _watched(tmp_path / "d", ATTACKS if group == "attacks" else BOMBS)
    assert {title: trouble for title, both in found.items() for seen in both if (trouble := _trouble(seen))} == {}
