"""FSDP1's slices as they are read, before anyone knows what they are slices of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Section
from fsdpckpt.ir.optimizer import Optimizer, RankMembers
from fsdpckpt.ir.placements import Slices
from fsdpckpt.ir.tensors import Tensor
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank
from tests.readers.contents import Held, held, opened, raw, same_values

GOLDEN = Path(__file__).parent.parent / "golden"


def golden(form: str, target: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / form, target, ignore=shutil.ignore_patterns("truth")))


def save(
    directory: Path, world: int, state_of: Callable[[int], Any], section: str = "optim", *, checked: bool = True
) -> Path:
    directory.mkdir(exist_ok=True)
    torch.serialization.set_crc32_options(checked)
    try:
        for rank in range(world):
            with as_rank(rank, world):
                torch.save(state_of(rank), directory / f"{section}_world_size_{world}_rank_{rank}.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    return directory


def randn(*shape: int, rank: int = 0, seed: int = 0) -> torch.Tensor:
    """Of every rank and seed others."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * rank + seed))


def optimizer(state: dict[Any, Any], count: int | None = None) -> dict[str, Any]:
    return {
        "state": state,
        "param_groups": [{"lr": 0.1, "params": list(range(len(state) if count is None else count))}],
    }


def leaf(checkpoint: Checkpoint, key: int | str, state: str) -> Tensor:
    assert checkpoint.optim is not None
    found = checkpoint.optim.state[key][state]
    assert isinstance(found, Tensor)
    return found


def placements(checkpoint: Checkpoint) -> set[str]:
    return {named.tensor.placement for named in checkpoint.tensors() if named.tensor.ndim}


# Real files


RAW = ["torch-2.4/f1_flat_raw", "torch-2.4/f1_orig_raw", "torch-2.1/f1_orig_raw", "torch-2.4/f1_orig_local"]
RAW += ["torch-2.4/f1_tiny_f", "torch-2.4/f1_tiny_o", "torch-2.4/f1_nested_o", "torch-2.1/f1_flat_local"]


@pytest.mark.parametrize("form", RAW)
def test_the_slices_of_real_optimizers_are_the_ranks_tensors_one_after_the_other(form: str, tmp_path: Path) -> None:
    directory = golden(form, tmp_path / "c")
    ranks = [torch.load(path, weights_only=True) for path in sorted(directory.glob("optim_*.pt"))]
    found = opened(directory)
    assert found.optim is not None
    assert (found.layout, found.world_size, found.problems) == (Layout.FLATTENED, len(ranks), ())
    assert list(found.optim.state) == sorted({key for rank in ranks for key in rank["state"]})
    for key, entry in found.optim.state.items():
        own = [rank["state"].get(key, {}) for rank in ranks]
        for name, tensor in entry.items():
            assert isinstance(tensor, Tensor)
            have = [number for number, states in enumerate(own) if name in states]
            chunks = [own[number][name] for number in have]
            assert tensor.chunks.rank.tolist() == have
            if name == "step":
                assert (tensor.placement, held(tensor, found.files)) == ("whole", raw(chunks[0]))
                continue
            assert (tensor.placement, tensor.sharded) == ("slices", True)
            assert tensor.chunks.size[:, 0].tolist() == [len(chunk) for chunk in chunks]
            assert held(tensor, found.files) == raw(torch.cat(chunks))
    assert held(found.optim.param_groups, found.files) == held(ranks[0]["param_groups"], ())


