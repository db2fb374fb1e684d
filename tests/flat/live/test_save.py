"""What ``save_units`` says of live FSDP1 models, held against the models before wrapping and FSDP's own numbers."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import fsdpckpt
from fsdpckpt.errors import InternalError, SourceUnsupportedError, TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.flat.live import flattens_in_memory_order
from fsdpckpt.flat.live.meta import units_from_model
from fsdpckpt.flat.live.save import save_units, units_of
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.units import Strategy
from fsdpckpt.ir.units_json import loads
from tests.flat.live.conftest import World
from tests.flat.live.models import CASES, Case, Normalised, TiedAcross, TiedHead, wrapped
from tests.oracle.compare import identical, require_identical
from tests.oracle.flat_models import Convolutions, Nested, Outer, Perceptron

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import fully_shard

pytestmark = pytest.mark.filterwarnings("ignore")

NESTED = CASES["nested"]
BOTH = [
    pytest.param(case, orig, id=f"{name}, {orig}")
    for name, case in CASES.items()
    for orig in (False, True)
    if case.both or orig
]


def test_a_nested_model_is_told_in_full(world: World) -> None:
    world(5, rank=2)
    model = wrapped(NESTED, Nested(torch.bfloat16), use_orig_params=False)
    units = units_of(model, torch.optim.AdamW(model.parameters()))
    assert [(unit.prefix, unit.key, unit.strategy, unit.param_dtype) for unit in units.units] == [
        ("", "_flat_param", Strategy.FULL_SHARD, None),
        ("outer", "outer._flat_param", Strategy.FULL_SHARD, None),
        ("outer.inner", "outer.inner._flat_param", Strategy.FULL_SHARD, None),
    ]
    assert [[(param.name, param.shape, param.dtype.name) for param in unit.params] for unit in units.units] == [
        [
            ("first.weight", (7, 5), "float32"),
            ("first.bias", (7,), "float32"),
            ("last.weight", (3, 7), "float32"),
            ("last.bias", (3,), "float32"),
        ],
        [
            ("outer.gain", (3, 7), "float32"),
            ("outer.head.weight", (7, 7), "float32"),
            ("outer.tail.weight", (7, 7), "float32"),
            ("outer.tail.bias", (7,), "float32"),
        ],
        [
            ("outer.inner.norm.weight", (7,), "bfloat16"),
            ("outer.inner.norm.bias", (7,), "bfloat16"),
            ("outer.inner.up.weight", (11, 7), "bfloat16"),
            ("outer.inner.up.bias", (11,), "bfloat16"),
            ("outer.inner.down.weight", (7, 11), "bfloat16"),
            ("outer.inner.down.bias", (7,), "bfloat16"),
        ],
    ]
    assert units.parameters == tuple(name for name, _ in Nested().named_parameters())
    assert units.groups == (("_flat_param", "outer._flat_param", "outer.inner._flat_param"),)
    assert (units.use_orig_params, units.world_size, units.shard_size) == (False, 5, None)
    assert (units.unmanaged, units.shared) == ((), ())


@pytest.mark.parametrize(("case", "use_orig_params"), BOTH)
def test_a_model_is_told_as_it_was_before_wrapping_and_as_it_would_be_wrapped(
    case: Case, use_orig_params: bool, world: World
) -> None:
    """Groups name what the optimizer holds: PyTorch's own names of the parameters are the judge."""
    before = case.make()
    original = dict(before.named_parameters(remove_duplicate=False))
    names = {name for name, _ in before.named_parameters()}
    twice = {name for name in original if name not in names}
    world(5, rank=3)
    model = wrapped(case, case.make(), use_orig_params=use_orig_params)
    units = units_of(model)
    for name, param in units.params().items():
        assert (param.shape, param.requires_grad) == (tuple(original[name].shape), original[name].requires_grad)
        assert param.dtype.name == str(original[name].dtype).removeprefix("torch.")
        row_major = original[name].is_contiguous() or not flattens_in_memory_order()
        assert param.stride == (None if row_major else original[name].stride())
    for later, first in units.shared:
        assert original[later] is original[first]
    if use_orig_params or case.make is not TiedAcross:  # which FSDP flattens twice without use_orig_params
        assert len({id(original[name]) for name in units.parameters}) == len(units.parameters) == len(names)
    if use_orig_params:
        assert {later for later, _ in units.shared} | set(units.params()) == names | twice
    if not case.mixed and case.make is not TiedAcross:
        assert units.parameters == tuple(name for name, _ in before.named_parameters())

    on_meta = units_from_model(case.make, case.classes, use_orig_params=use_orig_params, ignored=case.ignored)
    assert replace(on_meta, world_size=5, order=units.order) == units
    assert on_meta.optimizer_keys() == units.optimizer_keys()
    if use_orig_params or not case.mixed:
        assert on_meta.parameters == units.parameters
    else:  # the wrapped model does not know any more, the other does
        assert on_meta.parameters == tuple(name for name, _ in before.named_parameters())

    if use_orig_params and case.classes and not case.ignored:  # the policy function of older scripts wraps the same
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=set(case.classes))
        assert units_of(wrapped(case, case.make(), use_orig_params=True, auto_wrap_policy=policy)) == units

    params = list(model.parameters())[::-1]
    cut = len(params) // 3
    grouped = units_of(model, torch.optim.SGD([{"params": params[:cut]}, {"params": params[cut:], "lr": 0.5}], lr=0.1))
    assert grouped.groups is not None
    assert [len(group) for group in grouped.groups] == [cut, len(params) - cut]
    judge: dict[int, set[str]] = {}
    for name, held in model.named_parameters(remove_duplicate=False):
        judge.setdefault(id(held), set()).add(name.replace("_fsdp_wrapped_module.", ""))
    for key, held in zip((key for group in grouped.groups for key in group), params, strict=True):
        assert key in judge[id(held)]
    assert grouped.optimizer_keys() == units_of(model, torch.optim.SGD(model.parameters(), lr=0.1)).groups[0]  # type: ignore[index]


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_weight_that_the_head_shares_with_the_embedding_does_not_change_the_order_of_modules(
    name: str, world: World, tmp_path: Path
) -> None:
    """FSDP flattens it in the head's unit, and ``parameters()`` lists it where the embedding is. In a full state dict
    its states are under the embedding's ``name``, that of ``FSDP.optim_state_dict``, or under the head's.
    """
    world(3)
    model = wrapped(Case(TiedHead, (Perceptron, nn.Linear)), TiedHead(), use_orig_params=True)
    units = units_of(model)
    assert units.shared == (("embed.weight", "head.weight"),)
    assert units.parameters[0] == "head.weight"
    save_units(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "units.json")
    full = TiedHead().state_dict()
    keys = [name, *units.parameters[1:]]
    state = {key: {"momentum_buffer": torch.rand_like(full[key])} for key in keys}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": keys}]}
    torch.save({"model": full, "optimizer": optimizer}, tmp_path / "full.pt")
    dist.destroy_process_group()
    wanted: dict[str, Any] = {"to": "flattened", "world_size": 3, "key_type": "id", "units": tmp_path / "units.json"}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "flat", **wanted)
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "again.pt", to="full", key_type="name")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    require_identical(again["model"], full)
    found = again["optimizer"]["state"].values()  # in the same order
    for states, key in zip(found, keys, strict=True):
        assert identical(states["momentum_buffer"], state[key]["momentum_buffer"])
    assert fsdpckpt.diff(tmp_path / "full.pt", tmp_path / "flat").same
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "on-2", to="flattened", world_size=2)
    assert fsdpckpt.diff(tmp_path / "on-2", tmp_path / "full.pt").same


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_all_ranks_tell_the_same(use_orig_params: bool, world: World) -> None:
    case = CASES["tied transformer"]
    found = []
    for rank in range(4):
        world(4, rank=rank)
        model = wrapped(case, case.make(), use_orig_params=use_orig_params)
        found.append(units_of(model, torch.optim.AdamW(model.parameters())))
    assert all(units == found[0] for units in found)


