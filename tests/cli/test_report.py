"""``inspect --report``: a page beside what is printed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_a_report_is_written_and_what_is_printed_stays_the_same(run: Run, saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    plain = run("inspect", saved, "--json")
    done = run("inspect", saved, "--json", "--report", page)
    assert (done.code, done.out) == (0, plain.out)
    assert done.err.startswith(f"{page}: ")
    assert run("inspect", saved, "--stats", "--quiet", "--report", page).err == ""
    content = page.read_text()
    assert "2.weight" in content
    assert "the steps agree: 2 for 6 parameters" in content


def test_a_file_that_is_no_report_is_not_replaced(run: Run, saved: Path) -> None:
    before = saved.read_bytes()
    done = run("inspect", saved, "--report", saved)
    assert done.code == 5
    assert "no report" in done.err
    assert saved.read_bytes() == before


def test_a_source_that_cannot_be_read_leaves_no_report(run: Run, tmp_path: Path) -> None:
    assert run("inspect", tmp_path / "nothing.pt", "--report", tmp_path / "report.html").code == 3
    assert list(tmp_path.iterdir()) == []


def test_an_empty_selection_still_is_a_page(run: Run, saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = run("inspect", saved, "--keys", "nothing*", "--report", page, "--json")
    assert done.code == 0
    assert json.loads(done.out)["tensors"] == []
    assert "Who holds what" not in page.read_text()