@pytest.mark.parametrize("form", ["torch-2.1/f1_flat_local", "torch-2.4/f1_orig_local"])
def test_local_state_dicts_hold_flat_parameters_and_slices_beside_them(form: str, tmp_path: Path) -> None:
    found = opened(golden(form, tmp_path / "c"))
    assert found.model is not None
    flat = {key: tensor for key, tensor in found.model.params.items() if key.endswith("_flat_param")}
    assert set(flat) == {"_flat_param", "l.0._flat_param", "l.1._flat_param"}
    assert "keys of flat parameters: " + ", ".join(flat) in [each.message for each in found.evidence]
    for tensor in flat.values():
        assert isinstance(tensor, Tensor) and tensor.placement.startswith("ShardedTensor")
        assert tensor.chunks.rank.tolist() == [0, 1]
        assert tensor.chunks.start[1, 0] == tensor.chunks.size[0, 0]
        assert tensor.chunks.size.sum() == tensor.numel
    beside = {key: tensor for key, tensor in found.model.params.items() if key not in flat}
    assert all(isinstance(tensor, Tensor) and isinstance(tensor.cut, Slices) for tensor in beside.values())
    assert set(beside) == {"buf"} if "flat" in form else len(beside) == 14
    if "orig" in form:
        truth = torch.load(GOLDEN / form / "truth" / "full.pt", weights_only=False)["model"]
        for key, tensor in beside.items():
            whole = Held(raw(truth[key]), "float32", (truth[key].numel(),))
            assert key == "buf" or held(tensor, found.files) == whole


@pytest.mark.parametrize("key", ["buf", "h.weight"])
def test_a_key_beside_flat_parameters_that_a_rank_lacks_is_reported(key: str, tmp_path: Path) -> None:
    """Every rank's module has all of them, if only with no elements: they are no states that a rank never made."""
    directory = golden("torch-2.4/f1_orig_local", tmp_path / "c")
    with as_rank(1, 2):
        state = torch.load(directory / "model_1.pt", weights_only=False)
        del state[key]
        torch.save(state, directory / "model_1.pt")
    (problem,) = opened(directory).problems
    assert (problem.kind, problem.key, problem.rank, problem.fatal) == ("missing-key", key, 1, False)


# FSDP1 of this torch, on the fake process group


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("mask", torch.arange(6.0))


def wrapped(orig: bool, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **more: Any) -> nn.Module:
    torch.manual_seed(3)
    model = Net()
    options: dict[str, Any] = {
        "use_orig_params": orig,
        "sharding_strategy": strategy,
        "device_id": torch.device("cpu"),
        **more,
    }
    model.one = FullyShardedDataParallel(model.one, **options)  # type: ignore[assignment]
    return FullyShardedDataParallel(model, **options)