def test_an_optimizer_with_some_of_the_parameters_has_ids_for_those(world: World) -> None:
    world(2)
    case = CASES["partly frozen"]
    model = wrapped(case, case.make(), use_orig_params=True)
    units = units_of(model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1))
    assert units.groups == (tuple(name for name in units.parameters if name != "first.bias"),)
    assert [name for name, param in units.params().items() if not param.requires_grad] == ["first.bias"]
    assert units_of(model).groups is None
    assert units_of(model, torch.optim.SGD([*model.parameters()][:1], lr=0.1)).groups == (("first.weight",),)


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_strategy_is_each_units_own(name: str, world: World) -> None:
    world(3)
    model, device = Nested(), torch.device("cpu")
    model.outer = FullyShardedDataParallel(model.outer, sharding_strategy=ShardingStrategy[name], device_id=device)  # type: ignore[assignment]
    units = units_of(FullyShardedDataParallel(model, device_id=device))
    assert [unit.strategy for unit in units.units] == [Strategy.FULL_SHARD, Strategy[name]]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [None, ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_one_rank_shards_nothing_and_hybrid_sharding_has_groups_of_their_own_size(
    strategy: ShardingStrategy | None, use_orig_params: bool, world: World
) -> None:
    if strategy is None:
        world(1)
        expected = Strategy.NO_SHARD, 1, None
        options: dict[str, Any] = {}
    else:
        world(6, rank=4)
        expected = Strategy.HYBRID_SHARD, 6, 3
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("between", "within"))
        options = {"sharding_strategy": strategy, "device_mesh": mesh}
    units = units_of(wrapped(NESTED, Nested(), use_orig_params=use_orig_params, **options))
    assert {(unit.strategy, units.world_size, units.shard_size) for unit in units.units} == {expected}


