"""The Python API in editors and notebooks: completion, tables, short reprs, errors at top level and in the docs."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt import errors
from fsdpckpt.errors import FsdpckptError, SourceIncompleteError
from fsdpckpt.notebook import MAX_ROWS, table
from tests.cli.conftest import saved, trained_file

__all__ = ["saved", "trained_file"]
PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FsdpckptError) and kind.__module__ == errors.__name__
]


def test_every_error_is_at_top_level_and_in_the_docs_with_its_exit_code() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (\d+) \|", PAGE, re.M)
    assert dict(rows) == {kind.__name__: str(kind.exit_code) for kind in CLASSES}
    for kind in CLASSES:
        assert getattr(fsdpckpt, kind.__name__) is kind and kind.__name__ in dir(fsdpckpt)


def test_the_docs_have_every_attribute_of_an_error() -> None:
    attributes = PAGE.partition("| attribute | meaning |")[2]
    named = {name for row in re.findall(r"^\| (`.*?`) \|", attributes, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named - {"exit_code"} == {field.name for field in dataclasses.fields(FsdpckptError)} - {"_"}


def test_the_repr_of_an_error_says_what_it_is_about_on_one_line() -> None:
    error = SourceIncompleteError("4 files are missing", details=[f"rank {rank}" for rank in range(5)], file="run/a.pt")
    assert repr(error) == (
        "SourceIncompleteError('4 files are missing', file='run/a.pt', "
        "details=['rank 0', 'rank 1', 'rank 2', 'and 2 more'])"
    )
    assert repr(FsdpckptError("x")) == "FsdpckptError('x')"


@pytest.mark.parametrize(
    ("function", "paths"),
    [
        (fsdpckpt.inspect, {"source", "units", "reference", "parameters"}),
        (fsdpckpt.convert, {"source", "target", "units", "reference", "parameters"}),
        (fsdpckpt.diff, {"a", "b", "units", "reference", "parameters"}),
        (fsdpckpt.verify, {"source", "units", "reference", "parameters"}),
        (fsdpckpt.open, {"source", "units", "reference", "parameters"}),
        (fsdpckpt.save_parameter_order, {"path"}),
        (fsdpckpt.StorageReader, {"path", "units", "reference", "parameters"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_signatures_say_that_paths_may_be_text(function: object, paths: set[str]) -> None:
    declared = inspect.signature(function).parameters  # type: ignore[arg-type]
    for name in paths:
        assert str(declared[name].annotation).removesuffix(" | None") == "str | os.PathLike[str]", name


def test_results_have_short_reprs_and_tables(saved: Path, tmp_path: Path) -> None:
    described, verified = fsdpckpt.inspect(saved), fsdpckpt.verify(os.fspath(saved))
    torch.save({"model": {"<w>": torch.zeros(2)}}, tmp_path / "other.pt")
    found = fsdpckpt.diff(saved, tmp_path / "other.pt")
    report = fsdpckpt.convert(saved, tmp_path / "out", to="sharded", world_size=2)
    tensor = described.tensors[0]
    tensors = (tensor, tensor.tensor, tensor.tensor.chunks)
    for shown in (described, verified, found, report, described.checkpoint, *tensors):
        assert len(repr(shown)) < 300 and "array(" not in repr(shown) and "\n" not in repr(shown)
    assert tensor.key in repr(tensor) and str(list(tensor.tensor.shape)) in repr(tensor)
    assert repr(described).startswith(f"<{saved}: full, torch, world size 1, ")
    assert "sharded, dcp (plain), 2 ranks" in repr(report) and " is whole: 24 tensors" in repr(verified)
    assert f" 0 differ, 0 only in {saved}" in repr(fsdpckpt.diff(saved, tmp_path / "out"))
    for truth, words in ((verified, "whole"), (found, "same")):  # ``assert verify(path)`` would pass for all of them
        with pytest.raises(TypeError, match=words):
            bool(truth)
    for result in (described, verified, found, report):
        page = result._repr_html_()
        assert page.startswith("<p>") and page.count("<table>") == page.count("</table>")
    assert "&lt;w&gt;" in found._repr_html_() and "<w>" not in found._repr_html_()
    assert tensor.key in described._repr_html_()


def test_a_run_and_an_incomplete_folder_have_tables(tmp_path: Path) -> None:
    for step in (900, 1000):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        for rank in range(2):
            torch.save({"w": torch.ones(3)}, folder / f"model_world_size_2_rank_{rank}.pt")
    from fsdpckpt.api import inspect_incomplete, inspect_run

    with pytest.raises(fsdpckpt.SeveralCheckpointsError) as several:
        fsdpckpt.inspect(tmp_path)
    page = inspect_run(tmp_path, several.value)._repr_html_()
    assert page.index("step-900") < page.index("step-1000</td>")
    (tmp_path / "step-900" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(fsdpckpt.SourceError) as refused:
        fsdpckpt.inspect(tmp_path / "step-900")
    incomplete = inspect_incomplete(tmp_path / "step-900", refused.value)
    assert incomplete is not None and "missing" in incomplete._repr_html_()


def test_ipython_completes_the_keys_of_a_checkpoint(saved: Path) -> None:
    with fsdpckpt.open(saved) as checkpoint:
        assert checkpoint._ipython_key_completions_() == list(checkpoint)
        assert next(iter(checkpoint)) in checkpoint._repr_html_()


def test_a_table_draws_only_the_first_rows() -> None:
    rows = [(number,) for number in range(MAX_ROWS + 7)]
    page = table("heading", ("number",), rows, len(rows))
    assert page.count("<tr>") == MAX_ROWS + 1 and "and 7 more" in page
    assert table("none", ("number",), [], 0) == "<p>none</p>"