def stepped(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    found = torch.optim.AdamW(model.parameters(), foreach=False)
    for number, parameter in enumerate(model.parameters()):
        if parameter.numel():
            parameter.grad = randn(*parameter.shape, rank=rank, seed=number)
    found.step()
    return found


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world", [2, 3, 7])
def test_what_fsdp1_saves_on_any_number_of_ranks(orig: bool, world: int, tmp_path: Path) -> None:
    states: list[Any] = []

    def state_of(rank: int) -> Any:
        states.append(stepped(wrapped(orig), rank).state_dict())
        return states[-1]

    found = opened(save(tmp_path / "c", world, state_of))
    assert (found.layout, found.problems) == (Layout.FLATTENED, ())
    assert found.optim is not None
    for key, entry in found.optim.state.items():
        chunks = [state["state"][key]["exp_avg"] for state in states if key in state["state"]]
        assert held(entry["exp_avg"], found.files) == raw(torch.cat(chunks))
        assert isinstance(entry["exp_avg"].cut, Slices)  # type: ignore[union-attr]


def test_hybrid_shards_are_kept_as_replicas_at_the_offsets_their_metadata_say(tmp_path: Path) -> None:
    """The placements in ShardedTensor's metadata are ranks of a group there, and are not looked at."""

    def state_of(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
        model = wrapped(
            True, ShardingStrategy.HYBRID_SHARD, process_group=(mesh["fsdp"].get_group(), mesh["ddp"].get_group())
        )
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return model.state_dict()

    found = opened(save(tmp_path / "c", 4, state_of, "model"))
    assert found.problems == () and found.model is not None
    weight = found.model.params["one.weight"]
    assert isinstance(weight, Tensor)
    assert weight.chunks.rank.tolist() == [0, 1, 2, 3]
    assert weight.chunks.start[:, 0].tolist() == [0, 4, 0, 4]
    assert held(weight, found.files).form == ("float32", (7, 5))


@pytest.mark.parametrize("orig", [False, True])
def test_ids_of_ranks_whose_param_names_come_in_other_orders_are_read_by_name(tmp_path: Path, *, orig: bool) -> None:
    """States of equal length would be joined under one id although they are of different parameters."""
    saved = {}

    def state_of(rank: int) -> Any:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        for number in range(2):
            model[number] = FullyShardedDataParallel(model[number], device_id=torch.device("cpu"), use_orig_params=orig)
        named = list(model.named_parameters())
        optimizer = torch.optim.Adam(named[::-1] if rank else named)
        for _, param in named:
            param.grad = randn(*param.shape, rank=rank)
        optimizer.step()
        saved[rank] = optimizer.state_dict()
        return saved[rank]

    found = opened(save(tmp_path / "c", 2, state_of))
    assert (found.layout, found.problems) == (Layout.FLATTENED, ())
    assert "in different orders" in next(note.message for note in found.notes if note.kind == "orders")
    assert found.optim is not None and found.optim.param_groups is not None
    assert found.optim.param_groups[0]["param_names"] == saved[0]["param_groups"][0]["param_names"]
    for number in range(2):
        slices = [saved[rank]["state"][1 - number if rank else number]["exp_avg"] for rank in range(2)]
        assert held(leaf(found, number, "exp_avg"), found.files) == raw(torch.cat(slices))


def test_each_of_two_optimizers_has_the_orders_of_its_own_ranks(tmp_path: Path) -> None:
    def state_of(rank: int) -> Any:
        """The second optimizer lists its parameters in reverse on rank 1, and the first one as on rank 0."""
        saved = {}
        for seed, name in enumerate(("first", "second")):
            ids = [1, 0] if rank and name == "second" else [0, 1]
            states = {number: {"exp_avg": randn(4, rank=rank, seed=10 * seed + key)} for number, key in enumerate(ids)}
            saved[name] = optimizer(states)
            saved[name]["param_groups"][0]["param_names"] = [f"{name}.{key}" for key in ids]
        return saved

    found = opened(save(tmp_path / "c", 2, state_of))
    contents = {named.name: named.content for named in found.named}
    orders = {name: content.orders for name, content in contents.items() if isinstance(content, Optimizer)}
    assert orders == {"first": (), "second": (RankMembers((1,), ((1, 0),)),)}


def test_ranks_whose_param_names_say_nothing_of_their_ids_are_one_fatal_problem(tmp_path: Path) -> None:
    def state_of(rank: int) -> Any:
        saved = optimizer({key: {"exp_avg": randn(4, rank=rank)} for key in range(2)})
        saved["param_groups"][0]["param_names"] = ["a", f"b{rank}", *(["c"] if rank else [])]
        return saved

    (problem,) = opened(save(tmp_path / "c", 2, state_of)).problems
    assert (problem.kind, problem.fatal, problem.section, problem.rank) == ("parameter-order", True, Section.OPTIM, 1)
    assert problem.key == "param_groups.0.param_names"
    assert "on rank 1: the ranks' optimizers list their parameters in different orders" in problem.message


def test_an_id_that_no_group_lists_takes_no_parameters_place(tmp_path: Path) -> None:
    def state_of(rank: int) -> Any:
        saved = optimizer({key: {"exp_avg": randn(4, rank=rank)} for key in range(2)})
        saved["param_groups"][0]["param_names"] = ["b", "a"] if rank else ["a", "b"]
        return {**saved, "state": {**saved["state"], **({7: {"exp_avg": randn(4, rank=5)}} if rank else {})}}

    problems = [problem for problem in opened(save(tmp_path / "c", 2, state_of)).problems if problem.fatal]
    found = {(problem.kind, problem.rank, problem.key) for problem in problems}
    assert found == {("parameter-order", 1, "state.7"), ("state", None, "7")}


# What proves slices, and what does not


def test_vectors_of_one_length_are_whole_when_the_model_has_them(tmp_path: Path) -> None:
    """All parameters are vectors: alone the optimizer could be in slices, and the model tells, in whichever file."""
    model = nn.LayerNorm(5)
    state = stepped(model, 0).state_dict()
    save(tmp_path / "alone", 2, lambda _: state)
    assert opened(tmp_path / "alone").layout is Layout.FLATTENED
    save(tmp_path / "together", 2, lambda _: {"model": model.state_dict(), "optimizer": state})
    save(tmp_path / "apart", 2, lambda _: state)
    save(tmp_path / "apart", 2, lambda _: model.state_dict(), "model")
    for form in ("together", "apart"):
        found = opened(tmp_path / form)
        assert (found.layout, found.problems, placements(found)) == (Layout.FULL, (), {"whole"})
        assert found.optim is not None
        assert held(found.optim.state, found.files) == held(state["state"], ())


def test_slices_as_long_as_a_vector_of_the_model_are_recognised_by_their_bytes(tmp_path: Path) -> None:
    """A flat parameter's shard may happen to have a bias's length; replicas would be equal."""
    weights = {"w": randn(4, 4), "b": randn(10)}

    def state(rank: int) -> Any:
        return {"model": weights, "optimizer": optimizer({0: {"exp_avg": randn(10, rank=rank)}})}

    sliced = opened(save(tmp_path / "sliced", 2, state))
    assert (sliced.layout, leaf(sliced, 0, "exp_avg").shape) == (Layout.FLATTENED, (20,))
    whole = opened(save(tmp_path / "whole", 2, lambda _: state(0)))
    assert (whole.layout, leaf(whole, 0, "exp_avg").shape) == (Layout.FULL, (10,))


def test_slices_among_whole_states_of_two_dimensions(tmp_path: Path) -> None:
    """Parameters outside of FSDP are whole: neither hides the other."""

    def uneven(rank: int) -> Any:
        state: dict[int, Any] = {0: {"exp_avg": randn(4, 3)}, 1: {"exp_avg": randn(5 + rank, rank=rank)}}
        if rank == 1:
            state[2] = {"exp_avg": randn(2, rank=rank), "step": torch.tensor(1.0)}
        return optimizer(state, 3)

    def absent(rank: int) -> Any:
        state = {0: {"exp_avg": randn(4, 3)}, 1 + rank: {"exp_avg": randn(5, rank=rank)}}
        if rank == 1:
            state[3] = {"step": torch.tensor(1.0)}
        return optimizer(state, 4)

    def even(rank: int) -> Any:
        return optimizer({0: {"exp_avg": randn(4, 3)}, 1: {"exp_avg": randn(6, rank=rank)}})

    for form, state_of, length in (("uneven", uneven, 11), ("absent", absent, 5), ("even", even, 12)):
        found = opened(save(tmp_path / form, 2, state_of))
        assert (found.layout, found.problems) == (Layout.FLATTENED, ())
        matrix, vector = leaf(found, 0, "exp_avg"), leaf(found, 1, "exp_avg")
        assert (matrix.shape, matrix.placement, len(matrix.chunks)) == ((4, 3), "whole", 2)
        assert (vector.shape, vector.placement) == ((length,), "slices")


@pytest.mark.parametrize("checked", [True, False])
def test_slices_beside_an_ignored_matrix_are_recognised_without_checksums_too(tmp_path: Path, *, checked: bool) -> None:
    states: list[Any] = []

    def state_of(rank: int) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(900, 700), nn.Linear(5, 3, bias=False))
        options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": False}
        fsdp = FullyShardedDataParallel(model, ignored_states=[model[1].weight], **options)
        optim = torch.optim.AdamW(fsdp.parameters(), foreach=False)
        for parameter in fsdp.parameters():
            parameter.grad = torch.ones_like(parameter)
            if parameter.ndim == 1:
                parameter.grad[-1] = rank  # slices that differ nowhere else
        optim.step()
        states.append(optim.state_dict())
        return states[-1]

    found = opened(save(tmp_path / "c", 2, state_of, checked=checked))
    assert (found.layout, found.problems) == (Layout.FLATTENED, ())
    flat = [state["state"][0]["exp_avg"] for state in states]
    assert held(leaf(found, 0, "exp_avg"), found.files) == raw(torch.cat(flat))
    assert flat[0].nbytes > 1 << 20 and leaf(found, 1, "exp_avg").placement == "whole"


@pytest.mark.parametrize("checked", [True, False])
def test_whole_states_of_two_dimensions_and_equal_vectors_are_replicas(tmp_path: Path, *, checked: bool) -> None:
    """NO_SHARD and DDP: parameters of two dimensions cannot be slices of a flat parameter."""
    state = stepped(nn.Linear(3, 2), 0).state_dict()
    found = opened(save(tmp_path / "c", 2, lambda _: state, checked=checked))
    assert (found.layout, found.problems, placements(found)) == (Layout.FULL, (), {"whole"})
    same_values(found, optim=state)


@pytest.mark.parametrize("others", [{}, {"model": {}, "optimizer": {}}])
@pytest.mark.parametrize("form", ["names", "ids", "vectors"])
def test_an_optimizer_that_was_gathered_on_rank_0_is_whole(tmp_path: Path, others: dict[str, Any], form: str) -> None:
    """As with rank0_only=True, if every rank saves what it has. By id, or of vectors alone, it may be a rank's own."""
    model = {"w": randn(4, 3), "b": randn(4)}
    names = ["b"] if form == "vectors" else list(model)
    keys: list[Any] = [0, 1] if form == "ids" else names
    state = {
        key: {"exp_avg": model[name] / 2, "step": torch.tensor(2.0)} for key, name in zip(keys, names, strict=True)
    }
    content = {"model": model, "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": keys}]}}
    found = opened(save(tmp_path / "c", 3, lambda rank: others if rank else content))
    if form != "names":
        assert found.layout is Layout.FLATTENED
        return
    assert (found.layout, found.problems) == (Layout.FULL, ())
    assert found.optim is not None and held(found.optim.state, found.files) == held(state, ())


