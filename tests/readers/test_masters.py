"""Mixed-precision wrappers around an optimizer: DeepSpeed's ZeRO 0, Megatron-LM's torch format, apex."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.ir.tensors import Tensor
from tests.oracle.compare import identical, require_identical
from tests.readers.contents import opened

WRAPPERS = [
    ("optimizer_state_dict", "fp32_groups"),  # DeepSpeed's FP16_UnfusedOptimizer
    ("optimizer", "fp32_from_fp16_params"),  # Megatron-LM's Float16OptimizerWithFloat16Params
    ("optimizer_state_dict", "fp32_from_fp16"),  # apex's FP16_Optimizer
]


def trained(*, groups: list[list[str]] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A float32 model after one step: what the wrapper keeps, while the model that computes is its bf16 copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 5, bias=False))
    params = dict(model.named_parameters())
    names = groups or [list(params)]
    optimizer = torch.optim.AdamW([{"params": [params[name] for name in group]} for group in names], lr=1e-2)
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def copies(model: nn.Module, *, kept: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    state = {name: leaf.detach() for name, leaf in model.state_dict().items()}
    return {name: leaf if name in kept else leaf.bfloat16() for name, leaf in state.items()}


def saved(directory: Path, root: dict[str, Any], name: str = "model.pt") -> Path:
    torch.save(root, directory / name)
    return directory / name


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(("inner", "masters"), WRAPPERS)
def test_the_masters_of_a_wrapper_are_the_trained_parameters(inner: str, masters: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    weights = [[leaf.detach().clone() for leaf in model.parameters()]]
    wrapper = {inner: optimizer.state_dict(), masters: weights, "cur_scale": 2.0}
    source = saved(tmp_path, {"model": copies(model), "optimizer": wrapper, "iteration": 3})
    report = fsdpckpt.convert(source, tmp_path / "full.pt", to="full")
    found = loaded(tmp_path / "full.pt")
    require_identical(found["model"], model.state_dict())
    assert found["optimizer"]["cur_scale"] == 2.0 and masters not in found["optimizer"]
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(found["optimizer"][inner])
    assert all(identical(again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"]) for p in model.parameters())
    assert any("not the bfloat16 copies" in note.message for note in report.notes)
    assert fsdpckpt.diff(source, tmp_path / "full.pt").same


def test_a_parameter_that_is_float32_itself_has_no_master(tmp_path: Path) -> None:
    """Megatron keeps norms in float32, and lists masters of the others alone."""
    model, optimizer = trained()
    kept = ("1.weight", "1.bias")
    weights = [[leaf.detach().clone() for name, leaf in model.named_parameters() if name not in kept]]
    wrapper = {"optimizer": optimizer.state_dict(), "fp32_from_fp16_params": weights}
    source = saved(tmp_path, {"model": copies(model, kept=kept), "optimizer": wrapper})
    fsdpckpt.convert(source, tmp_path / "full.pt", to="full", key_type="name")
    found = loaded(tmp_path / "full.pt")
    require_identical(found["model"], model.state_dict())
    assert set(found["optimizer"]["state"]) == set(model.state_dict())


def test_a_tied_parameter_has_its_master_under_both_names(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = copies(model)
    state["head"] = state["0.weight"]
    weights = [[leaf.detach().clone() for leaf in model.parameters()]]
    wrapper = {"optimizer_state_dict": optimizer.state_dict(), "fp32_groups": weights}
    fsdpckpt.convert(saved(tmp_path, {"model": state, "optimizer": wrapper}), tmp_path / "full.pt", to="full")
    found = loaded(tmp_path / "full.pt")["model"]
    assert identical(found["head"], weights[0][0]) and identical(found["0.weight"], weights[0][0])


def test_masters_that_nothing_ties_to_a_parameter_stay_an_extra(tmp_path: Path) -> None:
    """Two groups of equal shapes: weight and bias of the norm and the bias of the layer may be in either."""
    model, optimizer = trained(groups=[["0.weight", "1.weight", "2.weight"], ["0.bias", "1.bias"]])
    with torch.no_grad():
        for leaf in model.parameters():  # no value says it either
            leaf.fill_(0.5)
    weights = [[leaf.detach().clone() for leaf in group["params"]] for group in optimizer.param_groups]
    wrapper = {"optimizer_state_dict": optimizer.state_dict(), "fp32_groups": weights}
    source = saved(tmp_path, {"model": copies(model), "optimizer": wrapper})
    checkpoint = opened(source)
    assert any("without the names of their parameters" in note.message for note in checkpoint.notes)
    fsdpckpt.convert(source, tmp_path / "full.pt", to="full")
    found = loaded(tmp_path / "full.pt")
    assert found["model"]["0.bias"].dtype is torch.bfloat16
    assert identical(found["optimizer"]["fp32_groups"][1][0], weights[1][0])
    # What the user says ties them, too: a reader of the target would.
    (tmp_path / "names.txt").write_text("0.weight\n1.weight\n2.weight\n\n0.bias\n1.bias")
    options: dict[str, Any] = {"key_type": "name", "parameters": tmp_path / "names.txt"}
    fsdpckpt.convert(source, tmp_path / "named.pt", **options)
    named = loaded(tmp_path / "named.pt")
    assert all(leaf.dtype is torch.float32 for leaf in named["model"].values())
    assert "fp32_groups" not in named["optimizer"] and fsdpckpt.verify(tmp_path / "named.pt").whole
    (tmp_path / "names.txt").write_text("0.weight\n1.bias\n2.weight\n\n0.bias\n1.weight")
    root = torch.load(source)
    root["optimizer"]["fp32_groups"][1][0] += 1
    torch.save(root, source)
    with pytest.raises(fsdpckpt.SourceError, match="does not say which parameter"):
        fsdpckpt.convert(source, tmp_path / "wrong.pt", **options)


def test_masters_of_several_groups_are_tied_by_their_values(tmp_path: Path) -> None:
    groups = [["1.bias", "0.weight", "2.weight"], ["1.weight", "0.bias"]]
    model, optimizer = trained(groups=groups)
    weights = [[leaf.detach().clone() for leaf in group["params"]] for group in optimizer.param_groups]
    wrapper = {"optimizer_state_dict": optimizer.state_dict(), "fp32_groups": weights}
    source = saved(tmp_path, {"model": copies(model), "optimizer": wrapper})
    report = fsdpckpt.convert(source, tmp_path / "full.pt")
    assert any("5 optimizer ids became names by the values" in note.message for note in report.notes)
    found = loaded(tmp_path / "full.pt")
    states = found["optimizer"]
    assert [group["params"] for group in states["param_groups"]] == groups
    for name, leaf in model.named_parameters():
        assert identical(found["model"][name], leaf), name
        assert identical(states["state"][name]["exp_avg"], optimizer.state[leaf]["exp_avg"]), name


def test_a_master_of_another_shape_is_a_contradiction(tmp_path: Path) -> None:
    model, optimizer = trained()
    weights = [[leaf.detach().clone() for leaf in model.parameters()]]
    weights[0][0] = weights[0][0].t().contiguous()
    wrapper = {"optimizer": optimizer.state_dict(), "fp32_from_fp16_params": weights}
    source = saved(tmp_path, {"model": copies(model), "optimizer": wrapper})
    assert any("its master weight" in problem.message for problem in fsdpckpt.verify(source).problems)
    with pytest.raises(fsdpckpt.SourceError, match="master weight"):
        fsdpckpt.convert(source, tmp_path / "full.pt", to="full")


def zero_0(directory: Path, *, buffers: list[str]) -> tuple[Path, nn.Module]:
    """What ``DeepSpeedEngine.save_checkpoint`` writes without ZeRO in bf16 (deepspeed 0.19)."""
    model, optimizer = trained()
    model.register_buffer("mask", torch.ones(4, 4))
    step = directory / "global_step1"
    step.mkdir(parents=True)
    (directory / "latest").write_text("global_step1")
    weights = [[nn.Parameter(leaf.detach().clone()) for leaf in model.parameters()]]
    wrapper = {
        "dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 1,
        "optimizer_state_dict": optimizer.state_dict(), "fp32_groups": weights,
    }  # fmt: skip
    root = {
        "module": copies(model), "buffer_names": buffers, "optimizer": wrapper, "param_shapes": None,
        "lr_scheduler": None, "global_steps": 1, "dp_world_size": 2, "mp_world_size": 1, "ds_version": "0.19.8",
    }  # fmt: skip
    torch.save(root, step / "mp_rank_00_model_states.pt")
    return directory, model


def test_deepspeed_without_zero_becomes_a_universal_checkpoint_with_float32_weights(tmp_path: Path) -> None:
    source, model = zero_0(tmp_path / "ckpt", buffers=["mask"])
    fsdpckpt.convert(source, tmp_path / "u", flavor="deepspeed-universal")
    step = tmp_path / "u" / (tmp_path / "u" / "latest_universal").read_text()
    for name, leaf in model.named_parameters():
        found = torch.load(step / "zero" / name / "fp32.pt", weights_only=False)["param"]
        assert found.dtype is torch.float32 and identical(found, leaf.detach()), name


def test_the_listed_buffers_are_whole_and_all_other_tensors_are_cut(tmp_path: Path) -> None:
    source, model = zero_0(tmp_path / "ckpt", buffers=["mask"])
    fsdpckpt.convert(source, tmp_path / "ranks", to="sharded", container="torch", world_size=2)
    found = opened(tmp_path / "ranks").model
    assert found is not None
    cut = {name for name, leaf in found.params.items() if isinstance(leaf, Tensor) and leaf.sharded}
    assert cut == {name for name, _ in model.named_parameters()}


def fused(directory: Path, groups: list[list[str]], *, buffers: list[str]) -> tuple[Path, nn.Module, list[Any]]:
    """As DeepSpeed's ``FP16_Optimizer`` does it: the wrapped optimizer has one flat parameter for each group."""
    model, _ = trained()
    params = dict(model.named_parameters())
    order = [[params[name].detach() for name in group] for group in groups]
    flat = [nn.Parameter(torch._utils._flatten_dense_tensors(group).clone()) for group in order]
    optimizer = torch.optim.AdamW([{"params": [each]} for each in flat], lr=1e-2)
    for each in flat:
        each.grad = torch.randn_like(each)
    optimizer.step()
    for group, each in zip(groups, flat, strict=True):
        parts = torch._utils._unflatten_dense_tensors(each.detach(), [params[name] for name in group])
        for name, part in zip(group, parts, strict=True):
            params[name].data = part
    model.register_buffer("mask", torch.ones(4, 4))
    wrapper = {"optimizer_state_dict": optimizer.state_dict(), "fp32_groups_flat": flat, "clip_grad": 1.0}
    root = {"module": copies(model), "buffer_names": buffers, "optimizer": wrapper, "ds_version": "0.19.8"}
    whole = [
        (name, part, exp_avg)
        for names, group, each in zip(groups, order, flat, strict=True)
        for name, part, exp_avg in zip(
            names,
            torch._utils._unflatten_dense_tensors(each.detach(), group),
            torch._utils._unflatten_dense_tensors(optimizer.state[each]["exp_avg"], group),
            strict=True,
        )
    ]
    return saved(directory, root), model, whole


