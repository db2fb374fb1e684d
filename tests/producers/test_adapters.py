"""Adapters alone (PEFT, LoRA) in the folders of frameworks that save them in another form than whole models, and
exports of adapters beside the state that the job resumes from.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from fsdpckpt.ir.adapters import is_adapter
from tests.oracle.compare import require_identical

pytestmark = pytest.mark.filterwarnings("ignore")  # that the number of ranks changes the batch

PREFIX = "base_model.model."
RANKS = 3
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def loaded(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """``content``, of the job that loads, with what DCP reads of ``path``."""
    dcp.load(content, checkpoint_id=path)
    return content


def weights() -> dict[str, torch.Tensor]:
    """Those of two layers, under the names of the live model; two of each shape."""
    shapes = {"lora_A.weight": (2, 5), "lora_B.weight": (7, 2)}
    return {f"layers.{n}.up.{part}": torch.randn(shape) for n in range(2) for part, shape in shapes.items()}


def trained(params: dict[str, torch.Tensor]) -> torch.optim.AdamW:
    made = [torch.nn.Parameter(value.clone()) for value in params.values()]
    optimizer = torch.optim.AdamW(made, lr=0.02)
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    return optimizer


def flattened(names: list[str], optimizer: torch.optim.AdamW) -> dict[str, Any]:
    content = optimizer.state_dict()
    states = {
        f"state.{names[key]}.{state}": value for key, kept in content["state"].items() for state, value in kept.items()
    }
    (group,) = content["param_groups"]
    settings = {f"param_groups.{name}.{key}": group[key] for name in names for key in group if key != "params"}
    return states | settings


def automodel(path: Path, params: dict[str, torch.Tensor], optim: Any, model: str = "model", at: str = "optim") -> None:
    """What Automodel's ``save_model`` and ``save_optimizer`` write for PEFT, and its recipe beside them."""
    for folder in (model, "rng", "dataloader"):
        (path / folder).mkdir(parents=True)
    save_file({f"{PREFIX}{name}": value for name, value in params.items()}, path / model / "adapter_model.safetensors")
    for name in ("adapter_config.json", "automodel_peft_config.json"):
        (path / model / name).write_text(json.dumps({"r": 2, "of": name}))
    dcp.save({"optim": optim, "sched": {"last_epoch": 1}}, checkpoint_id=path / at)
    for rank in range(RANKS):
        torch.save({"torch": torch.get_rng_state()}, path / "rng" / f"rng_global_rank_{rank}.pt")
        torch.save({"rank": rank}, path / "dataloader" / f"dataloader_dp_rank_{rank}.pt")
    torch.save({"step": 1, "epoch": 0}, path / "step_scheduler.pt")
    torch.save({"mean": torch.randn(3)}, path / "loss_tracker.pt")  # any stateful object of the recipe


def nemo_rl(policy: Path, params: dict[str, torch.Tensor]) -> None:
    """The same without what only the recipe of Automodel has."""
    automodel(policy, params, FORMS["flattened"](params), model="weights/model", at="optimizer/optim")
    (policy / "tokenizer").mkdir()
    for name in ("rng", "dataloader"):
        shutil.rmtree(policy / name)
    for name in ("step_scheduler.pt", "loss_tracker.pt"):
        (policy / name).unlink()