@pytest.mark.parametrize("checked", [True, False])
def test_vectors_that_differ_in_the_length_of_one_of_the_model_are_refused(tmp_path: Path, *, checked: bool) -> None:
    """They are slices, or replicas of different saves: nothing shows which, and rank 0's are neither."""

    def state_of(rank: int) -> Any:
        states = optimizer({0: {"exp_avg": randn(4, 3)}, 1: {"exp_avg": randn(4, rank=rank)}})
        return {"model": {"w": randn(4, 3), "b": randn(4)}, "optimizer": states}

    with pytest.raises(SourceCorruptError, match=r"optim 1\.exp_avg: the copies of .* differ, and they are replicas"):
        fsdpckpt.convert(save(tmp_path / "c", 2, state_of, checked=checked), tmp_path / "full.pt")


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("differ", [False, True])
def test_vectors_that_are_views_are_compared_element_by_element(tmp_path: Path, step: int, *, differ: bool) -> None:
    """Such a vector is no record of its own, so that no checksum is that of its bytes."""

    def state_of(rank: int) -> Any:
        storage = randn(30, rank=rank)  # other bytes between the elements
        vector = storage.as_strided((5,), (step,), 2)
        vector.fill_(7.0)
        if differ:
            vector[4] = rank
        return optimizer({0: {"exp_avg": randn(4, 3)}, 1: {"exp_avg": vector}})

    found = opened(save(tmp_path / "c", 2, state_of))
    assert found.layout is (Layout.FLATTENED if differ else Layout.FULL)


