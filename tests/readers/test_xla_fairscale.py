"""Shards of torch_xla's and fairscale's FSDP: made by the libraries themselves, and every way they can be wrong."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import UNORDERED
from tests.golden.small_net import STEP, nets
from tests.readers.contents import opened

GOLDEN = Path(__file__).parent.parent / "golden"
XLA, FAIRSCALE = GOLDEN / "xla", GOLDEN / "fairscale"
ALL = [XLA / "flat", XLA / "apart", FAIRSCALE / "flat", FAIRSCALE / "apart", FAIRSCALE / "one"]
NAMES = [f"{path.parent.name}-{path.name}" for path in ALL]
XLA_FILE, FAIRSCALE_FILE = "run_rank-{:08d}-of-{:08d}.pth", "last-shard{}.pt"
each = pytest.mark.parametrize("source", ALL, ids=NAMES)

Edit = Callable[[dict[str, Any], int], None]


def truth(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model, and the optimizer's states by name, as they were before they were cut."""
    net, first, second = nets()
    model = dict(net.state_dict())
    if source.parent == XLA:  # which records a shared parameter under its first name only
        del model["head.weight"]
    moments = [dict(one.named_parameters()) for one in (first, second)]
    states: dict[str, Any] = {}
    for name, average in moments[0].items():
        step = torch.tensor(float(STEP)) if source.parent == XLA else STEP
        states[name] = {"step": step, "exp_avg": average.detach(), "exp_avg_sq": moments[1][name].detach()}
        if source == XLA / "apart":
            states[name] = {"momentum_buffer": average.detach()}
    return model, states


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected) and found.dtype == expected.dtype and found.shape == expected.shape
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    return type(found) is type(expected) and found == expected


