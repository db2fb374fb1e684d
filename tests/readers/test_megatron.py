"""Megatron-core's checkpoints: what Megatron saved, and every way in which files can contradict each other."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves, tree_map

import fsdpckpt
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.optimizer import group_params
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import UNREAD
from fsdpckpt.loading import StorageReader
from fsdpckpt.readers.dcp import open_directory
from fsdpckpt.readers.dcp.megatron import MegatronReader
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.testing import WEIGHTS, ReaderContract
from tests.golden.megatron.net import Net
from tests.makers import Change, Make, dcp_of, edit, files, lose, packed, put, with_truth
from tests.oracle.compare import identical, require_identical, require_parts
from tests.oracle.fake_group import as_rank
from tests.readers.contents import opened
from tests.refusals import Refusal, corrupt, each_of, incomplete, misused, unclear, unsupported

GOLDEN = Path(__file__).parent.parent / "golden" / "megatron"
WHOLE = ("uneven", "reshardable", "flattened-range", "flattened-range-0.12")
each = pytest.mark.parametrize("name", WHOLE)
STANDARD = ("standard",)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_truth(tmp_path_factory.mktemp("megatron"), GOLDEN.glob("*.tar.xz"))


@pytest.fixture(scope="module")
def full(golden: Path) -> Callable[[str], Any]:
    """One full file of each, converted once."""
    made: dict[str, Any] = {}

    def convert(name: str) -> Any:
        if name not in made:
            fsdpckpt.convert(golden / name, golden / f"{name}-full.pt", no_weight_decay=STANDARD)
            made[name] = torch.load(golden / f"{name}-full.pt")
        return made[name]

    return convert


def truth(golden: Path, name: str) -> Any:
    return torch.load(golden / f"{name}.pt")


@each
def test_every_value_is_what_the_ranks_held(name: str, golden: Path, full: Callable[[str], Any]) -> None:
    state = full(name)
    expected = truth(golden, name)["params"]
    assert set(state["model"]) == set(expected)
    for key, values in expected.items():
        assert identical(state["model"][key], values["param"]), key
        assert identical(state["model"][key].to(values["copy"].dtype), values["copy"]), key
    moments = {key: {name: values[name] for name in ("exp_avg", "exp_avg_sq")} for key, values in expected.items()}
    steps = {key: {**states, "step": torch.tensor(3.0)} for key, states in moments.items()}
    require_identical(state["optimizer"]["state"], steps)
    decayed, others = state["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert "step" not in decayed
    ends = ("bias", "layer_norm_weight", "final_layernorm.weight")
    assert {param.endswith(ends) for param in others["params"]} == {True}
    assert {param.endswith(ends) for param in decayed["params"]} == {False}


@each
def test_inspect_sees_shapes_without_opening_data(name: str, golden: Path) -> None:
    lazy, located = opened(golden / name, locate=Locate.NOTHING), opened(golden / name)
    shapes, same = ([(one.key, one.tensor.shape) for one in each.tensors()] for each in (lazy, located))
    assert shapes == same and not is_located(lazy) and is_located(located)
    assert lazy.flavor == "megatron"
    assert lazy.world_size == (2 if name == "reshardable" else 4)  # one data-parallel rank gathers and writes


def test_experts_are_where_megatron_counts_them(golden: Path, full: Callable[[str], Any]) -> None:
    state = full("experts")
    for rank, held in enumerate(truth(golden, "experts")["ranks"]):
        for name, copy in held["params"].items():
            _, layer, rest = name.partition("decoder.layers.")
            if not layer:
                assert identical(state["model"][name].bfloat16(), copy)
                continue
            number, _, rest = rest.partition(".")
            _, expert, local = rest.partition("mlp.experts.local_experts.")
            if not expert:
                continue
            local, _, weight = local.partition(".")
            stacked = state["model"][f"decoder.layers.mlp.experts.experts.{weight}"]
            assert identical(stacked[int(number), 2 * rank + int(local)].bfloat16(), copy), name
    groups = state["optimizer"]["param_groups"]
    assert [(group["is_expert_parallel"], group["wd_mult"]) for group in groups] == [(False, 1), (False, 0), (True, 1)]
    assert all(".experts.experts." in name for name in groups[2]["params"])
    assert len(groups[2]["params"]) == 2


def test_training_goes_on_with_the_same_losses(golden: Path, full: Callable[[str], Any]) -> None:
    """Without Megatron, on one process that averages the gradients of both data-parallel ranks."""
    state = deepcopy(full("reshardable"))  # an optimizer steps in the tensors that it is given
    groups = state["optimizer"]["param_groups"]
    net = Net()
    net.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW([{"params": [net.get_parameter(name) for name in one["params"]]} for one in groups])
    names = [name for group in groups for name in group["params"]]
    ids = {number: state["optimizer"]["state"][name] for number, name in enumerate(names)}
    numbered = [{**group, "params": [names.index(name) for name in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": ids, "param_groups": numbered})
    generators = [torch.Generator().manual_seed(5 + rank) for rank in range(2)]
    for generator in generators:
        for _ in range(3):
            torch.randint(0, 16, (2, 8), generator=generator)
    losses: list[list[float]] = [[] for _ in generators]
    for _ in range(3):
        optimizer.zero_grad()
        for rank, generator in enumerate(generators):
            tokens = torch.randint(0, 16, (2, 8), generator=generator)
            predicted = net(tokens).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(predicted, torch.roll(tokens, -1, 1).flatten())
            losses[rank].append(loss.item())
            (loss / 2).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    saved = truth(golden, "reshardable")["losses"]
    assert torch.allclose(torch.tensor(losses), _by_data_rank(saved), rtol=1e-5, atol=0)


def _by_data_rank(losses: list[list[float]]) -> torch.Tensor:
    """Tensor parallel ranks are neighbours, and have the same losses."""
    assert losses[0] == losses[1]
    return torch.tensor([losses[0], losses[2]])


@each
def test_links_are_items_of_their_own_shape(
    name: str, golden: Path, full: Callable[[str], Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"to": "sharded", "container": "dcp", "no_weight_decay": STANDARD, "link": "hardlink"}
    if name.startswith("flattened-range"):  # an item holds a range of a shard, which is no box of the tensor
        with pytest.raises(UsageError, match="no file of DST would be the same"):
            fsdpckpt.convert(str(golden / name), str(tmp_path / "dcp"), **options)
        return
    report = fsdpckpt.convert(str(golden / name), str(tmp_path / "dcp"), **options)
    assert any(file.source is not None for file in report.files)
    expected = {key: full(name)[key] for key in ("model", "optimizer")}
    found = tree_map(lambda one: torch.zeros_like(one) if torch.is_tensor(one) else one, expected)
    load(found, storage_reader=FileSystemReader(str(tmp_path / "dcp")), no_dist=True)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert identical(one, other) if torch.is_tensor(other) else one == other


@pytest.mark.parametrize(("direct", "ranks", "rank"), [(False, 3, 1), (True, 5, 2)])
def test_fsdp2_loads_it_on_another_number_of_ranks(
    direct: bool, ranks: int, rank: int, golden: Path, tmp_path: Path
) -> None:
    """PyTorch's own ``dcp.load``, of what was converted and of Megatron's files themselves."""
    source, target = golden / "flattened-range", tmp_path / "dcp"
    expected = truth(golden, "flattened-range")["params"]
    fsdpckpt.convert(str(source), str(target), to="sharded", world_size=2, no_weight_decay=STANDARD)
    with as_rank(rank, ranks):
        net = fully_shard(Net(), mesh=init_device_mesh("cpu", (ranks,)))
        groups: list[list[torch.nn.Parameter]] = [[], []]
        for name, param in net.named_parameters():
            groups[param.ndim - (".layers." in name) == 1].append(param)
        optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        model, optim = get_state_dict(net, optimizer)
        reader: Any = StorageReader(source, no_weight_decay=STANDARD) if direct else FileSystemReader(target)
        load({"model": model, "optimizer": optim}, storage_reader=reader, no_dist=True)
    for name, values in expected.items():
        held: dict[str, Any] = {"param": model[name], **optim["state"][name]}
        for key in ("param", "exp_avg", "exp_avg_sq"):
            rows = values[key].chunk(ranks)
            own = rows[rank] if rank < len(rows) else values[key][:0]
            assert identical(held[key].to_local(), own), (name, key)
        assert held["step"].item() == 3
    assert [group["weight_decay"] for group in optim["param_groups"]] == [0.5, 0.0]


def test_extras_need_no_megatron_and_that_masters_are_the_weights_is_said(
    golden: Path, full: Callable[[str], Any]
) -> None:
    state = full("reshardable")
    assert state["iteration"] == 3
    assert state["args"] == {"num_layers": 3, "params_dtype": torch.float32, "iteration": 3}
    assert state["opt_param_scheduler"] == {"max_lr": 1e-2, "num_steps": 3}
    assert len(state["rng_state/shard_0.1_1.2"][0][0]["torch_rng_state"]) == 64
    assert not [key for key in state if "_extra_state" in key]
    for name, count in (("flattened-range", 1), ("reshardable", 0)):
        notes = [note.message for note in opened(golden / name).notes if note.kind == "master-weights"]
        assert len(notes) == count and all("not the bfloat16 copies" in note for note in notes)


def test_weights_in_one_command(golden: Path, tmp_path: Path) -> None:
    """Those of a checkpoint whose buffers of many parameters leave the optimizer without names, too."""
    assert not fsdpckpt.verify(golden / "buffers").problems
    fsdpckpt.convert(golden / "buffers", tmp_path / "buffers.safetensors", only="model")
    target = tmp_path / "flattened-range.safetensors"
    fsdpckpt.convert(golden / "flattened-range", target, only="model", dtype="bfloat16")
    for name in ("buffers", "flattened-range"):
        weights = load_file(tmp_path / f"{name}.safetensors")
        require_parts(weights, {key: values["copy"] for key, values in truth(golden, name)["params"].items()})


class TestGroups:
    def test_globs_say_it(self, golden: Path, tmp_path: Path) -> None:
        fsdpckpt.convert(str(golden / "uneven"), str(tmp_path / "full.pt"), no_weight_decay=("*bias", "embedding.*"))
        decayed, others = torch.load(tmp_path / "full.pt")["optimizer"]["param_groups"]
        assert "embedding.word_embeddings.weight" in others["params"]
        assert "decoder.final_layernorm.weight" in decayed["params"]

    def test_equal_groups_are_one(self, golden: Path, tmp_path: Path) -> None:
        of_golden("uneven", group(1))(tmp_path)
        fsdpckpt.convert(tmp_path / "uneven", tmp_path / "full.pt")
        (only,) = torch.load(tmp_path / "full.pt")["optimizer"]["param_groups"]
        assert len(only["params"]) == 16


class TestMegatronFsdp:
    """``fsdp_dtensor``: DCP with the halves of SwiGLU apart, and settings of param groups by parameter."""

    def test_every_value_and_setting_is_what_the_ranks_held(self, golden: Path, tmp_path: Path) -> None:
        fsdpckpt.convert(str(golden / "fsdp-dtensor"), str(tmp_path / "full.pt"))
        state, expected = torch.load(tmp_path / "full.pt"), truth(golden, "fsdp-dtensor")
        assert set(state["model"]) == set(state["optimizer"]["state"]) == set(expected["params"])
        for name, values in expected["params"].items():
            require_identical(state["model"][name], values.pop("param"), name)
            require_identical(state["optimizer"]["state"][name], values, name)
        settings = {
            name: {key: value for key, value in group.items() if key != "params"}
            for group in state["optimizer"]["param_groups"]
            for name in group["params"]
        }
        assert settings == expected["settings"]
        assert {group["weight_decay"] for group in state["optimizer"]["param_groups"]} == {0.0, 0.5}
        assert state["args"] == {"num_layers": 3}

    def test_groups_are_known_without_opening_tensors(self, golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fsdpckpt.readers.dcp.read._MAX_VALUES", 10)
        read = mock.Mock(wraps=open_directory)
        monkeypatch.setattr("fsdpckpt.readers.dcp.read.open_directory", read)
        checkpoint = opened(golden / "fsdp-dtensor", locate=Locate.NOTHING)
        optim = checkpoint.optim
        assert optim is not None
        assert read.call_count == 1
        assert not is_located(checkpoint)
        assert [len(group_params(group) or ()) for group in optim.param_groups or ()] == [14, 26]

    def test_a_half_alone_keeps_its_name(self, tmp_path: Path) -> None:
        halves(weight_v=None, bias_v=torch.ones(12))(tmp_path)
        model = opened(tmp_path / "dcp").model
        assert model is not None
        assert {name: getattr(leaf, "shape", None) for name, leaf in model.params.items()} == {
            "l.mlp.linear_fc1.weight_w": (12, 8),
            "l.mlp.linear_fc1.bias": (24,),
        }

    def test_other_programs_names_stay(self, tmp_path: Path) -> None:
        """Only Megatron's own keys at the top say that these are halves."""
        state = {
            "model": {
                "module.l.mlp.linear_fc1.weight_w": torch.ones(2),
                "module.l.mlp.linear_fc1.weight_v": torch.ones(2),
            }
        }
        save(state, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
        checkpoint = opened(tmp_path / "dcp")
        assert checkpoint.model is not None
        assert set(checkpoint.model.params) == set(state["model"])
        assert checkpoint.flavor != "megatron"

    @pytest.mark.parametrize("settings", [{}, {"x": 3}, {"module.l.mlp.linear_fc1.weight": {"lr": 1, "step": "x"}}, 3])
    def test_whatever_settings_are_they_are_read(self, settings: Any, tmp_path: Path) -> None:
        state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {"module.w": {"exp_avg": torch.ones(2)}}}}
        state["optimizer"]["param_to_group_meta"] = settings
        save(
            {**state, "args": 1, "checkpoint_version": 3}, storage_writer=FileSystemWriter(tmp_path / "d"), no_dist=True
        )
        assert opened(tmp_path / "d").flavor == "megatron"