def test_a_counter_counts_where_the_parameter_has_elements(tmp_path: Path) -> None:
    """Adagrad makes all states at once; on a rank without elements nothing ever steps."""

    def state_of(rank: int) -> Any:
        entry = {"sum": randn(4 * rank, rank=rank), "step": torch.tensor(3.0 * rank), "seen": 7 * rank}
        return optimizer({0: entry})

    found = opened(save(tmp_path / "c", 2, state_of))
    assert (found.problems, leaf(found, 0, "sum").chunks.size.tolist()) == ((), [[0], [4]])
    step = leaf(found, 0, "step")
    assert (step.chunks.rank.tolist(), held(step, found.files)) == ([1], raw(torch.tensor(3.0)))
    assert found.optim is not None and found.optim.state[0]["seen"] == 7


def test_values_that_differ_where_there_are_elements_are_reported(tmp_path: Path) -> None:
    def state_of(rank: int) -> Any:
        return optimizer(
            {0: {"sum": randn(4 + rank, rank=rank), "seen": rank, "dtype": randn(3 + rank).to(FORMATS[rank])}}
        )

    found = opened(save(tmp_path / "c", 2, state_of))
    assert {(problem.kind, problem.key, problem.fatal) for problem in found.problems} == {
        ("replica", "state.0.seen", True),
        ("rank-mismatch", "state.0.dtype", True),
    }