def in_stages(params: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Two pipeline stages: each numbers its own parameters."""
    names = list(params)
    parts = [{name: params[name] for name in some} for some in (names[:2], names[2:])]
    return {"optimizer_parts": {f"stage_{n}": trained(part).state_dict() for n, part in enumerate(parts)}}


FORMS = {
    "flattened": lambda params: flattened(list(params), trained(params)),
    "ids": lambda params: trained(params).state_dict(),
    "stages": in_stages,
}


def emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, -1)
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    return [emptied(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", FORMS)
def test_automodel_finds_its_adapter_in_the_file_that_it_opens_and_its_optimizer_as_it_was(
    tmp_path: Path, form: str
) -> None:
    params = weights()
    optim = FORMS[form](params)
    automodel(tmp_path / "epoch_0_step_1", params, optim)
    report = fsdpckpt.convert(tmp_path / "epoch_0_step_1", tmp_path / "out", world_size=2)
    written = tmp_path / "out"
    assert sorted(path.name for path in (written / "model").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "automodel_peft_config.json",
    ]  # fmt: skip
    adapter = load_file(written / "model" / "adapter_model.safetensors")
    require_identical(adapter, {f"{PREFIX}{name}": value for name, value in params.items()})
    content = loaded({"optim": emptied(optim), "sched": {"last_epoch": 0}}, written / "optim")
    require_identical(content, {"optim": optim, "sched": {"last_epoch": 1}})
    assert (written / "loss_tracker.pt").read_bytes() == (tmp_path / "epoch_0_step_1" / "loss_tracker.pt").read_bytes()
    assert not [note for note in report.notes if "plain" in note.message]
    assert fsdpckpt.verify(written, flavor="automodel", world_size=2).resumption.resumes
    assert fsdpckpt.diff(tmp_path / "epoch_0_step_1", written).same


def test_an_adapter_of_another_framework_gets_the_form_that_most_jobs_load(tmp_path: Path) -> None:
    params = weights()
    model = {f"{PREFIX}{name}": value for name, value in params.items()}
    (tmp_path / "order.txt").write_text("\n".join(model))
    torch.save({"model": model, "optimizer": trained(params).state_dict()}, tmp_path / "full.pt")
    out = tmp_path / "out"
    fsdpckpt.convert(tmp_path / "full.pt", out, flavor="automodel", world_size=2, parameters=tmp_path / "order.txt")
    keys = dcp.FileSystemReader(out / "optim").read_metadata().state_dict_metadata
    states = {key.removeprefix("optim.state.").removeprefix(PREFIX) for key in keys if key.endswith("exp_avg")}
    assert states == {f"{name}.exp_avg" for name in params}
    assert [path.name for path in (out / "model").iterdir()] == ["adapter_model.safetensors"]


def test_an_adapter_in_other_files_is_not_resumed_from(tmp_path: Path) -> None:
    params = weights()
    source = tmp_path / "epoch_0_step_1"
    automodel(source, params, FORMS["flattened"](params))
    (source / "model" / "adapter_model.safetensors").rename(source / "model" / SHARD)
    resumption = fsdpckpt.verify(source, flavor="automodel", world_size=RANKS).resumption
    assert list(map(str, resumption.missing)) == ["no model/adapter_model.safetensors, which has the adapter"]
    fsdpckpt.convert(source, tmp_path / "out", world_size=2)
    assert fsdpckpt.verify(tmp_path / "out", flavor="automodel").resumption.resumes


def test_nemo_rl_finds_its_adapter_too(tmp_path: Path) -> None:
    source = tmp_path / "policy"
    nemo_rl(source, weights())
    fsdpckpt.convert(source, tmp_path / "out", world_size=2)
    assert fsdpckpt.inspect(tmp_path / "out").to_json()["flavor"] == "nemo-rl"
    assert fsdpckpt.verify(tmp_path / "out", flavor="nemo-rl").resumption.resumes
    names = {path.name for path in (tmp_path / "out" / "weights" / "model").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "automodel_peft_config.json"}


def test_a_step_of_nemo_rl_is_its_policy_although_the_step_has_files_of_its_own(tmp_path: Path) -> None:
    policy = tmp_path / "step_3" / "policy"
    nemo_rl(policy, weights())
    torch.save({"samples": 5}, tmp_path / "step_3" / "train_dataloader.pt")
    (tmp_path / "step_3" / "training_info.json").write_text("{}")
    for source in (tmp_path, tmp_path / "step_3", policy):
        assert fsdpckpt.inspect(source).to_json()["flavor"] == "nemo-rl"
    report = fsdpckpt.convert(tmp_path / "step_3", tmp_path / "out", world_size=2)
    (note,) = (note.message for note in report.notes if note.kind == "found-below")
    assert note == (
        f"the checkpoint was found in {policy}; not copied from {tmp_path}/step_3: train_dataloader.pt, "
        "training_info.json"
    )


def test_the_way_out_of_two_candidates_leads_out(tmp_path: Path) -> None:
    """Where no path has one of them alone, the other is left out: the proposed directory has both, and is refused."""
    step = tmp_path / "run" / "checkpoint-3"
    params = weights()
    dcp.save({"model": params}, checkpoint_id=step / "pytorch_model_fsdp_0")
    states = {name: {"exp_avg": value} for name, value in params.items()}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": list(params)}]}
    dcp.save({"optimizer": optimizer}, checkpoint_id=step / "optimizer_0")
    torch.save({"step": 3}, step / "scheduler.pt")
    (step / "trainer_state.json").write_text("{}")
    (step / "ref").mkdir()
    save_file({f"{PREFIX}other.lora_A.weight": torch.randn(2, 3)}, step / "ref" / "adapter_model.safetensors")
    for source, glob in ((tmp_path / "run", "checkpoint-3/ref/"), (step, "ref/")):
        with pytest.raises(NeedsInformationError) as error:
            fsdpckpt.inspect(source)
        file = f"{glob}adapter_model.safetensors"
        said = str(error.value.next_step)
        assert f"if adapter_model.safetensors is no part of {step}/pytorch_model_fsdp_0, add " in said and file in said
        assert fsdpckpt.inspect(source, ignore_file=[file]).to_json()["flavor"] == "trainer"


def test_the_way_to_take_the_model_alone_is_said_once(tmp_path: Path) -> None:
    dcp.save({"model": weights()}, checkpoint_id=tmp_path / "run" / "pytorch_model_fsdp_0")
    torch.save({"last_epoch": 3}, tmp_path / "run" / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "run" / "rng_state.pth")
    (tmp_path / "run" / "trainer_state.json").write_text("{}")
    with pytest.raises(SourceIncompleteError, match="has no optimizer") as error:
        fsdpckpt.convert(tmp_path / "run", tmp_path / "out.pt", to="full")
    assert str(error.value).count("only='model'") == 1
    fsdpckpt.convert(tmp_path / "run", tmp_path / "out.pt", to="full", only="model")


def test_a_whole_model_never_takes_the_form_of_an_adapter(tmp_path: Path) -> None:
    torch.save({"model": {"up.weight": torch.randn(4, 3)}}, tmp_path / "whole.pt")
    fsdpckpt.convert(tmp_path / "whole.pt", tmp_path / "out", flavor="automodel", world_size=2)
    assert [path.name for path in (tmp_path / "out" / "model").iterdir()] == [SHARD]


@pytest.mark.parametrize(
    ("names", "alone"),
    [
        (["base_model.model.l.up.lora_A.weight", "base_model.model.head.weight"], True),  # modules_to_save
        (["base_model.model.l.up.lora_magnitude_vector"], True),
        (["base_model.model.l.up.lora_A.default.weight"], False),  # of the live model
        (["base_model.model.l.up.lora_A.weight", "base_model.model.l.up.base_layer.weight"], False),
        (["l.up.lora_A.weight"], False),
        (["base_model.model.head.weight"], False),
        ([], False),
    ],
)
def test_an_adapter_is_known_by_its_names(names: list[str], *, alone: bool) -> None:
    assert is_adapter(names) is alone


@pytest.mark.parametrize("producer", ["verl", "skyrl"])
def test_the_export_of_an_adapter_beside_the_state_is_no_second_model(tmp_path: Path, producer: str) -> None:
    source = tmp_path / "actor"
    (source / "lora_adapter").mkdir(parents=True)
    model = {f"{PREFIX}up.base_layer.weight": torch.randn(4, 3), f"{PREFIX}up.lora_A.default.weight": torch.randn(2, 3)}
    torch.save(model, source / "model_world_size_1_rank_0.pt")
    extra = {"lr_scheduler": None} | ({"fsdp_strategy": "fsdp2", "client_state": {}} if producer == "skyrl" else {})
    torch.save(extra, source / "extra_state_world_size_1_rank_0.pt")
    (source / "fsdp_config.json").write_text("{}")
    exported = {f"{PREFIX}up.lora_A.weight": model[f"{PREFIX}up.lora_A.default.weight"]}
    save_file(exported, source / "lora_adapter" / "adapter_model.safetensors")
    (source / "lora_adapter" / "adapter_config.json").write_text('{"r": 2}')
    assert fsdpckpt.inspect(source).to_json()["flavor"] == producer
    with fsdpckpt.open(source) as checkpoint, fsdpckpt.open(source / "lora_adapter") as export:
        assert (set(checkpoint), set(export)) == (set(model), set(exported))
    report = fsdpckpt.convert(source, tmp_path / "full.pt", only="model")
    assert f"{source}: not treated as parts of this checkpoint: lora_adapter" in str(report.notes)


def test_what_lies_beside_files_that_are_copied_is_named(tmp_path: Path) -> None:
    params = weights()
    source = tmp_path / "epoch_0_step_1"
    automodel(source, params, FORMS["flattened"](params))
    (source / "model" / "consolidate.sh").write_text(f"--input-dir {source}")  # it names this directory
    report = fsdpckpt.convert(source, tmp_path / "out", world_size=2)
    assert not (tmp_path / "out" / "model" / "consolidate.sh").exists()
    assert f"not copied from {source}/model: consolidate.sh" in [note.message for note in report.notes]