def of_torch_dist(content: dict[str, Any], common: Any = None) -> Make:
    """A checkpoint in ``d``, as Megatron-core keeps one: items without nesting, and common values beside them."""

    def make(directory: Path) -> Path:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(content, storage_writer=FileSystemWriter(directory / "d"), planner=planner, no_dist=True)
        put("d/metadata.json", {"sharded_backend": "torch_dist"})(directory)
        if common is not None:
            put("d/common.pt", common)(directory)
        return directory / "d"

    return make


def is_located(checkpoint: Checkpoint) -> bool:
    """Whether the item of any weight was opened."""
    assert checkpoint.model is not None
    weights = [leaf for leaf in checkpoint.model.params.values() if isinstance(leaf, Tensor)]
    assert weights
    return any((leaf.chunks.offset >= 0).any() for leaf in weights)


def test_common_values_in_an_object(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-core 0.19 keeps them as the object of one rank in the DCP directory."""
    common = torch.load(golden / "uneven" / "common.pt", weights_only=False)
    state = {
        "common_state/shard_0_1": [common],
        "rng_state/shard_0_1": [5],
        "w": torch.ones(3),
        "optimizer.state.exp_avg.w": torch.zeros(3),
    }
    of_torch_dist(state)(tmp_path)
    for few in (1 << 14, 0):
        monkeypatch.setattr("fsdpckpt.readers.dcp.read._MAX_VALUES", few)
        read = mock.Mock(wraps=open_directory)
        monkeypatch.setattr("fsdpckpt.readers.dcp.read.open_directory", read)
        checkpoint = opened(tmp_path / "d", locate=Locate.NOTHING)
        assert read.call_count == 1
        assert not is_located(checkpoint)
        assert (checkpoint.extra["rng_state/shard_0_1"] is UNREAD) == (few == 0)
        assert checkpoint.extra["iteration"] == 3
        assert checkpoint.optim is not None
        assert len(checkpoint.optim.param_groups or ()) == 2


def test_halves_of_single_shards_are_one_tensor(tmp_path: Path) -> None:
    """With ``singleton_local_shards`` Megatron-core takes the halves apart as Megatron FSDP does."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    parts = {f"{prefix}{name}_{half}": torch.randn(4, 3) for prefix in ("", STATE) for half in "wv"}
    of_torch_dist(parts, {"optimizer": {"param_groups": [{"lr": 0.1, "step": 7}]}})(tmp_path)
    fsdpckpt.convert(str(tmp_path / "d"), str(tmp_path / "full.pt"))
    state = torch.load(tmp_path / "full.pt")
    assert identical(state["model"][name], torch.cat([parts[f"{name}_w"], parts[f"{name}_v"]]))
    states = state["optimizer"]["state"][name]
    assert identical(states["exp_avg"], torch.cat([parts[f"{STATE}{name}_w"], parts[f"{STATE}{name}_v"]]))
    assert states["step"].item() == 7
    assert state["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [name]}]


@pytest.mark.parametrize("older", [False, True])
def test_the_scales_of_fp8_are_extras_for_every_layer(older: bool, tmp_path: Path) -> None:
    """TransformerEngine's ``_extra_state``: a pickle as uint8, in older versions as a BytesIO, one for each layer."""
    name = "decoder.layers.mlp.linear_fc1"
    pickled = [pickle.dumps({"scale_fwd": [2.0 * layer], "recipe": "delayed"}) for layer in range(2)]
    state: dict[str, Any] = {f"{name}.weight": torch.randn(2, 4, 3), f"{STATE}{name}.weight": torch.randn(2, 4, 3)}
    for layer, data in enumerate(pickled):
        value = io.BytesIO(data) if older else torch.frombuffer(bytearray(data), dtype=torch.uint8)
        state[f"{name}._extra_state/shard_{layer}_2"] = [value]
    of_torch_dist(state, {"optimizer": {"param_groups": [{"lr": 0.1, "step": 7}]}})(tmp_path)
    fsdpckpt.convert(str(tmp_path / "d"), str(tmp_path / "dcp"), to="sharded", container="dcp", world_size=2)
    for path in (tmp_path / "d", tmp_path / "dcp"):
        fsdpckpt.convert(str(path), str(tmp_path / f"{path.name}.pt"))
        saved = torch.load(tmp_path / f"{path.name}.pt")
        again = opened(tmp_path / f"{path.name}.pt").extra
        assert list(saved["model"]) == [f"{name}.weight"]
        for layer, data in enumerate(pickled):
            key = f"{name}._extra_state/shard_{layer}_2"
            if older:  # torch.load gets it as text, of which fsdpckpt makes what it was
                assert again[key][0].state[0] == data  # type: ignore[index,union-attr]
            else:
                assert bytes(saved[key][0].tolist()) == data


STATE = "optimizer.state.exp_avg."


class TestRuns:
    def test_a_run_reads_the_last_iteration(self, golden: Path, tmp_path: Path) -> None:
        shutil.copytree(golden / "uneven", tmp_path / "iter_0000003")
        shutil.copytree(golden / "uneven", tmp_path / "iter_0000002")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
        checkpoint = opened(tmp_path)
        assert {Path(file.path).parent.name for file in checkpoint.files} <= {"iter_0000003", ""}
        assert checkpoint.flavor == "megatron"

    @pytest.mark.parametrize("text", ["../iter_0000003", "iter", "", "9" * 40, "4", "٣", "-3"])
    def test_a_last_iteration_that_is_none_is_not_followed(self, text: str, golden: Path, tmp_path: Path) -> None:
        shutil.copytree(golden / "uneven", tmp_path / "iter_0000003")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
        assert opened(tmp_path).origin.directory == str(tmp_path / "iter_0000003")  # there is only one


class TestDamage:
    @pytest.fixture
    def source(self, golden: Path, tmp_path: Path) -> Path:
        return shutil.copytree(golden / "flattened-range", tmp_path / "source")

    @pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"sharded_backend": 3}', "[" * 100_000])
    def test_a_metadata_json_of_another_program_is_not_megatrons(self, text: str, source: Path) -> None:
        (source / "metadata.json").write_text(text)
        (source / "common.pt").unlink()
        assert opened(source).flavor != "megatron"

    @pytest.mark.parametrize(
        "junk", [None, 3, [], {}, {"optimizer": 3}, {"optimizer": {"param_groups": {}}}, {"optimizer": {0: 3}},
                 {"optimizer": {"optimizer": [], "state": []}}, {"optimizer": {"param_groups": [3]}}, torch.zeros(2)]
    )  # fmt: skip
    def test_whatever_common_values_hold_is_read(self, junk: Any, source: Path) -> None:
        torch.save(junk, source / "common.pt")
        checkpoint = opened(source)
        assert checkpoint.optim is not None
        assert "exp_avg" in checkpoint.optim.state["output_layer.weight"]

    def test_a_group_of_data_parallel_ranks_without_an_optimizer_is_read(self, source: Path) -> None:
        data = {"optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1": [], "w": torch.zeros(2)}
        common = torch.load(source / "common.pt", weights_only=False)
        made = of_torch_dist(data, common)(source)
        assert made is not None and opened(made).model is not None


def edit_metadata(source: Path, change: Callable[[Any], Any]) -> None:
    """Change ``mcore_data``. Megatron's class is not installed: a class of that name stands in."""
    module = ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for name in ("MCoreMetadata", "MCoreSavePlan"):
        setattr(module, name, type(name, (), {"__module__": module.__name__}))
    parents = [module.__name__.rsplit(".", count)[0] for count in range(1, 5)]
    with mock.patch.dict(sys.modules, {**{name: ModuleType(name) for name in parents}, module.__name__: module}):
        metadata = pickle.loads((source / ".metadata").read_bytes())
        change(metadata.mcore_data)
        (source / ".metadata").write_bytes(pickle.dumps(metadata))


def of_golden(name: str, *changes: Change) -> Make:
    return packed(GOLDEN / f"{name}.tar.xz", name, *changes)


def damaged(*changes: Change) -> Make:
    """A checkpoint whose optimizer has ranges of flattened tensors, changed."""
    return of_golden("flattened-range", *changes)


def shape(value: Any) -> Change:
    """``.metadata`` gives the states of one parameter another shape."""
    return lambda source: edit_metadata(source, lambda data: data.update({QKV: {SHAPE: value}}))


def group(number: int, **settings: Any) -> Change:
    """A param group more, as the first but for ``settings``."""

    def change(common: Any) -> None:
        groups = common["optimizer"]["param_groups"]
        groups[number : number + 1] = [{**groups[0], **settings}]

    return edit("common.pt", change)


def halves(**changes: torch.Tensor | None) -> Make:
    """Megatron FSDP's halves of SwiGLU."""
    parts = {"weight_w": torch.ones(12, 8), "weight_v": torch.zeros(12, 8), "bias_w": torch.ones(12), **changes}
    model = {f"module.l.mlp.linear_fc1.{name}": part for name, part in parts.items() if part is not None}
    return dcp_of({"model": model, "args": 1, "checkpoint_version": 3.0}, at="dcp")


QKV, SHAPE = (
    "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight",
    "nd_reformulated_orig_global_shape",
)
SHAPES = [(3, 16), (6, 4, 8), (4, 16, 8), (0, 16, 8), (3, 16, 8, 1), (3, 17, 8), ()]
NO_SHAPES = ["x", (-1, 2), (1 << 62,), (True,), (1,) * 100, {}]
BIAS = {"l.bias": {"exp_avg": torch.ones(2)}}
LISTED = {"state": BIAS, "param_groups": [{"lr": 0.1, "params": ["l.bias"]}, {"lr": 0.2, "params": []}]}
REFUSALS = (
    incomplete("no common values", damaged(lose("common.pt")), "common.pt"),
    incomplete("no metadata", damaged(lose(".metadata")), ".metadata"),
    incomplete("no data file", damaged(lose("__2_0.distcp")), "__2_0"),
    unsupported("zarr", damaged(put("metadata.json", {"sharded_backend": "zarr"})), "format zarr"),
    *(corrupt(f"slices of {value}", damaged(shape(value)), "linear_qkv") for value in SHAPES),
    *(corrupt(f"no shape: {value}"[:30], damaged(shape(value)), "gives an invalid shape") for value in NO_SHAPES),
    corrupt("the shape of another parameter", damaged(shape((3, 8, 16))), "does not have the shape of the parameter"),
    *(
        corrupt(f"halves of {part.shape} and {part.dtype}", halves(weight_v=part), "not alike")
        for part in (torch.zeros(5, 8), torch.zeros(12, 8).half())
    ),
    unclear("who is in which group", of_golden("uneven"), "which of its 2 param groups", "--no-weight-decay standard"),
    unclear("groups of another rule", of_golden("uneven", group(2, lr=0.5)), "several param groups fit embedding",
            no_weight_decay=STANDARD),
    misused("globs for nothing", of_golden("uneven"), "'*.wrong' matches none", no_weight_decay=("*s", "*.wrong")),
    misused("groups that are listed", files({"l.pt": {"model": {"l.bias": torch.ones(2)}, "optimizer": LISTED}}),
            "--no-weight-decay is for", no_weight_decay=("*bias",)),
    unclear("rank files of tensor-parallel shards", of_golden("uneven"), "cannot tell how the tensors",
            "does not record the mesh", "[Shard(0), Shard(1)]", omits=("DTensors",), world_size=2, container="torch"),
    unsupported("buffers of many parameters", of_golden("buffers"), "Megatron's buffers",
                "--dist-ckpt-optim-fully-reshardable", no_weight_decay=STANDARD),
)  # fmt: skip


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


class TestContract(ReaderContract):
    reader = MegatronReader()
    harmless = frozenset({"metadata.json"})

    def save(self, directory: Path) -> Path:
        weights = {name: torch.from_numpy(weight) for name, weight in WEIGHTS.items()}
        save(weights, storage_writer=FileSystemWriter(directory), no_dist=True)
        assert FileSystemReader(directory).read_metadata().planner_data
        (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        torch.save({"iteration": 3}, directory / "common.pt")
        return directory