FORMATS = (torch.float32, torch.bfloat16)


def test_a_keyed_optimizer_keeps_its_own_value_among_the_states(tmp_path: Path) -> None:
    """TorchRec: names for keys, and a user's tensor where a parameter's states stand."""

    def state_of(rank: int) -> Any:
        state = {"a.w": {"exp_avg": randn(3 + rank, rank=rank)}, "tables": randn(4)}
        return {"state": state, "param_groups": [{"lr": 0.1, "params": ["a.w"]}]}

    found = opened(save(tmp_path / "c", 2, state_of))
    assert found.optim is not None
    assert (found.problems, found.optim.key_type) == ((), "name")
    (tables,) = (tensor.tensor for tensor in found.tensors() if tensor.param == "tables")
    assert (tables.placement, held(tables, found.files)) == ("whole", raw(randn(4)))
    assert [named.key for named in found.tensors()] == ["a.w.exp_avg", "tables"]


def test_keys_of_flat_parameters_prove_slices_even_of_one_rank(tmp_path: Path) -> None:
    state = {"state": {"l._flat_param": {"exp_avg": randn(9)}}, "param_groups": [{"params": ["l._flat_param"]}]}
    torch.save(state, tmp_path / "optim.pt")
    found = opened(tmp_path / "optim.pt")
    assert "keys of flat parameters: l._flat_param" in [each.message for each in found.evidence]
    assert (found.layout, leaf(found, "l._flat_param", "exp_avg").placement) == (Layout.FLATTENED, "slices")


def test_vectors_of_one_rank_alone_prove_no_slices(tmp_path: Path) -> None:
    torch.save({"model": {"a.w": randn(4, 3)}, "optimizer": optimizer({0: {"exp_avg": randn(9)}})}, tmp_path / "all.pt")
    found = opened(tmp_path / "all.pt")
    assert (found.layout, found.problems, placements(found)) == (Layout.FULL, (), {"whole"})


def test_states_in_the_shapes_of_a_model_of_vectors_are_whole_whatever_their_bytes(tmp_path: Path) -> None:
    def state_of(rank: int) -> Any:
        return {"model": {"norm.w": randn(7)}, "optimizer": optimizer({0: {"exp_avg": randn(7, rank=rank)}})}

    assert opened(save(tmp_path / "c", 2, state_of)).layout is Layout.FULL


def test_states_that_a_rank_lacks_are_slices_of_others_wherever_the_optimizer_is(tmp_path: Path) -> None:
    def state_of(rank: int) -> Any:
        step = {"step": torch.tensor(3.0 * rank), "seen": 7 * rank}
        states = {0: {"exp_avg": randn(4 * rank, rank=rank), **step}, **({1: {"exp_avg": randn(5)}} if rank else {})}
        return {"trainer": {"optimizer": optimizer(states, 2)}}

    found = opened(save(tmp_path / "c", 2, state_of))
    assert (found.layout, found.problems) == (Layout.FLATTENED, ())
    assert found.optim is not None and found.optim.state[0]["seen"] == 7


def test_a_second_model_of_flat_parameters_needs_units_too(tmp_path: Path) -> None:
    def state_of(rank: int) -> Any:
        flat = {"l._flat_param": randn(6, rank=rank)}
        return {"model": flat, "average": {"ema": flat}}

    found = opened(save(tmp_path / "c", 2, state_of, "model"))
    assert found.layout is Layout.FLATTENED
    assert (found.problems, [named.label for named in found.named]) == ((), ["model:average.ema"])
    with pytest.raises(NeedsInformationError, match=r"names 1 parameter of flat parameters, without"):
        fsdpckpt.convert(tmp_path / "c", tmp_path / "out.pt", to="full")
    names = {"model": {"l.w": torch.zeros(3, 4)}, "average": {"ema": {"l.w": torch.zeros(2, 6)}}}
    torch.save(names, tmp_path / "names.pt")
    fsdpckpt.convert(tmp_path / "c", tmp_path / "out.pt", to="full", reference=str(tmp_path / "names.pt"))
    saved = torch.load(tmp_path / "out.pt")
    whole = torch.cat([randn(6, rank=rank) for rank in range(2)])
    assert identical(saved["model"]["l.w"], whole.view(3, 4))
    assert identical(saved["average"]["ema"]["l.w"], whole.view(2, 6))


