"""The site that ``scripts/site`` builds: every page is in it, and no link leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdpckpt.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_site_has_every_page_and_keeps_other_versions(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: the site was not built")
    for older in ("0.0.9", "0.0.10"):
        (tmp_path / older).mkdir()
        (tmp_path / older / "index.html").write_text("older")
    command = [sys.executable, str(ROOT / "scripts" / "site"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    pages = [page.stem for page in (ROOT / "docs").glob("*.md")]
    missing = [name for name in [*pages, "changelog"] if not (tmp_path / __version__ / name / "index.html").exists()]
    assert missing == []
    first = (tmp_path / __version__ / "index.html").read_text()
    assert 'href="convert/"' in first and 'href="schemas/inspect.json"' in first
    leading = (tmp_path / "index.html").read_text()
    assert f'url={__version__}/"' in leading
    positions = [leading.index(f'href="{name}/"') for name in (__version__, "0.0.10", "0.0.9")]
    assert positions == sorted(positions)
    assert (tmp_path / "0.0.9" / "index.html").read_text() == "older"
