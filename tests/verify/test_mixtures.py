"""Files of several saves in one directory: another step, another world size, another rank's, none at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from tests.makers import Change, add, add_copy, copied, cut, lose, put, swap, together

FORMS: dict[str, dict[str, Any]] = {
    "dcp": {"to": "sharded", "container": "dcp", "buffers": ("none",)},
    "ranks": {"to": "sharded", "container": "torch", "buffers": ("none",)},
    "flattened": {"to": "flattened", "unit": ("none",), "use_orig_params": True},
}
MANIFEST = "fsdpckpt.json"
Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint whose tensors are those of no other ``step``, made once."""

    @cache
    def made(form: str, step: int = 4, world: int = 3) -> Path:
        path = tmp_path_factory.mktemp("saved")
        draw = torch.Generator().manual_seed(step)
        model = {"a": torch.randn(8, 5, generator=draw), "b": torch.randn(6, generator=draw)}
        states = {
            name: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(value.shape, generator=draw)}
            for name, value in model.items()
        }
        groups = [{"lr": 0.1, "params": list(model)}]
        torch.save({"model": model, "optimizer": {"state": states, "param_groups": groups}}, path / "full.pt")
        fsdpckpt.convert(path / "full.pt", path / "it", world_size=world, **FORMS[form])
        return path / "it"

    return made


def problem_kinds(path: Path) -> list[str]:
    """The kinds of what verify lists, or the class of what stops it."""
    try:
        return sorted(problem.kind for problem in fsdpckpt.verify(path).problems)
    except FsdpckptError as error:
        assert error.exit_code == 3, error
        return [type(error).__name__]


def lines(path: Path) -> str:
    """All that verify says is wrong, stopped or not."""
    try:
        return "\n".join(problem.message for problem in fsdpckpt.verify(path).problems)
    except FsdpckptError as error:
        return "\n".join(error.details)


@pytest.mark.parametrize("form", FORMS)
def test_any_one_file_that_is_missing_or_of_another_step_is_found(tmp_path: Path, form: str, saved: Saved) -> None:
    one, other = saved(form), saved(form, step=5)
    assert problem_kinds(one) == []
    for name in (path.name for path in one.iterdir() if path.name != MANIFEST):
        for kind, change in (("missing", lose(name)), ("mixed", add(other, name))):
            if kind == "mixed" and (one / name).read_bytes() == (other / name).read_bytes():
                continue
            path = tmp_path / kind / name
            path.mkdir(parents=True)
            copied(one, change)(path)
            expected = {"missing-file", "SourceUnrecognisedError"} if kind == "missing" else {"checksum"}
            errors = {"SourceIncompleteError"} | ({"SourceCorruptError"} if kind == "mixed" else set())
            assert {*problem_kinds(path)} & (expected | errors), (kind, name)


class Mixture(NamedTuple):
    """``kinds``: what verify finds in a checkpoint of this ``form`` after the ``change``."""

    name: str
    form: str
    change: Callable[[Saved], Change]
    kinds: list[str]
    world: int = 3


def rank_file(section: str, rank: int) -> str:
    return f"{section}_world_size_3_rank_{rank}.pt"


def of_another_step(form: str) -> Callable[[Saved], Change]:
    return lambda saved: add(saved(form, step=5), rank_file("optim", 1))


def of_a_larger_world(form: str) -> Callable[[Saved], Change]:
    """The last file of 5 ranks."""
    last = {"dcp": "__4_0.distcp"}.get(form, "optim_world_size_5_rank_4.pt")
    return lambda saved: add(saved(form, world=5), last)


def unsealed(change: Callable[[Saved], Change]) -> Callable[[Saved], Change]:
    """Without what says who wrote it."""
    return lambda saved: together(lose(MANIFEST), change(saved))


def damaged_manifest(directory: Path) -> None:
    text = (directory / MANIFEST).read_text()
    (directory / MANIFEST).write_text(text.replace('"layout": "sharded"', '"layout": "shorded"'))