def test_several_optimizers_in_slices_are_slices_and_need_units(tmp_path: Path) -> None:
    """GAN trainers: two optimizers in one file. As extras rank 0's slices would pass for whole tensors."""

    def state_of(rank: int) -> Any:
        return {name: optimizer({0: {"exp_avg": randn(6, rank=rank)}}) for name in ("opt_d", "opt_g")}

    found = opened(save(tmp_path / "c", 2, state_of))
    assert [named.label for named in found.named] == ["optim:opt_d", "optim:opt_g"]
    assert [(tensor.shape, tensor.cut) for tensor in found.leaves()] == [((12,), Slices())] * 2
    with pytest.raises(NeedsInformationError, match="no units file says what each flat parameter"):
        fsdpckpt.convert(tmp_path / "c", tmp_path / "out.pt", to="full")


def test_the_file_of_one_rank_says_that_others_are_missing(tmp_path: Path) -> None:
    directory = save(tmp_path / "c", 3, lambda rank: optimizer({0: {"exp_avg": randn(6, rank=rank)}}))
    (problem,) = opened(directory / "optim_world_size_3_rank_1.pt").problems
    assert (problem.kind, problem.rank, problem.fatal) == ("missing-rank", 1, True)


VECTOR, MATRIX = randn(6), randn(2, 3)


@pytest.mark.parametrize(
    ("name", "states", "others"),
    [
        ("optim_rank1", [VECTOR], "of all ranks"),
        ("optim_rank0", [VECTOR], None),
        ("optim_1", [VECTOR], None),
        ("optim", [VECTOR], None),
        ("optim_world_size_4_rank_0", [VECTOR], "of all 4 ranks"),
        ("optim_world_size_1_rank_0", [VECTOR], None),
        ("optim_rank1", [VECTOR, MATRIX], None),
        ("optim_rank1", [torch.tensor(3.0)], None),
        ("optim_rank1", [], None),
    ],
)
def test_a_file_is_one_of_several_only_if_its_name_and_its_vectors_say_so(
    name: str, states: list[torch.Tensor], others: str | None, tmp_path: Path
) -> None:
    torch.save(optimizer({number: {"exp_avg": state} for number, state in enumerate(states)}), tmp_path / f"{name}.pt")
    problems = opened(tmp_path / f"{name}.pt").problems
    assert [problem.kind for problem in problems] == ([] if others is None else ["missing-rank"])
    assert all(str(others) in problem.message for problem in problems)


def test_sections_that_were_gathered_on_rank_0_are_whole_in_files_of_their_own(tmp_path: Path) -> None:
    model = {"w": randn(4, 3), "b": randn(4)}
    state = {name: {"exp_avg": value / 2, "step": torch.tensor(2.0)} for name, value in model.items()}
    sections = {"model": model, "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": ["w", "b"]}]}}
    for rank in range(3):
        for section, content in sections.items():
            torch.save({} if rank else content, tmp_path / f"{section}_world_size_3_rank_{rank}.pt")
    assert fsdpckpt.verify(tmp_path).whole
    torch.save({"b": model["b"]}, tmp_path / "model_world_size_3_rank_2.pt")
    assert {problem.key for problem in fsdpckpt.verify(tmp_path).problems} == {"w", "b"}


def test_vectors_that_only_rank_0_has_may_be_its_slices(tmp_path: Path) -> None:
    found = opened(save(tmp_path / "c", 3, lambda rank: {"model": {} if rank else {"b": randn(4)}}))
    assert [(problem.kind, problem.key) for problem in found.problems] == [("missing-key", "model.b")]