ALL = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
IN_GROUPS = [
    ([["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias"]], ["mask"]),  # who is in which group?
    ([["1.bias", "0.weight"], ["2.weight", "0.bias", "1.weight"]], []),
    ([ALL], []),  # fewer elements than the model with its buffer
]


@pytest.mark.parametrize(("groups", "buffers"), [*IN_GROUPS, ([ALL], ["mask"])])
def test_the_flat_masters_and_states_of_deepspeeds_fused_adam_become_parameters(
    groups: list[list[str]], buffers: list[str], tmp_path: Path
) -> None:
    """Those of several groups are divided by their values."""
    source, _, whole = fused(tmp_path, groups, buffers=buffers)
    fsdpckpt.convert(source, tmp_path / "full.pt", to="full")
    found = loaded(tmp_path / "full.pt")
    assert found["optimizer"].keys() == {"clip_grad", "optimizer_state_dict"}
    optimizer = found["optimizer"]["optimizer_state_dict"]
    assert [group["params"] for group in optimizer["param_groups"]] == groups
    for name, master, exp_avg in whole:
        assert identical(found["model"][name], master), name
        assert identical(optimizer["state"][name]["exp_avg"], exp_avg), name
        assert optimizer["state"][name]["step"] == 1
    # torch's optimizers add to a step in place: in one storage it would be counted once for each parameter.
    assert len({entry["step"].data_ptr() for entry in optimizer["state"].values()}) == len(whole)
    assert found["model"]["mask"].dtype is torch.bfloat16
    assert fsdpckpt.diff(source, tmp_path / "full.pt").same
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", world_size=2)
    assert fsdpckpt.diff(source, tmp_path / "dcp").same