MIXTURES = [
    Mixture("an optimizer file of another step", "ranks", of_another_step("ranks"), ["checksum", "replica", "replica"]),
    Mixture("the same, unsealed", "ranks", unsealed(of_another_step("ranks")), ["replica", "replica"]),
    Mixture("slices of another step, unsealed", "flattened", unsealed(of_another_step("flattened")), ["replica"]),
    *(
        Mixture(f"{name} of the {section} of {form}", form, change, ["SourceCorruptError"])
        for form in ("ranks", "flattened")
        for section in ("model", "optim")
        for name, change in (
            ("a duplicate", lambda _, s=section: add_copy(rank_file(s, 0), rank_file(s, 1))),
            ("exchanged files", lambda _, s=section: swap(rank_file(s, 0), rank_file(s, 1))),
        )
    ),
    Mixture("exchanged files of DCP", "dcp", lambda _: swap("__0_0.distcp", "__1_0.distcp"), ["SourceCorruptError"], 2),
    Mixture("dcp of a larger world", "dcp", of_a_larger_world("dcp"), ["stray"] * 2, 2),
    Mixture("dcp of a larger world, unsealed", "dcp", unsealed(of_a_larger_world("dcp")), ["stray"], 2),
    *(
        Mixture(f"{form} of a larger world, {of}", form, change, ["SourceIncompleteError"], 2)
        for form in ("ranks", "flattened")
        for of, change in (
            ("sealed", of_a_larger_world(form)),
            ("unsealed", unsealed(of_a_larger_world(form))),
        )
    ),
    Mixture("a damaged manifest", "dcp", lambda _: damaged_manifest, ["manifest"]),
    Mixture("a manifest that ends early", "dcp", lambda _: put(MANIFEST, "{"), ["manifest"]),
    Mixture("files that only the manifest misses", "ranks", lambda _: lose("optim_*"), ["missing-file"] * 3),
    Mixture("bytes behind the end of a file", "dcp", lambda _: cut("__1_0.distcp", by=-6), ["length"]),
    Mixture("notes beside it", "ranks", lambda _: together(put("README.md", "x"), put("config.json", "{}")), []),
]  # fmt: skip


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: mixture.name)
def test_files_of_other_saves_ranks_and_worlds_are_found(tmp_path: Path, mixture: Mixture, saved: Saved) -> None:
    copied(saved(mixture.form, world=mixture.world), mixture.change(saved))(tmp_path)
    assert problem_kinds(tmp_path) == mixture.kinds


def test_all_that_is_wrong_is_listed_and_named(tmp_path: Path, saved: Saved) -> None:
    other = saved("dcp", step=5)
    whole = shutil.copytree(saved("dcp"), tmp_path / "whole")
    shutil.copy(other / "__1_0.distcp", whole)
    shutil.copy(other / "__1_0.distcp", whole / "__7_0.distcp")
    data = bytearray((whole / "__2_0.distcp").read_bytes())
    data[200] ^= 1
    (whole / "__2_0.distcp").write_bytes(data)
    for name in ("__1_0.distcp", "__2_0.distcp", "__7_0.distcp is not among the files"):
        assert f"{whole}/{name}" in lines(whole)


def test_a_directory_that_cannot_be_read_still_lists_every_damaged_file(tmp_path: Path, saved: Saved) -> None:
    whole = shutil.copytree(saved("ranks"), tmp_path / "whole")
    (whole / rank_file("model", 0)).write_bytes((whole / rank_file("model", 0)).read_bytes()[:100])
    data = bytearray((whole / rank_file("optim", 2)).read_bytes())
    data[len(data) // 2] ^= 1
    (whole / rank_file("optim", 2)).write_bytes(data)
    assert problem_kinds(whole)[0].startswith("Source"), "it stops"
    assert f"{rank_file('model', 0)} has 100 bytes" in lines(whole) and rank_file("optim", 2) in lines(whole)


def test_a_conversion_refuses_metadata_that_the_manifest_contradicts(tmp_path: Path, saved: Saved) -> None:
    one = shutil.copytree(saved("dcp", world=2), tmp_path / "one")
    for path in saved("dcp").iterdir():
        if path.name != MANIFEST:
            shutil.copy(path, one)
    with pytest.raises(FsdpckptError) as raised:
        fsdpckpt.convert(one, tmp_path / "out.pt", to="full")
    assert raised.value.exit_code == 3
    assert "does not match" in "\n".join(raised.value.details)
    (one / MANIFEST).unlink()
    fsdpckpt.convert(one, tmp_path / "out.pt", to="full")
