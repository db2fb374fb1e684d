"""The pages of ``diff --report`` and of an incomplete checkpoint: what they show, and that no key can do anything."""

from __future__ import annotations

from pathlib import Path

import pytest

import fsdpckpt
from fsdpckpt.describe import describe_incomplete
from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.report.compared import compared_page
from fsdpckpt.report.incomplete import incomplete_page
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.difference import Change, ComparedKey, Difference
from tests.cli.conftest import Run, at_step, run
from tests.report.test_page import HOSTILE, Elements, require_inert

torch = pytest.importorskip("torch")
__all__ = ["run"]


def moved(name: str, relative: float, state: str | None = None) -> ComparedKey:
    section = Section.MODEL if state is None else Section.OPTIM
    change = Change(4, 4, relative, relative**2, 1.0)
    return ComparedKey("*", section, name, "differ", param=name, state=state, change=change)


def test_hostile_names_stay_text_on_both_pages(tmp_path: Path) -> None:
    entries = [moved(f"{key}.{n}.w", 0.1 + n) for key in HOSTILE for n in range(4)]
    entries += [ComparedKey("-", Section.MODEL, key, key) for key in HOSTILE]
    entries += [ComparedKey("*", Section.EXTRA, key, f"{key} vs {key}") for key in HOSTILE]
    require_inert(compared_page(Difference(tuple(entries), HOSTILE, (HOSTILE[0], HOSTILE[2]))))
    name = "<script>document.title='owned'<script>"
    for rank in (0, 1, 3):
        (tmp_path / f"{name}_rank_{rank}.pt").write_bytes(b"PK")
    error = SourceIncompleteError(HOSTILE[0], details=HOSTILE, file=str(tmp_path), why=HOSTILE[1])
    with Sources() as sources:
        left = describe_incomplete(str(tmp_path), error, sources, ())
    assert left is not None
    require_inert(incomplete_page(left))


def test_what_moved_much_further_than_other_layers_is_an_outlier() -> None:
    entries = [moved(f"layers.{n}.q.weight", 0.2 if n == 5 else 0.01 + n * 1e-4) for n in range(8)]
    entries += [moved(f"layers.{n}.q.weight", 0.5, "exp_avg") for n in range(8)]
    text = Elements(compared_page(Difference(tuple(entries)))).text
    outliers = text[text.index("Outliers") :]
    assert "layers.5.q.weight" in outliers
    assert outliers.count("layers.") == 1
    assert "Outliers" not in Elements(compared_page(Difference(tuple(entries[8:])))).text


def test_a_page_of_very_many_keys_stays_small() -> None:
    entries = [moved(f"layers.{n}.part{m}.weight", 0.01 * (n + 1)) for n in range(126) for m in range(12)]
    entries += [ComparedKey("-", Section.OPTIM, f"state{n}.x", "tensor") for n in range(5_000)]
    assert len(compared_page(Difference(tuple(entries)))) < 1_000_000


def test_diff_writes_a_page_of_two_steps_and_replaces_only_a_page(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(at_step(100), "a.pt")
    torch.save(at_step(250), "b.pt")
    for _ in range(2):
        done = run("diff", "a.pt", "b.pt", "--report", "diff.html")
        assert (done.code, done.err.startswith("diff.html: ")) == (1, True)
    text = Elements(Path("diff.html").read_text()).text
    for expected in ("250 (7 parameters)", "exp_avg in layers", "layers.{0..2}.norm  x3", "scheduler.last_epoch"):
        assert expected in text
    assert run("inspect", "a.pt", "--report", "diff.html").code == 0, "each page may replace the other"
    assert run("diff", "a.pt", "b.pt", "--report", "diff.html").code == 1
    Path("diff.html").write_text("<!doctype html>\n<p>mine")
    assert run("inspect", "a.pt", "--report", "diff.html").code == 5
    assert run("diff", "a.pt", "b.pt", "--report", "diff.html").code == 5
    assert run("diff", "a.pt", "b.pt", "--report", "a.pt").code == 5


def test_inspect_draws_what_is_left_of_a_checkpoint(run: Run, tmp_path: Path) -> None:
    torch.save(at_step(100), tmp_path / "a.pt")
    ranks = {"to": "sharded", "container": "torch", "key_type": "name", "buffers": ["none"]}
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "ranks", world_size=2, **ranks)  # type: ignore[arg-type]
    (tmp_path / "ranks" / "optim_world_size_2_rank_1.pt").unlink()
    done = run("inspect", tmp_path / "ranks", "--report", tmp_path / "report.html")
    assert done.code == 3
    html = (tmp_path / "report.html").read_text()
    assert 'class="missing" style="flex-grow: 1" title="rank 1: missing"' in html
    assert f"fsdpckpt convert {tmp_path / 'ranks'} DST --only model" in html