@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[0, 3], [1, 2]]])
def test_hybrid_sharding_over_ranks_that_are_no_neighbours_is_refused(
    ranks: list[list[int]], world: World, tmp_path: Path
) -> None:
    """Files of such ranks can be read by lengths and checksums alone, and these may all be equal, or absent."""
    for rank in range(4):
        world(4, rank=rank)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("between", "within"))
        model = wrapped(NESTED, Nested(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
        with pytest.raises(SourceUnsupportedError, match="where neighbouring ranks shard"):
            save_units(model, None, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_mixed_precision_is_each_units_own_and_leaves_out_batch_normalisation(
    dtype: str, use_orig_params: bool, world: World
) -> None:
    world(3)
    case, low = Case(Normalised, (nn.Sequential,)), DTYPES[dtype]
    mixed = MixedPrecision(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    units = units_of(wrapped(case, Normalised(), use_orig_params=use_orig_params, mixed_precision=mixed))
    assert [(unit.prefix, unit.param_dtype) for unit in units.units] == [
        ("", low), ("norm", None), ("block", low), ("block.2", None),
    ]  # fmt: skip
    assert {param.dtype.name for param in units.params().values()} == {"float32"}
    found = units_from_model(Normalised, [nn.Sequential], use_orig_params=use_orig_params, param_dtype=low)
    assert replace(found, world_size=3) == units


def test_a_model_cast_after_wrapping_keeps_its_alignment(world: World) -> None:
    world(3)
    model = wrapped(CASES["tiny"], CASES["tiny"].make(), use_orig_params=True).half()
    for _ in ("before the first forward", "after it"):
        units = units_of(model)
        assert all(unit.param_dtype == DTYPES["float32"] for unit in units.units)
        assert {param.dtype.name for param in units.params().values()} == {"float16"}
        for module in FullyShardedDataParallel.fsdp_modules(model):
            module._handle.init_flat_param_attributes()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_training_and_evaluation_change_nothing(
    strategy: ShardingStrategy, use_orig_params: bool, world: World
) -> None:
    """After an evaluation the root's parameters stay whole, and in the low precision."""
    world(3, rank=1)
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    model = wrapped(
        NESTED, Nested(), use_orig_params=use_orig_params, mixed_precision=mixed, sharding_strategy=strategy
    )
    optimizer = torch.optim.AdamW(model.parameters())
    expected = units_of(model, optimizer)
    for _ in range(2):
        model(torch.Generator().manual_seed(3)).backward()
        optimizer.step()
        assert units_of(model, optimizer) == expected
        with torch.no_grad():
            model(torch.Generator().manual_seed(4))
        assert units_of(model, optimizer) == expected


def test_names_lose_what_wrappers_add(world: World) -> None:
    world(2)
    model = Nested()
    model.outer.inner.up = checkpoint_wrapper(model.outer.inner.up)  # type: ignore[assignment]
    model.outer.inner = torch.compile(model.outer.inner)  # type: ignore[assignment]
    inner = wrapped(Case(Nested, (Outer,)), model, use_orig_params=True)
    units = units_of(torch.compile(inner), torch.optim.SGD(inner.parameters(), lr=0.1))  # type: ignore[arg-type]
    assert [unit.prefix for unit in units.units] == ["", "outer"]
    assert units.parameters == tuple(name for name, _ in Nested().named_parameters())
    assert units.groups == (units.parameters,)


def test_a_model_whose_root_is_not_wrapped_has_parameters_outside(world: World) -> None:
    world(2)
    for use_orig_params in (False, True):
        model = Nested()
        model.outer = wrapped(Case(Nested, (Perceptron,)), model.outer, use_orig_params=use_orig_params)  # type: ignore[assignment]
        units = units_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert [unit.prefix for unit in units.units] == ["outer", "outer.inner"]
        assert [param.name for param in units.unmanaged] == ["first.weight", "first.bias", "last.weight", "last.bias"]
        assert units.parameters == tuple(name for name, _ in Nested().named_parameters())
        assert units.groups == (units.optimizer_keys(),)


def test_an_unknown_order_is_said(world: World) -> None:
    world(2)
    case = CASES["own parameters"]
    model = wrapped(case, case.make(), use_orig_params=False)
    with pytest.warns(UserWarning, match="which come first"):
        assert units_of(model).parameters[:3] == ("kept", "before", "after")


def test_older_torch_lacks_some_attributes(world: World) -> None:
    """torch 2.4 has neither strides nor contiguities, and flattens row-major."""
    world(2)
    model = wrapped(NESTED, Nested(), use_orig_params=True)
    expected = units_of(model)
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat: Any = module._handle.flat_param
        for attribute in ("_strides", "_contiguities"):
            if hasattr(flat, attribute):
                delattr(flat, attribute)
        del module._handle._aligned_numel
    assert units_of(model) == expected


def test_units_that_fsdp_contradicts_are_never_given_out(world: World) -> None:
    world(2)
    model = wrapped(NESTED, Nested(), use_orig_params=True)
    flat: Any = model._handle.flat_param
    flat._shapes = [torch.Size((7, 6)), *flat._shapes[1:]]
    with pytest.raises(InternalError, match="offsets of the parameters"):
        units_of(model)


def test_a_model_without_fsdp1_has_names_order_groups_and_no_units(world: World, tmp_path: Path) -> None:
    model = TiedHead()
    (tied,) = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(dict(model.named_parameters()))
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(
        [{"params": list(model.parameters())[::-1][:2]}, {"params": [next(model.parameters())]}]
    )
    for rank in (1, 0):
        world(2, rank=rank)
        fsdpckpt.save_parameter_order(model, optimizer, tmp_path)
        assert (tmp_path / "units.json").exists() is (rank == 0)
    units = loads((tmp_path / "units.json").read_bytes(), source="units.json")
    assert (units.units, units.parameters, [later for later, _ in units.shared]) == ((), tuple(names), [tied])
    assert {param.name: param.shape for param in units.unmanaged} == {
        name: tuple(param.shape) for name, param in model.named_parameters()
    }
    assert units.groups == ((names[-1], names[-2]), (names[0],))


@pytest.mark.parametrize("how", ["fsdp2", "ddp", "compiled", "checkpointed"])
def test_wrappers_do_not_change_names_and_shapes(how: str, world: World) -> None:
    world(2)
    plain = units_of(Nested(), None)
    model: nn.Module = Nested()
    if how == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif how == "compiled":
        model = torch.compile(model)  # type: ignore[assignment]
    else:
        model.outer = checkpoint_wrapper(model.outer)
    assert units_of(model, torch.optim.AdamW(model.parameters())).with_groups(None) == plain


@pytest.mark.parametrize("how", ["fsdp2", "flat parameters", "original parameters"])
def test_an_optimizer_of_the_model_before_it_was_wrapped_is_refused(how: str, world: World, tmp_path: Path) -> None:
    world(2)
    model: nn.Module = Nested()
    if how == "fsdp2":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        optimizer = torch.optim.SGD(Nested().parameters(), lr=0.1)
        model = wrapped(NESTED, Nested(), use_orig_params=how == "original parameters")
    with pytest.raises(UsageError, match="group 0 of the optimizer: 14 parameters are not in this model"):
        save_units(model, optimizer, tmp_path)
    with pytest.raises(UsageError, match="no parameters"):
        save_units(nn.Identity(), None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_first_rank_writes_and_only_it(world: World, tmp_path: Path) -> None:
    for rank in (1, 0):
        world(2, rank=rank)
        model = wrapped(CASES["channels_last"], Convolutions(), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters())
        path = tmp_path / "runs" / "step-1" / "my.json"
        assert fsdpckpt.save_units(model, optimizer, path) is None
        assert path.exists() is (rank == 0)
    assert loads(path.read_bytes(), source=str(path)) == units_of(model, optimizer)
    assert os.listdir(path.parent) == ["my.json"]


def test_of_several_replicas_one_rank_writes(world: World, tmp_path: Path) -> None:
    for rank in range(4):
        world(4, rank=rank)
        mesh = init_device_mesh("cpu", (2, 2))
        hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        save_units(wrapped(NESTED, Nested(), **hybrid), None, tmp_path / f"rank-{rank}.json")
    assert os.listdir(tmp_path) == ["rank-0.json"]


def test_a_directory_gets_a_units_json_that_replaces_an_earlier_one(world: World, tmp_path: Path) -> None:
    world(2)
    model = wrapped(NESTED, Nested())
    before = os.umask(0o022)
    try:
        for _ in range(2):
            save_units(model, None, str(tmp_path / "ckpt"))
    finally:
        os.umask(before)
    path = tmp_path / "ckpt" / "units.json"
    assert os.listdir(path.parent) == ["units.json"]
    assert path.stat().st_mode & 0o777 == 0o644
    assert loads(path.read_bytes(), source=str(path)) == units_of(model)


def test_where_nothing_can_be_written_nothing_is_left_and_no_other_file_is_replaced(
    world: World, tmp_path: Path
) -> None:
    world(2)
    model = wrapped(NESTED, Nested())
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 5}')
    (tmp_path / "taken.json" / "units.json").mkdir(parents=True)
    for path, error, words in (
        (config, TargetExistsError, r"config\.json exists and is not a units file"),
        (config / "units.json", TargetUnwritableError, None),
        (tmp_path / "taken.json", TargetExistsError, None),
        ("memory://units.json", UsageError, "local disks only"),
    ):
        with pytest.raises(error, match=words):
            save_units(model, None, path)
    assert config.read_text() == '{"hidden_size": 5}'
    assert os.listdir(tmp_path / "taken.json") == ["units.json"]
    dist.destroy_process_group()  # units can still be saved
    save_units(model, None, tmp_path)
    assert (tmp_path / "units.json").exists()