@pytest.mark.parametrize(("groups", "buffers"), IN_GROUPS)
def test_flat_masters_whose_parameters_are_not_proved_stay_an_extra(
    groups: list[list[str]], buffers: list[str], tmp_path: Path
) -> None:
    source, _, _ = fused(tmp_path, groups, buffers=buffers)
    root = torch.load(source, weights_only=False)
    for tensor in (*root["module"].values(), *root["optimizer"]["fp32_groups_flat"]):  # no value says it either
        tensor.data.fill_(0.5)
    torch.save(root, source)
    checkpoint = opened(source)
    assert any("without the names of their parameters" in note.message for note in checkpoint.notes)
    assert checkpoint.optim is not None and checkpoint.optim.key_type == "id"
    with pytest.raises(fsdpckpt.SourceCorruptError, match="does not fit the checkpoint's own model section"):
        fsdpckpt.convert(source, tmp_path / "u", flavor="deepspeed-universal")


def in_its_own_order(*, dtype: torch.dtype = torch.bfloat16, size: int = 4) -> tuple[dict[str, Any], list[str], Any]:
    """The model's copies, the names in the order of the optimizer, and the optimizer: all parameters have one shape."""
    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(size, size)) for name in ("z.weight", "a.weight", "m.weight")}
    own = ["m.weight", "z.weight", "a.weight"]
    optimizer = torch.optim.AdamW([weights[name] for name in own])
    for leaf in weights.values():
        leaf.grad = torch.randn_like(leaf)
    optimizer.step()
    return {name: leaf.detach().to(dtype) for name, leaf in weights.items()}, own, optimizer


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 4), (torch.float16, 3), (torch.bfloat16, 300)])
def test_an_optimizer_in_another_order_than_the_model_is_tied_by_value(
    dtype: torch.dtype, size: int, tmp_path: Path
) -> None:
    model, own, optimizer = in_its_own_order(dtype=dtype, size=size)
    masters = [leaf.detach().clone() for leaf in optimizer.param_groups[0]["params"]]
    wrapper = {"optimizer": optimizer.state_dict(), "fp32_from_fp16_params": [masters]}
    source = saved(tmp_path, {"model": model, "optimizer": wrapper})
    report = fsdpckpt.convert(source, tmp_path / "full.pt", key_type="name")
    found = loaded(tmp_path / "full.pt")
    for number, name in enumerate(own):
        assert identical(found["model"][name], masters[number])
        state = found["optimizer"]["state"][name]
        assert identical(state["exp_avg"], optimizer.state_dict()["state"][number]["exp_avg"])
    assert any("the order of the model does not fit" in note.message for note in report.notes)
    fsdpckpt.convert(source, tmp_path / "weights.pt", only="model")
    require_identical(loaded(tmp_path / "weights.pt"), dict(zip(own, masters, strict=True)))


