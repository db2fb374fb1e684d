"""Pages name rooms of the code and tests: what was moved or renamed is not named as it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fsdpckpt

PACKAGE = Path(fsdpckpt.__file__).parent
ROOT = PACKAGE.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
PACKAGES = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()} - {"__pycache__"}


def stale(page: str) -> list[str]:
    """What ``page`` names of tests, scripts and modules that does not exist."""
    files = re.findall(r"\b(?:tests|scripts)/[\w/.-]*\w", page)
    found = [name for name in files if not (ROOT / name).exists()]
    for dotted in re.findall(r"`(?:fsdpckpt\.)?([a-z]\w*(?:\.\w+)+)(?:\(\))?`", page):
        if dotted.split(".")[0] in PACKAGES and not _exists(dotted.split(".")):
            found.append(dotted)
    return found


def _exists(parts: list[str]) -> bool:
    """Whether ``parts`` are a module, or name something in the last module on their way."""
    folder = PACKAGE
    for number, part in enumerate(parts):
        if (folder / part).is_dir():
            folder /= part
            continue
        file = folder / f"{part}.py"
        rest = parts[number + 1 :] if file.exists() else parts[number:]
        text = (file if file.exists() else folder / "__init__.py").read_text(encoding="utf-8")
        return all(re.search(rf"\b{name}\b", text) for name in rest)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_only_files_and_modules_that_are_there(page: Path) -> None:
    assert not stale(page.read_text(encoding="utf-8"))


def test_a_module_that_was_moved_is_found() -> None:
    page = "see `converters.decide`, `tests/converters/test_adapt.py` and `ir.table.Tables`, not `ir.table.Table`"
    assert stale(page) == ["tests/converters/test_adapt.py", "converters.decide", "ir.table.Tables"]
