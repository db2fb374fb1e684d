"""The layer files of a pipeline of one stage, as DeepSpeed 0.19's ``PipelineModule.save_state_dict`` writes them.

The names and the empty ``module`` are those of a run of the library on one process: an embedding that is tied to the
head, a layer with a buffer, a function without a file, a norm.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from tests.makers import Make
from tests.makers import files as torch_files
from tests.oracle.compare import identical
from tests.readers.contents import opened, same_values
from tests.refusals import Refusal, corrupt, each_of, incomplete, unsupported

TRAINED = {  # in the order of the optimizer
    "tied_modules.embed.e.weight": torch.randn(11, 6),
    "1.l.weight": torch.randn(6, 6),
    "1.l.bias": torch.randn(6),
    "3.weight": torch.randn(6),
    "3.bias": torch.randn(6),
}
BUFFERS = {"tied_modules.embed.scale": torch.full((3,), 2.0), "1.count": torch.arange(4)}
STATES = {name: {"exp_avg": torch.randn_like(value)} for name, value in TRAINED.items()}
PREFIXES = {0: "tied_modules.embed", 1: "1", 3: "3"}
RANKS = 2


def parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The ranks' parts of one flat tensor; the padding is taken off the last."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    part = -(-len(flat) // RANKS)
    return [flat[rank * part : (rank + 1) * part].clone() for rank in range(RANKS)]


def files(layer: str = "layer_{:02d}-model_states.pt") -> dict[str, Any]:
    module = {**TRAINED, **BUFFERS}
    saved: dict[str, Any] = {
        layer.format(number): {
            name.removeprefix(f"{prefix}."): value for name, value in module.items() if name.startswith(f"{prefix}.")
        }
        for number, prefix in PREFIXES.items()
    }
    shapes = OrderedDict((name, value.shape) for name, value in TRAINED.items())
    described = {"buffer_names": list(BUFFERS), "param_shapes": [shapes], "frozen_param_shapes": None}
    described |= {"shared_params": {}, "frozen_param_fragments": None, "optimizer": None}
    ranks = {"dp_world_size": RANKS, "mp_world_size": 1, "global_steps": 1}
    saved["mp_rank_00_model_states.pt"] = {"module": None, **described, **ranks}
    weights, moments = parts(list(TRAINED.values())), parts([state["exp_avg"] for state in STATES.values()])
    for rank in range(RANKS):
        state = {0: {"step": torch.tensor(1.0), "exp_avg": moments[rank]}}
        base = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
        padding = [len(weights[0]) * RANKS - sum(map(len, weights)) if rank == RANKS - 1 else 0]
        states = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [weights[rank]], "zero_stage": 1}
        states |= {"group_paddings": padding, "partition_count": [RANKS]}
        saved[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": states}
    return saved


@pytest.mark.parametrize("layer", ["layer_{:02d}-model_states.pt", "layer_{:02d}-model_00-model_states.pt"])
def test_one_stage_is_read_with_its_optimizer(layer: str, tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step1"
    torch_files(lambda: files(layer))(step)
    (step.parent / "latest").write_text("global_step1")
    found = opened(step.parent)
    states = {name: {**state, "step": torch.tensor(1.0)} for name, state in STATES.items()}
    groups = [{"lr": 0.1, "params": list(TRAINED)}]
    same_values(found, model={**TRAINED, **BUFFERS}, optim={"state": states, "param_groups": groups})
    assert list(found.model.params)[:2] == ["tied_modules.embed.e.weight", "tied_modules.embed.scale"]  # type: ignore[union-attr]
    assert found.problems == () and all(entry.read_as for entry in found.ledger.account.entries)
    assert all(file.fate == "read" for file in found.ledger.account.files)
    fsdpckpt.convert(step.parent, tmp_path / "full.pt", verify="full")
    written = torch.load(tmp_path / "full.pt")["model"]
    assert all(identical(written[name], value) for name, value in {**TRAINED, **BUFFERS}.items())


def tied(last: bool = True, **others: dict[str, torch.Tensor]) -> Make:
    """A step whose tied embedding calls its weight as other layers do, is the ``last`` layer, too, and ``others``."""

    def made() -> dict[str, Any]:
        saved = files()
        names = {"tied_modules.embed.e.weight": "tied_modules.embed.weight"}
        saved[MODULE]["param_shapes"] = [
            OrderedDict((names.get(name, name), value.shape) for name, value in TRAINED.items())
        ]
        embedding = saved["layer_00-model_states.pt"]
        embedding = {"weight": embedding.pop("e.weight"), **embedding}
        saved |= dict.fromkeys(["layer_00-model_states.pt", *["layer_05-model_states.pt"] * last], embedding)
        return saved | {f"{name}-model_states.pt": {**embedding, **entries} for name, entries in others.items()}

    return torch_files(made)


@pytest.mark.parametrize("last", [True, False])
def test_a_tied_layer_may_call_its_weight_like_others_and_be_in_several_files(last: bool, tmp_path: Path) -> None:
    """``nn.Embedding`` and ``nn.LayerNorm`` both have ``weight``: which of them a layer is was not told apart."""
    tied(last)(tmp_path / "step")
    assert opened(tmp_path / "step").problems == ()
    weight = {"tied_modules.embed.weight": TRAINED["tied_modules.embed.e.weight"]}
    others = {name: value for name, value in {**TRAINED, **BUFFERS}.items() if name != "tied_modules.embed.e.weight"}
    fsdpckpt.convert(tmp_path / "step", tmp_path / "full.pt", only="model")
    written = torch.load(tmp_path / "full.pt")
    assert written.keys() == {*weight, *others}
    assert all(identical(written[name], value) for name, value in {**weight, **others}.items())


def changed(lose: str = "", **contents: Any) -> Make:
    """A maker of ``files``: without some, and with more of the module states or under the names of layers."""

    def made() -> dict[str, Any]:
        saved = {name: content for name, content in files().items() if not lose or lose not in name}
        for name, content in contents.items():
            if name.startswith("layer"):
                saved[f"{name}-model_states.pt"] = content
            else:
                saved[MODULE][name] = content
        return saved

    return torch_files(made)


MODULE = "mp_rank_00_model_states.pt"
OF_SECOND_STAGE = [f"zero_pp_rank_{rank}_mp_rank_01_optim_states.pt" for rank in range(RANKS)]
THIRD = {"weight": TRAINED["3.weight"], "bias": torch.zeros(3)}
FROZEN = "layer_04-model_states.pt: cannot tell what the module calls this pipeline layer"
REFUSALS = (
    unsupported("tensor-parallel ranks by their names", torch_files(lambda: {**files(),
                "layer_03-model_01-model_states.pt": {"weight": torch.ones(6)}}), "files of pipeline stages",
                omits=("--ignore-file",)),
    unsupported("tensor-parallel ranks as recorded", changed(checkpoint_parallel_dimensions={"pp_degree": 1,
                "tp_degree": 2}), "files of pipeline stages", "found 2 tensor-parallel ranks in each stage"),
    # The number of stages is in each file of module states.
    incomplete("a stage is missing", changed(mp_world_size=2), *OF_SECOND_STAGE, "mp_rank_01_model_states.pt"),
    incomplete("the states of a stage are missing", torch_files(lambda: {**files(), "mp_rank_01_model_states.pt":
               {"module": None}}), *OF_SECOND_STAGE, omits=("- mp_rank_01_model_states.pt",)),
    incomplete("a layer is missing", changed("layer_03"), "2 entries that no file of a layer contains",
               "\n  - 3.weight\n  - 3.bias\n"),
    corrupt("a layer of another shape", changed(layer_03=THIRD), "3.bias has another shape"),
    unsupported("a layer more", changed(layer_04={"frozen": torch.ones(2)}),
                "cannot tell what the module calls this pipeline layer"),
    # A frozen layer, of which nothing is recorded, with the names of the tied one, which is before and after it.
    unsupported("a frozen layer with an entry more", tied(layer_04={"bias": torch.ones(6)}), FROZEN),
    unsupported("a frozen layer of another shape", tied(layer_04={"weight": torch.ones(6)}), FROZEN),
    unsupported("a frozen layer of the same shape", tied(layer_04={"weight": torch.ones(11, 6)}), FROZEN),
    unsupported("layers without ZeRO", changed("optim"), "pipeline stages without the states of ZeRO"),
)  # fmt: skip


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)