@pytest.mark.parametrize("flat", [False, True])
def test_masters_that_contradict_the_copies_are_a_problem_that_names_the_parameter(flat: bool, tmp_path: Path) -> None:
    """In a flat tensor, or for copies that another weight equals, the values do not say whose each master is."""
    model, _, optimizer = in_its_own_order()
    masters = [leaf.detach().clone() for leaf in optimizer.param_groups[0]["params"]]
    state = optimizer.state_dict()
    if flat:
        states = {key: torch.cat([state["state"][at][key].flatten() for at in range(3)]) for key in ("exp_avg",)}
        state = {"state": {0: {"step": 1, **states}}, "param_groups": [{**state["param_groups"][0], "params": [0]}]}
        wrapper = {"optimizer": state, "fp32_groups_flat": [torch.cat([leaf.flatten() for leaf in masters])]}
    else:
        model["a.weight"] = model["z.weight"].clone()
        masters[2] = masters[1].clone()
        wrapper = {"optimizer": state, "fp32_groups": [masters]}
    source = saved(tmp_path, {"model": model, "optimizer": wrapper})
    problems = fsdpckpt.verify(source).problems
    assert [problem.key for problem in problems if problem.kind == "parameter-order"] == ["z.weight"]
    with pytest.raises(fsdpckpt.SourceCorruptError, match=r"in the place of z\.weight does not round .*only='model'"):
        fsdpckpt.convert(source, tmp_path / "full.pt", key_type="name")
    fsdpckpt.convert(source, tmp_path / "weights.pt", only="model")
    require_identical(loaded(tmp_path / "weights.pt"), model)
