"""Experts that become one tensor and experts again: every byte, any layout, and training that goes on as it did."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError, SourceUnsupportedError, UsageError
from tests.maps import experts
from tests.maps.experts import State
from tests.oracle.compare import identical, require_identical
from tests.oracle.fake import rank_file
from tests.oracle.fake_group import as_rank, rows


def convert(tmp_path: Path, source: str, target: str, **options: Any) -> Path:
    options.setdefault("map", tmp_path / "experts.toml")
    fsdpckpt.convert(tmp_path / source, tmp_path / target, verify="full", **options)
    return tmp_path / target


def states(state: State, name: str) -> State:
    return {key: entry[name] for key, entry in state["optimizer"]["state"].items()}


def test_a_map_gives_what_torch_gives_for_parameters_and_their_states(tmp_path: Path, saved: State) -> None:
    made = torch.load(convert(tmp_path, "apart.pt", "fused.pt"))
    require_identical(made["model"], experts.written_out(saved["model"]))
    for state in ("exp_avg", "exp_avg_sq"):
        require_identical(states(made, state), experts.written_out(states(saved, state)))
    assert {float(entry["step"]) for entry in made["optimizer"]["state"].values()} == {2.0}
    others, routers = (group["params"] for group in made["optimizer"]["param_groups"])
    assert routers == [f"blocks.{block}.router.{part}" for block in range(2) for part in ("weight", "bias")]
    assert others[:3] == ["tokens.weight", "blocks.0.gate_up", "blocks.0.down"]
    assert [group["lr"] for group in made["optimizer"]["param_groups"]] == [0.01, 0.005]


@pytest.mark.parametrize(
    "target",
    [
        {"to": "sharded", "world_size": 4},
        {"to": "sharded", "world_size": 3, "container": "torch"},
        {"to": "flattened", "world_size": 3, "unit": "blocks.*", "use_orig_params": True},
        {"to": "flattened", "world_size": 2, "unit": "none", "use_orig_params": False, "only": "model"},
        {"nproc_per_node": 2, "to": "sharded", "world_size": 4},
    ],
    ids=lambda target: "-".join(map(str, target.values())),
)
def test_a_map_and_its_inverse_give_the_bytes_back_in_every_layout(
    tmp_path: Path, saved: State, target: dict[str, Any]
) -> None:
    if target["to"] == "flattened":  # the order of the model that is made is that of its job
        names = [name for name, _ in experts.fused().named_parameters()]
        (tmp_path / "names.txt").write_text("\n".join(names))
        target["parameters"] = tmp_path / "names.txt"
    convert(tmp_path, "apart.pt", "fused", **target)
    direct = convert(tmp_path, "apart.pt", "fused.pt")
    assert fsdpckpt.diff(direct, tmp_path / "fused", only=target.get("only")).same
    if target.get("only"):
        return
    back = torch.load(convert(tmp_path, "fused", "back.pt", inverse=True, to="full", key_type="name"))
    require_identical(back["model"], saved["model"])
    for state in ("exp_avg", "exp_avg_sq", "step"):
        require_identical(states(back, state), states(saved, state))


def test_training_goes_on_with_other_tensors_as_it_would_have(tmp_path: Path, saved: State) -> None:
    convert(tmp_path, "apart.pt", "fused.pt")
    convert(tmp_path, "fused.pt", "back.pt", inverse=True)
    went_on: dict[str, State] = {}
    losses = {}
    for name, model in (("apart", experts.apart()), ("back", experts.apart()), ("fused", experts.fused())):
        optimizer = experts.optimizer_of(model)
        experts.load(tmp_path / f"{name}.pt", model, optimizer)
        losses[name] = experts.train(model, optimizer, steps=range(2, 4))
        went_on[name] = experts.by_name(model, optimizer)
    assert losses["apart"] == losses["back"] == losses["fused"] and len(set(losses["apart"])) == 2
    require_identical(went_on["back"]["model"], went_on["apart"]["model"])
    require_identical(went_on["fused"]["model"], experts.written_out(went_on["apart"]["model"]))
    for state in ("exp_avg", "exp_avg_sq"):
        require_identical(states(went_on["fused"], state), experts.written_out(states(went_on["apart"], state)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_gets_what_fsdp2_holds_of_the_other_model(tmp_path: Path, saved: State, world_size: int) -> None:
    convert(tmp_path, "apart.pt", "ranks", to="sharded", container="torch", world_size=world_size)
    weights = experts.written_out(saved["model"])
    moments = {state: experts.written_out(states(saved, state)) for state in ("exp_avg", "exp_avg_sq")}
    for rank in range(world_size):
        with as_rank(rank, world_size):
            model = experts.fused()
            model.load_state_dict(weights)
            for module in (*model.blocks, model):
                fully_shard(module)
            optim = rank_file(tmp_path / "ranks", "optim", world_size, rank)["state"]
            written = rank_file(tmp_path / "ranks", "model", world_size, rank)
            for name, held in model.state_dict().items():
                assert written[name].placements == held.placements
                assert identical(written[name].to_local(), held.to_local()), name
                for state, whole in moments.items():
                    expected = rows(whole[name], rank, world_size)
                    assert identical(optim[name][state].to_local(), expected), name


def test_the_record_says_which_map_made_it(tmp_path: Path, saved: State) -> None:
    convert(tmp_path, "apart.pt", "fused", to="sharded", world_size=2)
    recorded = json.loads((tmp_path / "fused" / "fsdpckpt.json").read_text())["maps"][0]
    assert recorded["sha256"] == hashlib.sha256(experts.MAP.encode()).hexdigest()
    assert (recorded["name"], recorded["inverse"]) == (str(tmp_path / "experts.toml"), False)
    assert [rule["applied"] for rule in recorded["rules"]] == [2, 2, 1]


def edited(tmp_path: Path, saved: State, change: Any) -> None:
    change(saved)
    torch.save(saved, tmp_path / "apart.pt")


EXPERT = "blocks.1.experts.2.down.weight"


def test_members_of_different_steps_are_refused_by_name(tmp_path: Path, saved: State) -> None:
    edited(tmp_path, saved, lambda state: state["optimizer"]["state"][EXPERT].update(step=torch.tensor(9.0)))
    with pytest.raises(SourceUnsupportedError, match="cannot be moved with its parameter") as error:
        convert(tmp_path, "apart.pt", "fused.pt")
    assert error.value.key == f"{EXPERT}.step" and "blocks.1.experts.0.down.weight" in str(error.value.why)


def test_members_of_different_groups_are_refused_by_name(tmp_path: Path, saved: State) -> None:
    def change(state: State) -> None:
        first, second = state["optimizer"]["param_groups"]
        first["params"].remove(EXPERT)
        second["params"].append(EXPERT)

    edited(tmp_path, saved, change)
    with pytest.raises(SourceUnsupportedError, match="cannot be moved with its parameter") as error:
        convert(tmp_path, "apart.pt", "fused.pt")
    assert error.value.key == EXPERT and "param group 0" in str(error.value.why)


def test_members_that_are_not_trained_are_refused_by_name(tmp_path: Path, saved: State) -> None:
    def change(state: State) -> None:
        state["optimizer"]["param_groups"][0]["params"].remove(EXPERT)
        del state["optimizer"]["state"][EXPERT]

    edited(tmp_path, saved, change)
    with pytest.raises(SourceUnsupportedError) as error:
        convert(tmp_path, "apart.pt", "fused.pt")
    assert f"does not train {EXPERT}" in str(error.value.why)


@pytest.mark.parametrize("state", ["exp_avg_sq_row", "preconditioner", "exp_avg"])
def test_states_that_do_not_have_the_elements_of_their_parameter_are_refused_by_name(
    tmp_path: Path, saved: State, state: str
) -> None:
    def change(saved: State) -> None:
        for entry in saved["optimizer"]["state"].values():
            entry[state] = {
                "exp_avg_sq_row": torch.ones(2),
                "preconditioner": [torch.ones(2, 2)],
                "exp_avg": torch.tensor(0.5),
            }[state]

    edited(tmp_path, saved, change)
    with pytest.raises(SourceUnsupportedError, match="cannot be moved with its parameter") as error:
        convert(tmp_path, "apart.pt", "fused.pt")
    assert str(error.value.key).endswith(f".{state}") and "--only model" in error.value.text
    convert(tmp_path, "apart.pt", "fused.pt", only="model")


def test_lbfgs_whose_vectors_join_all_parameters_is_refused_unless_the_map_only_renames(
    tmp_path: Path, saved: State
) -> None:
    """It has them as states of the first parameter, which no rule rearranges."""
    params = {name: torch.nn.Parameter(value) for name, value in saved["model"].items()}
    optimizer = torch.optim.LBFGS(params.values(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((value.square().sum() for value in params.values()), torch.zeros(()))
        loss.backward()
        return loss

    optimizer.step(closure)
    (states,) = optimizer.state_dict()["state"].values()
    groups = [{"params": list(params)}]
    state = {"model": saved["model"], "optimizer": {"state": {next(iter(params)): states}, "param_groups": groups}}
    torch.save(state, tmp_path / "apart.pt")
    with pytest.raises(SourceUnsupportedError, match="cannot be moved with its parameter") as error:
        convert(tmp_path, "apart.pt", "fused.pt")
    assert str(error.value.key).startswith(next(iter(params))) and "of all parameters" in str(error.value.why)
    convert(tmp_path, "apart.pt", "fused.pt", only="model")
    renames = tmp_path / "renames.toml"
    renames.write_text('format = 1\nrest = "keep"\n[[rule]]\nfrom = "blocks.{rest*}"\nto = "layers.{rest*}"\n')
    (found,) = torch.load(convert(tmp_path, "apart.pt", "renamed.pt", map=renames))["optimizer"]["state"].values()
    assert identical(found["prev_flat_grad"], states["prev_flat_grad"])


def test_a_state_of_an_unknown_name_is_moved_only_if_shapes_prove_what_it_is(tmp_path: Path, saved: State) -> None:
    def change(saved: State) -> None:
        for name, entry in saved["optimizer"]["state"].items():
            entry["novel"] = saved["model"][name] * 3

    edited(tmp_path, saved, change)
    made = torch.load(convert(tmp_path, "apart.pt", "fused.pt"))
    require_identical(
        states(made, "novel"), {name: value * 3 for name, value in experts.written_out(saved["model"]).items()}
    )
    # The same name elsewhere in another shape: for a square matrix, equal shapes would be a coincidence.
    edited(tmp_path, saved, lambda state: state["optimizer"]["state"]["head.weight"].update(novel=torch.ones(6, 6)))
    with pytest.raises(SourceUnsupportedError) as error:
        convert(tmp_path, "apart.pt", "again.pt")
    assert str(error.value.key).endswith(".novel")


def test_numbers_of_any_form_are_carried_and_each_parameter_has_its_own(tmp_path: Path, saved: State) -> None:
    def change(saved: State) -> None:
        for entry in saved["optimizer"]["state"].values():
            entry.update(step=torch.tensor([5.0]), calls=7, momentum_buffer=None)

    edited(tmp_path, saved, change)
    convert(tmp_path, "apart.pt", "fused.pt")
    back = torch.load(convert(tmp_path, "fused.pt", "back.pt", inverse=True))["optimizer"]["state"]
    assert all((entry["calls"], entry["momentum_buffer"]) == (7, None) for entry in back.values())
    assert all(identical(entry["step"], torch.tensor([5.0])) for entry in back.values())
    back["embed.weight"]["step"] += 1  # as an optimizer does
    back["blocks.0.experts.0.gate.weight"]["step"] += 1
    assert (
        back["blocks.0.experts.1.gate.weight"]["step"].item()
        == back["blocks.0.experts.0.up.weight"]["step"].item()
        == 5
    )


def test_a_factor_of_one_element_is_no_number(tmp_path: Path, saved: State) -> None:
    def change(saved: State) -> None:
        for name, entry in saved["optimizer"]["state"].items():
            entry["factor"] = torch.ones(1 if "expert" in name else 3)

    edited(tmp_path, saved, change)
    with pytest.raises(SourceUnsupportedError) as error:
        convert(tmp_path, "apart.pt", "fused.pt")
    assert str(error.value.key).endswith(".factor")


def test_averages_of_the_weights_are_mapped_like_the_weights(tmp_path: Path, saved: State) -> None:
    average = {name: value + 1 for name, value in saved["model"].items()}
    torch.save({**saved, "ema": average}, tmp_path / "average.pt")
    made = torch.load(convert(tmp_path, "average.pt", "fused.pt"))
    require_identical(made["model"], experts.written_out(saved["model"]))
    require_identical(made["ema"], experts.written_out(average))


def test_an_expert_that_is_missing_is_named(tmp_path: Path, saved: State) -> None:
    edited(tmp_path, saved, lambda state: (state["model"].pop(EXPERT.replace("2", "1")), state.pop("optimizer")))
    with pytest.raises(SourceIncompleteError) as error:
        convert(tmp_path, "apart.pt", "fused.pt")
    assert error.value.details == ("blocks.1.experts.1.down.weight is missing",)


def test_tensors_of_other_shapes_or_dtypes_are_refused_by_name(tmp_path: Path, saved: State) -> None:
    edited(tmp_path, saved, lambda state: (state.pop("optimizer"), state["model"].update({EXPERT: torch.ones(6, 7)})))
    with pytest.raises(SourceUnsupportedError, match=r"blocks\.1\.experts\.2\.down\.weight does not fit"):
        convert(tmp_path, "apart.pt", "fused.pt")
    edited(tmp_path, saved, lambda state: state["model"].update({EXPERT: torch.ones(6, 5, dtype=torch.bfloat16)}))
    with pytest.raises(SourceUnsupportedError, match="several dtypes") as error:
        convert(tmp_path, "apart.pt", "fused.pt")
    assert f"{EXPERT} is bfloat16" in error.value.details


def test_a_map_of_the_other_direction_is_recognised(tmp_path: Path, saved: State) -> None:
    with pytest.raises(UsageError, match="did you mean inverse=False"):
        convert(tmp_path, "apart.pt", "x.pt", inverse=True)
    convert(tmp_path, "apart.pt", "fused.pt")
    with pytest.raises(UsageError, match="did you mean inverse=True"):
        convert(tmp_path, "fused.pt", "x.pt")


def test_ids_are_not_made_for_a_model_whose_order_nothing_says(tmp_path: Path, saved: State) -> None:
    fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "ids.pt", key_type="id")
    with pytest.raises(NeedsInformationError, match="order in which"):
        convert(tmp_path, "ids.pt", "fused.pt")
    by_name = convert(tmp_path, "ids.pt", "fused.pt", key_type="name")
    assert fsdpckpt.diff(by_name, convert(tmp_path, "apart.pt", "direct.pt")).same


def test_an_expert_that_only_one_layer_lacks_is_named_though_no_number_is_left_out(
    saved: State, tmp_path: Path
) -> None:
    last = f"blocks.1.experts.{experts.EXPERTS - 1}."
    model = {name: value for name, value in saved["model"].items() if not name.startswith(last)}
    torch.save({"model": model}, tmp_path / "fewer.pt")
    with pytest.raises(SourceIncompleteError) as error:
        fsdpckpt.convert(tmp_path / "fewer.pt", tmp_path / "x.pt", map=tmp_path / "experts.toml")
    assert f"{last}down.weight is missing" in str(error.value) or f"{last}gate.weight is missing" in str(error.value)
    torch.save({"model": {name: value for name, value in model.items() if "blocks.1" not in name}}, tmp_path / "one.pt")
    fsdpckpt.convert(tmp_path / "one.pt", tmp_path / "y.pt", map=tmp_path / "experts.toml")
    assert torch.load(tmp_path / "y.pt")["model"]["blocks.0.down"].shape[0] == experts.EXPERTS
