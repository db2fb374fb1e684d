"""Master weights and the copies that the model computed with say the same twice: what differs is noticed."""

from __future__ import annotations

import argparse
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources

GOLDEN = Path(__file__).parent.parent / "golden"
MODULE = "mp_rank_00_model_states.pt"
Content = dict[str, Any]


def saved_by_deepspeed(name: str, tmp_path: Path) -> Path:
    source = shutil.copytree(GOLDEN / "deepspeed" / name, tmp_path / name)
    (source / "truth.pt").unlink()
    return source


def change(path: Path, how: Callable[[Content], object]) -> None:
    content = torch.load(path, weights_only=False)
    how(content)
    torch.save(content, path)


def of_module(step: Path, how: Callable[[Content], object]) -> None:
    change(step / MODULE, lambda content: how(content["module"]))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("zero1-bf16", "bfloat16"), ("zero2-fp16", "float16"), ("zero2-fp32", "float32"), ("zero1-grad-fp32", "bfloat16")],
)
def test_masters_that_deepspeed_saved_round_to_its_weights(name: str, dtype: str, tmp_path: Path) -> None:
    source = saved_by_deepspeed(name, tmp_path)
    with Sources() as sources:
        copies = open_checkpoint(str(source), sources=sources).copies
    assert {copy.dtype.name for copy in copies.values()} == {dtype}
    assert fsdpckpt.verify(source).problems == ()


@pytest.mark.parametrize("name", ["flattened-range", "experts"])
def test_masters_that_megatron_saved_round_to_its_weights(name: str, tmp_path: Path) -> None:
    with tarfile.open(GOLDEN / "megatron" / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    with Sources() as sources:
        assert open_checkpoint(str(source), sources=sources).copies
    assert [problem for problem in fsdpckpt.verify(source).problems if problem.kind == "master"] == []


@pytest.mark.parametrize("argument", ["fp8_param_gather", "use_precision_aware_optimizer", ""])
def test_weights_that_megatron_rounds_otherwise_are_not_compared(argument: str, tmp_path: Path) -> None:
    with tarfile.open(GOLDEN / "megatron" / "flattened-range.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (common,) = tmp_path.rglob("common.pt")
    change(common, lambda content: content.update(args=argparse.Namespace(**{argument or "bf16": True})))
    with Sources() as sources:
        assert bool(open_checkpoint(str(next(tmp_path.iterdir())), sources=sources).copies) is not bool(argument)


def one_element(module: Content) -> None:
    name = next(iter(module))
    module[name].view(-1)[-1] += 1


def one_bit(module: Content) -> None:
    """The next number that the dtype has."""
    weight = module[next(iter(module))]
    weight.view(torch.int16).view(-1)[0] ^= 1


def exchanged(module: Content) -> None:
    first, second = [name for name, leaf in module.items() if leaf.ndim == 1][:2]
    module[first], module[second] = module[second], module[first]


def transposed(module: Content) -> None:
    name = next(name for name, leaf in module.items() if leaf.ndim == 2 and leaf.shape[0] != leaf.shape[1])
    module[name] = module[name].t().contiguous()


def less(module: Content) -> None:
    module.pop(next(iter(module)))


@pytest.mark.parametrize("damage", [one_element, one_bit, exchanged, transposed, less], ids=lambda each: each.__name__)
def test_a_weight_that_is_not_its_master_is_a_problem_and_is_refused(
    damage: Callable[[Content], object], tmp_path: Path
) -> None:
    source = saved_by_deepspeed("zero1-bf16", tmp_path)
    of_module(source / "global_step3", damage)
    problems = fsdpckpt.verify(source).problems
    assert problems and {problem.kind for problem in problems} <= {"master", "names"}
    for options in ({}, {"only": "model"}):
        with pytest.raises(SourceCorruptError) as refused:
            fsdpckpt.convert(source, tmp_path / "full.pt", to="full", **options)
        assert str(problems[0].key) in str(refused.value)
    assert not (tmp_path / "full.pt").exists()
    fsdpckpt.convert(source, tmp_path / "optim.pt", to="full", only="optim")


def test_verify_compares_the_elements_that_samples_miss_and_convert_those_that_they_have(tmp_path: Path) -> None:
    """A large weight under a wrapper of apex: samples tie it, and prove nothing of the rest."""
    torch.manual_seed(0)
    weight = torch.randn(130, 1001)
    optimizer = {"state": {0: {"exp_avg": torch.randn_like(weight)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    wrapper = {"optimizer_state_dict": optimizer, "fp32_from_fp16": [[weight]]}
    content: Content = {"model": {"weight": weight.bfloat16()}, "optimizer": wrapper}
    torch.save(content, tmp_path / "good.pt")
    assert fsdpckpt.verify(tmp_path / "good.pt").problems == ()
    content["model"]["weight"][30, 7] += 1
    torch.save(content, tmp_path / "changed.pt")
    (problem,) = fsdpckpt.verify(tmp_path / "changed.pt").problems
    assert problem.kind == "master" and "first at [30, 7]" in problem.message
    content["model"]["weight"][0, 7] += 1
    torch.save(content, tmp_path / "changed.pt")
    with pytest.raises(SourceCorruptError):
        fsdpckpt.convert(tmp_path / "changed.pt", tmp_path / "out.pt", key_type="name")


def test_weights_that_are_not_numbers_round_to_their_copies(tmp_path: Path) -> None:
    weight = torch.tensor([1.0, float("nan"), float("inf"), 1e30, -0.0])
    optimizer = {"state": {0: {"exp_avg": torch.ones(5)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    wrapper = {"optimizer_state_dict": optimizer, "fp32_from_fp16": [[weight]]}
    for dtype in (torch.float16, torch.bfloat16):
        torch.save({"model": {"weight": weight.to(dtype)}, "optimizer": wrapper}, tmp_path / "good.pt")
        with Sources() as sources:
            assert open_checkpoint(str(tmp_path / "good.pt"), sources=sources).copies
        assert fsdpckpt.verify(tmp_path / "good.pt").problems == ()