def full(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    fsdpckpt.convert(source, target, to="full", **options)
    content: dict[str, Any] = torch.load(target, weights_only=True)
    return content


def edited(source: Path, target: Path, edit: Edit) -> Path:
    """A copy of ``source`` in which ``edit`` changed the content of every rank's file."""
    target.mkdir()
    for rank, path in enumerate(sorted(source.iterdir())):
        content = torch.load(path, weights_only=True)
        edit(content, rank)
        torch.save(content, target / path.name)
    return target


# What was saved comes back.


@each
def test_the_shards_of_a_library_are_the_model_and_the_optimizer_that_were_cut(source: Path, tmp_path: Path) -> None:
    model, states = truth(source)
    found = full(source, tmp_path / "full.pt", key_type="name")
    assert same(found["model"], model)
    assert same(found["optimizer"]["state"], states)
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.125
    assert sorted(found["optimizer"]["param_groups"][0]["params"]) == sorted(states)
    assert "shard_metadata" not in found


@each
@pytest.mark.parametrize("world", [1, 5])
def test_they_load_with_dcp_on_any_number_of_ranks(source: Path, world: int, tmp_path: Path) -> None:
    model, states = truth(source)
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", world_size=world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "full.pt")
    found = torch.load(tmp_path / "full.pt", weights_only=True)
    assert same(found["model"], model)
    assert same(dict(found["optimizer"]["state"]), states)


@each
def test_they_become_flat_parameters_of_another_number_of_ranks_and_come_back(source: Path, tmp_path: Path) -> None:
    parameters = tmp_path / "parameters.txt"
    parameters.write_text("\n".join(name for name, tensor in nets()[0].named_parameters() if tensor.ndim))
    options = {"unit": ("block",), "use_orig_params": False, "parameters": str(parameters)}
    options["exclude"] = ("temperature",)  # FSDP1 takes no parameter without a dimension
    fsdpckpt.convert(source, tmp_path / "flat", to="flattened", world_size=2, **options)
    model, states = truth(source)
    del model["temperature"], states["temperature"]
    found = full(tmp_path / "flat", tmp_path / "full.pt", key_type="name")
    assert same({name: found["model"][name] for name in model}, model)
    assert same(found["optimizer"]["state"], states)


@each
def test_a_training_job_loads_them_with_the_storage_reader(source: Path) -> None:
    model, _ = truth(source)
    target = {name: torch.full_like(tensor, 77) for name, tensor in model.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": target}, storage_reader=fsdpckpt.StorageReader(source), no_dist=True)
    assert same(target, model)


@each
def test_they_are_named_by_the_shard_metadata_and_proved_whole(source: Path) -> None:
    checkpoint = opened(source)
    ranks = {"flat": 3, "apart": 2, "one": 1}[source.name]
    assert (checkpoint.flavor, checkpoint.world_size) == (
        "torch_xla" if source.parent == XLA else "fairscale",
        ranks,
    )
    assert (UNORDERED in checkpoint.evidence) == (source.name == "flat")
    assert fsdpckpt.verify(source).whole


def test_the_whole_model_that_the_trainer_saves_beside_the_shards_is_no_second_model(tmp_path: Path) -> None:
    for source, name in ((XLA / "flat", "model.safetensors"), (XLA / "apart", "run_consolidated.pth")):
        target = tmp_path / source.name
        shutil.copytree(source, target)
        save_file({"emb.weight": torch.randn(7, 3)}, target / name)
        (target / "config.json").write_text("{}")
        checkpoint = opened(target)
        assert checkpoint.flavor == "torch_xla"
        assert name in next(note.message for note in checkpoint.notes if note.message.startswith("not copied from"))


def test_extras_beside_the_shards_are_carried(tmp_path: Path) -> None:
    assert full(XLA / "apart", tmp_path / "x.pt")["epoch"] == 3
    found = full(FAIRSCALE / "flat", tmp_path / "f.pt")
    assert found["extra_state"] == {"epoch": 3}
    assert found["optimizer"]["loss_scale"] == 128.0


def test_a_parameter_of_two_names_is_one_in_fairscales_metadata_and_in_unflattened_files(tmp_path: Path) -> None:
    for source in (FAIRSCALE / "flat", FAIRSCALE / "apart"):
        checkpoint = opened(source)
        assert checkpoint.model is not None
        one, other = (checkpoint.model.params[name].chunks for name in ("emb.weight", "head.weight"))  # type: ignore[union-attr]
        assert (one.offset == other.offset).all() and (one.file == other.file).all()


def test_a_name_that_differs_in_its_last_word_is_put_right(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        for module in content["shard_metadata"]["param_metadata"]:
            if module["shared_param_info"]:
                module["shared_param_info"] = [("emb.table", "head.weight")]  # what head.table sharing emb.weight gives

    source = edited(FAIRSCALE / "flat", tmp_path / "c", edit)
    found = full(source, tmp_path / "full.pt", key_type="name")["model"]
    assert torch.equal(found["head.table"], nets()[0].emb.weight)


def test_an_average_of_the_model_that_is_cut_alike_is_put_together_too(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["ema"] = {name: tensor * 2 for name, tensor in content["model"].items()}

    found = full(edited(FAIRSCALE / "flat", tmp_path / "c", edit), tmp_path / "full.pt")
    assert torch.equal(found["ema"]["block.fc.weight"], nets()[0].block.fc.weight * 2)


@pytest.mark.parametrize("multiple", [None, 6, 7])
def test_rows_or_slices_of_any_multiple_are_put_together(multiple: int | None, tmp_path: Path) -> None:
    net = nets()[0]
    names = {name: tensor for name, tensor in net.state_dict().items() if tensor.ndim and name != "head.weight"}
    source = tmp_path / "c"
    source.mkdir()
    key = "_fsdp_shard_FSDP_SHARD_SEPARATOR_{}".format
    info = {
        key(name): {"_orig_size": tensor.shape, "_orig_name": f"_fsdp_wrapped_module._fpw_module.{name}"}
        for name, tensor in names.items()
    }
    for rank in range(3):
        shards = {}
        for name, tensor in names.items():
            cut = tensor if multiple is None else tensor.flatten()
            step = multiple or 1
            rows = -(-cut.shape[0] // (3 * step)) * step
            padded = functional.pad(cut, [0, 0] * (cut.ndim - 1) + [0, 3 * rows - cut.shape[0]])
            shards[key(name)] = padded[rank * rows : (rank + 1) * rows].clone()
        record = {"shard_info": {"": info}, "flatten_info": {}, "buffer_info": {}, "world_size": 3, "rank": rank}
        torch.save({"model": shards, "shard_metadata": record}, source / XLA_FILE.format(rank, 3))
    assert same(full(source, tmp_path / "full.pt", only="model"), names)


# What settles the ids of an optimizer, and what does not.


def in_two_groups(content: dict[str, Any], rank: int) -> None:
    """Weight decay for weights alone: ids count group by group."""
    optimizer = content["optimizer"]
    first = optimizer["param_groups"][0]
    params = [name for name, _ in nets()[0].named_parameters()]
    weights = [at for at, name in enumerate(params) if "bias" not in name]
    order = [*weights, *(at for at in range(len(params)) if at not in weights)]
    optimizer["state"] = {new: optimizer["state"][old] for new, old in enumerate(order)}
    count = len(weights)
    optimizer["param_groups"] = [
        first | {"params": list(range(count))},
        first | {"params": list(range(count, len(params))), "weight_decay": 0.5},
    ]


def with_names(content: dict[str, Any], rank: int) -> None:
    in_two_groups(content, rank)
    keys = [key for key in content["model"] if "_fsdp_shard" in key]
    groups = [[key for key in keys if "bias" not in key], [key for key in keys if "bias" in key]]
    for group, names in zip(content["optimizer"]["param_groups"], groups, strict=True):
        group["param_names"] = names


def test_ids_that_lengths_do_not_settle_are_refused_and_the_model_converts_alone(tmp_path: Path) -> None:
    source = edited(XLA / "apart", tmp_path / "c", in_two_groups)
    with pytest.raises(SourceUnsupportedError, match=r"may be emb.weight or block.fc.weight|may be") as refused:
        full(source, tmp_path / "full.pt")
    assert "--only model" in refused.value.text
    assert not (tmp_path / "full.pt").exists()
    model = full(source, tmp_path / "model.pt", only="model")
    assert same(model, truth(XLA / "apart")[0])


def test_names_in_the_groups_settle_the_ids(tmp_path: Path) -> None:
    source = edited(XLA / "apart", tmp_path / "c", with_names)
    found = full(source, tmp_path / "full.pt", key_type="name")["optimizer"]
    assert same(found["state"], truth(XLA / "apart")[1])
    assert [group["params"] for group in found["param_groups"]] == [
        [name for name, _ in nets()[0].named_parameters() if ("bias" in name) is second] for second in (False, True)
    ]


def test_names_that_are_not_in_the_metadata_settle_nothing(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        with_names(content, rank)
        content["optimizer"]["param_groups"][1]["param_names"][0] = "of.another.model"

    with pytest.raises(SourceUnsupportedError, match="param_names are not those"):
        full(edited(XLA / "apart", tmp_path / "c", edit), tmp_path / "full.pt")


@pytest.mark.parametrize("ids", [[0, 0], [1]], ids=["twice", "never"])
def test_groups_that_do_not_list_every_id_once_settle_nothing(ids: list[int], tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        group = content["optimizer"]["param_groups"][0]
        group["params"] = [*ids, *(number for number in group["params"] if number > 1)]

    with pytest.raises(SourceUnsupportedError, match="do not list every id once"):
        full(edited(XLA / "apart", tmp_path / "c", edit), tmp_path / "full.pt")


@pytest.mark.parametrize("change", [{"param_groups": {"a": 1}}, {"param_groups": [5]}, {"state": {0: 5}}, {"state": 5}])
def test_what_has_only_the_keys_of_an_optimizer_is_an_extra(change: dict[str, Any], tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["last_optimizer_state"].update(change)

    found = opened(edited(FAIRSCALE / "one", tmp_path / "c", edit))
    assert found.optim is None
    assert set(change) <= set(found.extra["last_optimizer_state"])  # type: ignore[arg-type]


def test_states_of_another_length_are_refused(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["optimizer"]["state"][2]["momentum_buffer"] = torch.randn(96)  # a state in blocks, or of 8 bits

    with pytest.raises(SourceUnsupportedError, match="lengths of its states are not those"):
        full(edited(XLA / "apart", tmp_path / "c", edit), tmp_path / "full.pt")


def test_frozen_parameters_that_were_flattened_apart_have_no_states(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        """A second flat parameter beside the first: torch_xla keeps frozen ones in it."""
        record = content["shard_metadata"]
        own = "_fsdp_shard_FSDP_SHARD_SEPARATOR__fsdp_wrapped_module_FSDP_SHARD_SEPARATOR_flat_param_{}".format
        full_name = "_fsdp_wrapped_module.flat_param_{}".format
        frozen = {"_orig_size": torch.Size([6]), "_orig_name": full_name(1)}
        info = {}
        for key, entry in record["shard_info"][""].items():
            info |= {key: entry, own(1): frozen} if key == own(0) else {key: entry}
        record["shard_info"][""] = info
        record["flatten_info"][full_name(1)] = (["_fpw_module.frozen"], [torch.Size([2, 3])], [6])
        if "model" in content:
            content["model"][own(1)] = functional.pad(torch.arange(6.0), [0, 3 * 128 - 6]).chunk(3)[rank].clone()

    target = tmp_path / "c"
    target.mkdir()
    for path in sorted((XLA / "flat").iterdir()):
        content = torch.load(path, weights_only=True)
        edit(content, int(path.name[4]))
        torch.save(content, target / path.name)
    found = full(target, tmp_path / "full.pt", key_type="name")
    assert torch.equal(found["model"]["frozen"], torch.arange(6.0).view(2, 3))
    assert same(found["optimizer"]["state"], truth(XLA / "flat")[1])


# What is wrong is refused.


def refused(source: Path, kind: type[FsdpckptError]) -> FsdpckptError:
    with pytest.raises(kind) as caught:
        opened(source)
    return caught.value


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_rank_is_named(gone: int, tmp_path: Path) -> None:
    shutil.copytree(XLA / "flat", tmp_path / "c")
    (tmp_path / "c" / f"rank{gone}-of-3-optimizer.pt").unlink()
    error = refused(tmp_path / "c", SourceIncompleteError)
    assert list(error.details) == [f"rank{gone}-of-3-optimizer.pt"]


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_rank_shows_where_nothing_says_how_many_there_are(gone: int, tmp_path: Path) -> None:
    shutil.copytree(FAIRSCALE / "flat", tmp_path / "c")
    (tmp_path / "c" / FAIRSCALE_FILE.format(gone)).unlink()
    error = refused(tmp_path / "c", SourceIncompleteError)
    assert FAIRSCALE_FILE.format(1) in error.details if gone == 1 else "ranks are missing" in str(error)


def test_one_file_of_several_asks_for_the_directory() -> None:
    for path in (XLA / "apart" / XLA_FILE.format(1, 2), FAIRSCALE / "flat" / FAIRSCALE_FILE.format(0)):
        error = refused(path, SourceIncompleteError)
        assert str(path.parent) in (error.next_step or "")


def test_files_that_were_renamed_are_refused_though_their_lengths_are_equal(tmp_path: Path) -> None:
    for source, names in (
        (XLA / "apart", [XLA_FILE.format(rank, 2) for rank in (0, 1)]),
        (FAIRSCALE / "flat", [FAIRSCALE_FILE.format(rank) for rank in (0, 1)]),
    ):
        target = tmp_path / source.parent.name
        shutil.copytree(source, target)
        (target / names[0]).rename(target / "kept")
        (target / names[1]).rename(target / names[0])
        (target / "kept").rename(target / names[1])
        assert "swapped" in str(refused(target, SourceCorruptError))


def test_the_rank_in_the_metadata_counts_where_names_have_none(tmp_path: Path) -> None:
    for rank in range(2):
        content = torch.load(XLA / "apart" / XLA_FILE.format(rank, 2), weights_only=True)
        with (tmp_path / XLA_FILE.format(1 - rank, 2)).open("wb") as file:  # the archive has no name then
            torch.save(content, file)
    assert "swapped" in str(refused(tmp_path, SourceCorruptError))


def test_padding_tells_the_last_rank_where_names_do_not(tmp_path: Path) -> None:
    order = [2, 1, 0]
    for rank, place in enumerate(order):
        content = torch.load(FAIRSCALE / "flat" / FAIRSCALE_FILE.format(rank), weights_only=True)
        with (tmp_path / FAIRSCALE_FILE.format(place)).open("wb") as file:  # the archive has no name then
            torch.save(content, file)
    assert "padding" in str(refused(tmp_path, SourceCorruptError))


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        if rank == 1:
            names = content["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]["names"]
            names[0], names[1] = names[1], names[0]
            shapes = content["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]["shapes"]
            shapes[0], shapes[1] = shapes[1], shapes[0]
            numels = content["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]["numels"]
            numels[0], numels[1] = numels[1], numels[0]

    error = refused(edited(FAIRSCALE / "flat", tmp_path / "c", edit), SourceCorruptError)
    assert "differ between ranks" in str(error)


@pytest.mark.parametrize("source", [XLA / "apart", FAIRSCALE / "flat"], ids=["xla", "fairscale"])
def test_shards_without_metadata_are_refused_not_taken_for_replicas(source: Path, tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        del content["shard_metadata"]

    directory = edited(source, tmp_path / "c", edit)
    with pytest.raises(FsdpckptError, match="no record of what is in them"):
        full(directory, tmp_path / "full.pt", only="model")
    one = next(iter(sorted(directory.iterdir())))
    with pytest.raises(FsdpckptError, match="no record of what is in them"):
        full(one, tmp_path / "one.pt", only="model")


def test_metadata_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]["numels"][0] += 1

    error = refused(edited(FAIRSCALE / "flat", tmp_path / "c", edit), SourceCorruptError)
    assert "contradicts itself" in str(error)


def test_shards_of_another_length_than_in_the_metadata_are_refused(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        key = next(key for key in content["model"] if "_fsdp_shard" in key)
        content["model"][key] = torch.randn(640)

    error = refused(edited(XLA / "apart", tmp_path / "c", edit), SourceCorruptError)
    assert "does not match the record beside it" in str(error)


def test_shards_that_the_metadata_does_not_list_are_refused(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["model"]["decoder.flat_param_0"] = torch.randn(9)

    error = refused(edited(FAIRSCALE / "flat", tmp_path / "c", edit), SourceCorruptError)
    assert "decoder.flat_param_0" in str(error)


def test_a_tensor_that_is_neither_in_the_metadata_nor_a_buffer_is_refused(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["model"]["head.weight"] = content["model"][
            "head.weight"
        ].clone()  # which no longer shows that it is tied

    with pytest.raises(SourceUnsupportedError, match=r"head\.weight is neither a recorded parameter"):
        full(edited(FAIRSCALE / "apart", tmp_path / "c", edit), tmp_path / "full.pt")


def test_parameters_of_which_every_rank_has_its_own_are_refused(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["shard_metadata"]["param_metadata"][1]["no_broadcast_optim_state"] = True

    error = refused(edited(FAIRSCALE / "flat", tmp_path / "c", edit), SourceUnsupportedError)
    assert "every rank has its own block.flat_param_0" in str(error)


def test_a_tensor_of_the_metadata_that_is_missing_is_a_problem(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        del content["model"]["block.flat_param_0"]

    found = fsdpckpt.verify(edited(FAIRSCALE / "flat", tmp_path / "c", edit))
    assert [problem.key for problem in found.problems if problem.kind == "missing-key"] == ["block.flat_param_0"]


def test_the_type_that_a_buffer_had_is_noted_and_not_restored(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["shard_metadata"]["buffer_info"] = {
            "_fsdp_wrapped_module._fpw_module.scale": {"_orig_dtype": torch.float64}
        }

    source = edited(XLA / "apart", tmp_path / "c", edit)
    assert [note.keys for note in opened(source).notes if note.kind == "buffer-type"] == [("scale (float64)",)]
    assert full(source, tmp_path / "full.pt")["model"]["scale"].dtype is torch.float32


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["model"]["block.fc.weight"] = torch.randn(5, 3)

    error = refused(edited(FAIRSCALE / "flat", tmp_path / "c", edit), SourceCorruptError)
    assert list(error.details) == ["block.fc.weight"]


@pytest.mark.parametrize(
    "change",
    [{"world_size": 10**12}, {"rank": 5}, {"rank": "0"}, {"shard_info": []}, {"shard_info": {}}, {"flatten_info": 7}],
    ids=str,
)
def test_metadata_of_the_impossible_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        content["shard_metadata"].update(change)

    refused(edited(XLA / "apart", tmp_path / "c", edit), SourceCorruptError)


@pytest.mark.parametrize("shape", [(2**70, 0), (1,) * 65, "x", (3, -1)], ids=str)
def test_a_shape_of_the_impossible_is_refused(shape: Any, tmp_path: Path) -> None:
    def edit(content: dict[str, Any], rank: int) -> None:
        next(iter(content["shard_metadata"]["shard_info"][""].values()))["_orig_size"] = shape

    refused(edited(XLA / "apart", tmp_path / "c", edit), SourceCorruptError)
