"""``inspect --report``: a page beside what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import torch

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
    assert "All 6 parameters are at step 2." in content


def test_statistics_that_json_has_no_number_for_are_text(run: Run, tmp_path: Path) -> None:
    torch.save({"w": torch.full((4,), torch.finfo(torch.float64).max, dtype=torch.float64)}, tmp_path / "x.pt")
    done = run("inspect", tmp_path / "x.pt", "--stats", "--json", "--report", tmp_path / "report.html")
    assert done.code == 0
    stats = json.loads(done.out)["tensors"][0]["stats"]
    assert (stats["std"], stats["norm"]) == (0.0, "Infinity")
    assert "1.798e+308" in (tmp_path / "report.html").read_text()


def test_a_file_that_is_not_a_report_is_not_replaced(run: Run, saved: Path) -> None:
    before = saved.read_bytes()
    done = run("inspect", saved, "--report", saved)
    assert done.code == 5
    assert "is not a report" in done.err
    assert saved.read_bytes() == before


def test_a_source_that_cannot_be_read_leaves_no_report(run: Run, tmp_path: Path) -> None:
    assert run("inspect", tmp_path / "nothing.pt", "--report", tmp_path / "report.html").code == 3
    assert list(tmp_path.iterdir()) == []


def test_an_empty_selection_still_is_a_page(run: Run, saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = run("inspect", saved, "--section", "extra", "--report", page, "--json")
    assert done.code == 0
    assert json.loads(done.out)["tensors"] == []
    assert "Who holds what" not in page.read_text()


def test_a_report_never_goes_into_the_checkpoint(run: Run, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    saved.rename(tmp_path / "run" / saved.name)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for path in (tmp_path / "run" / "report.html", tmp_path / "link" / "report.html"):
        done = run("inspect", tmp_path / "run", "--report", path)
        assert (done.code, done.out) == (2, "")
        assert "never written to" in done.err
    assert [path.name for path in (tmp_path / "run").iterdir()] == [saved.name]
