"""Experts that become one tensor and experts again: every byte, any layout, and training that goes on as it did."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, UsageError
from tests.maps import experts
from tests.maps.experts import State
from tests.oracle.compare import identical, require_identical
from tests.oracle.fake import rank_file
from tests.oracle.fake_group import as_rank, rows
from tests.refusals import Refused


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


EXPERT = "blocks.1.experts.2.down.weight"
MOVED = "cannot be moved with its parameter"
Change = Callable[[State], object]


def of_every_entry(change: Callable[[str, State], object]) -> Change:
    """Of the states of every parameter."""

    def changed(state: State) -> None:
        for name, entry in state["optimizer"]["state"].items():
            change(name, entry)

    return changed


def in_another_group(state: State) -> None:
    first, second = state["optimizer"]["param_groups"]
    first["params"].remove(EXPERT)
    second["params"].append(EXPERT)


def not_trained(state: State) -> None:
    state["optimizer"]["param_groups"][0]["params"].remove(EXPERT)
    del state["optimizer"]["state"][EXPERT]


def weights_alone(change: Change) -> Change:
    return lambda state: (state.pop("optimizer"), change(state["model"]))


def lbfgs(saved: State) -> None:
    """It has its vectors, which join all parameters, as states of the first one, which no rule rearranges."""
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
    saved["optimizer"] = {"state": {next(iter(params)): states}, "param_groups": groups}


def unlike_its_parameter(state: str, value: Any) -> tuple[Change, Refused, str | None]:
    return (
        of_every_entry(lambda _, entry: entry.update({state: value})),
        Refused(3, [MOVED, "--only model"]),
        f".{state}",
    )


SQUARE = "head.weight"
REFUSED: dict[str, tuple[Change, Refused, str | None]] = {
    "members of different steps": (
        lambda state: state["optimizer"]["state"][EXPERT].update(step=torch.tensor(9.0)),
        Refused(3, [MOVED, "blocks.1.experts.0.down.weight"]), f"{EXPERT}.step"),
    "members of different groups": (in_another_group, Refused(3, [MOVED, "param group 0"]), EXPERT),
    "members that are not trained": (not_trained, Refused(3, f"does not train {EXPERT}"), None),
    "rows of a factor": unlike_its_parameter("exp_avg_sq_row", torch.ones(2)),
    "a list of tensors": unlike_its_parameter("preconditioner", [torch.ones(2, 2)]),
    "a number for a moment": unlike_its_parameter("exp_avg", torch.tensor(0.5)),
    "a factor, of which some have one element": (
        of_every_entry(lambda name, entry: entry.update(factor=torch.ones(1 if "expert" in name else 3))),
        Refused(3), ".factor"),
    "vectors of all parameters": (lbfgs, Refused(3, [MOVED, "of all parameters"]), None),
    # The same name elsewhere in another shape: for a square matrix, equal shapes would be a coincidence.
    "an unknown state that shapes do not prove": (
        lambda state: (of_every_entry(lambda name, entry: entry.update(novel=state["model"][name] * 3))(state),
                       state["optimizer"]["state"][SQUARE].update(novel=torch.ones(6, 6))), Refused(3), ".novel"),
    "an expert that is missing": (
        weights_alone(lambda model: model.pop(EXPERT.replace("2", "1"))),
        Refused(3, details=["blocks.1.experts.1.down.weight is missing"]), None),
    "an expert that only one layer lacks, though no number is left out": (
        weights_alone(lambda model: [model.pop(name) for name in [*model] if name.startswith("blocks.1.experts.2.")]),
        Refused(3, "blocks.1.experts.2.gate.weight is missing"), None),
    "another shape": (
        weights_alone(lambda model: model.update({EXPERT: torch.ones(6, 7)})),
        Refused(3, f"{EXPERT} does not fit"), None),
    "another dtype": (
        weights_alone(lambda model: model.update({EXPERT: torch.ones(6, 5, dtype=torch.bfloat16)})),
        Refused(3, ["several dtypes", f"{EXPERT} is bfloat16"]), None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_members_that_make_no_tensor_with_the_others_are_refused_by_name(
    name: str, saved: State, tmp_path: Path
) -> None:
    change, refused, key = REFUSED[name]
    change(saved)
    torch.save(saved, tmp_path / "apart.pt")
    error = refused.by(lambda: convert(tmp_path, "apart.pt", "fused.pt"))
    assert key is None or str(error.key).endswith(key)
    if key is not None or name == "vectors of all parameters":
        convert(tmp_path, "apart.pt", "fused.pt", only="model")


def test_a_layer_that_is_not_there_at_all_is_no_layer(saved: State, tmp_path: Path) -> None:
    torch.save({"model": {name: one for name, one in saved["model"].items() if "blocks.1" not in name}},
               tmp_path / "one.pt")  # fmt: skip
    made = torch.load(convert(tmp_path, "one.pt", "made.pt"))["model"]
    assert made["blocks.0.down"].shape[0] == experts.EXPERTS


def test_states_that_join_all_parameters_are_kept_where_a_map_only_renames(tmp_path: Path, saved: State) -> None:
    lbfgs(saved)
    torch.save(saved, tmp_path / "apart.pt")
    (states,) = saved["optimizer"]["state"].values()
    renames = tmp_path / "renames.toml"
    renames.write_text('format = 1\nrest = "keep"\n[[rule]]\nfrom = "blocks.{rest*}"\nto = "layers.{rest*}"\n')
    (found,) = torch.load(convert(tmp_path, "apart.pt", "renamed.pt", map=renames))["optimizer"]["state"].values()
    assert identical(found["prev_flat_grad"], states["prev_flat_grad"])


def test_states_of_unknown_names_numbers_of_any_form_and_averages_are_carried(tmp_path: Path, saved: State) -> None:
    """A state of an unknown name is moved as its shapes prove. Each parameter has a number of its own."""
    for name, entry in saved["optimizer"]["state"].items():
        entry.update(step=torch.tensor([5.0]), calls=7, momentum_buffer=None, novel=saved["model"][name] * 3)
    average = {name: value + 1 for name, value in saved["model"].items()}
    torch.save({**saved, "ema": average}, tmp_path / "apart.pt")
    made = torch.load(convert(tmp_path, "apart.pt", "fused.pt"))
    novel = {name: value * 3 for name, value in experts.written_out(saved["model"]).items()}
    require_identical(states(made, "novel"), novel)
    require_identical(made["model"], experts.written_out(saved["model"]))
    require_identical(made["ema"], experts.written_out(average))
    back = torch.load(convert(tmp_path, "fused.pt", "back.pt", inverse=True))["optimizer"]["state"]
    assert all((entry["calls"], entry["momentum_buffer"]) == (7, None) for entry in back.values())
    assert all(identical(entry["step"], torch.tensor([5.0])) for entry in back.values())
    back["embed.weight"]["step"] += 1  # as an optimizer does
    back["blocks.0.experts.0.gate.weight"]["step"] += 1
    for other in ("experts.1.gate", "experts.0.up"):
        assert back[f"blocks.0.{other}.weight"]["step"].item() == 5


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
