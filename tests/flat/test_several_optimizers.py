"""Flat parameters with several optimizers: units are those of the model, and each optimizer holds some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.flat.division import Divided, UndividedError, divide
from tests.oracle.compare import require_identical
from tests.oracle.fake_group import as_rank

pytestmark = pytest.mark.filterwarnings("ignore")

RANKS = 3
Optimizers = dict[str, torch.optim.Optimizer]
Named = dict[str, nn.Parameter]


class Block(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.lin = nn.Linear(columns, rows)
        self.norm = nn.LayerNorm(rows)


class Net(nn.Module):
    def __init__(self, shapes: Iterable[tuple[int, int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*shape) for shape in shapes)
        self.head = nn.Linear(3, 2)


def matrices_and_rest(params: Named) -> Optimizers:
    matrices = [param for name, param in params.items() if "lin.weight" in name]
    rest = [param for name, param in params.items() if "lin.weight" not in name]
    return {"muon": torch.optim.SGD(matrices, lr=0.02, momentum=0.9), "adam": torch.optim.AdamW(rest, lr=0.003)}


def without_decay(params: Named) -> Optimizers:
    """Adam's groups list parameters of equal lengths in an order of their own."""
    optimizers = matrices_and_rest(params)
    rest = {name: param for name, param in params.items() if "lin.weight" not in name}
    decayed = [param for name, param in rest.items() if "norm.weight" in name]
    others = [param for name, param in rest.items() if "norm.weight" not in name]
    groups = [{"params": others[::-1], "weight_decay": 0.0}, {"params": decayed}]
    return {**optimizers, "adam": torch.optim.AdamW(groups, lr=0.003)}


def by_module(params: Named) -> Optimizers:
    """The second one lists the root's last, which the model has first."""
    first, second, root = (params[key] for key in ("blocks.0._flat_param", "blocks.1._flat_param", "_flat_param"))
    return {"first": torch.optim.Adam([first], lr=0.01), "second": torch.optim.Adam([second, root], lr=0.002)}


def twins(params: Named) -> Optimizers:
    return {
        "first": torch.optim.Adam([params["blocks.0._flat_param"]]),
        "second": torch.optim.Adam([params[key] for key in ("blocks.1._flat_param", "_flat_param")]),
    }


def apart(name: str, value: torch.Tensor, parts: list[torch.Tensor], flat: Any) -> dict[str, torch.Tensor]:
    """The states of the parameters in ``parts``, one on each rank, cut as torch's own metadata says."""
    prefix = name.removesuffix("_flat_param")
    fqns = [name] if flat is None else [f"{prefix}{fqn}" for fqn in flat._fqns]
    if value.ndim == 0:
        return dict.fromkeys(fqns, value)
    whole = torch.cat(parts)
    if flat is None:
        return {name: whole}
    pieces = whole[: sum(flat._numels)].split(list(flat._numels))
    return {fqn: piece.view(shape) for fqn, piece, shape in zip(fqns, pieces, flat._shapes, strict=True)}


def sharded(shards: list[Shard], total: int, **_: Any) -> ShardedTensor:
    """What ``init_from_local_shards`` makes, without asking the other ranks."""
    length = -(-total // RANKS)
    metadata = [
        ShardMetadata([begin], [min(length, total - begin)], f"rank:{rank}/cpu")
        for rank, begin in enumerate(range(0, total, length))
    ]
    needs_grad = any(shard.tensor.requires_grad for shard in shards)
    properties = TensorProperties(dtype=torch.float32, requires_grad=needs_grad)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, ShardedTensorMetadata(metadata, torch.Size([total]), properties)
    )


def save(
    folder: Path,
    shapes: Iterable[tuple[int, int]],
    optimizers_of: Callable[[Named], Optimizers],
    *,
    use_orig_params: bool,
    frozen: tuple[str, ...] = (),
) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """Save rank files of a real FSDP1 job, and its units. Returns all states: optimizer, parameter, state."""
    folder.mkdir()
    held: list[dict[tuple[str, str, str], torch.Tensor]] = []
    flats: dict[str, Any] = {}
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            torch.manual_seed(5)
            model = Net(shapes)
            sizes = {name: param.shape for name, param in model.named_parameters()}
            for name, param in model.named_parameters():
                param.requires_grad_(name not in frozen)
            wrapped = FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                use_orig_params=use_orig_params,
                device_id=torch.device("cpu"),
            )
            params = {name.replace("_fsdp_wrapped_module.", ""): each for name, each in wrapped.named_parameters()}
            optimizers = optimizers_of({name: each for name, each in params.items() if each.requires_grad})
            torch.manual_seed(100 + rank)
            for optimizer in optimizers.values():
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.grad = torch.randn_like(param) if param.numel() else None
                        if not use_orig_params and param.grad is not None:  # padding has no gradient
                            param.grad[max(0, sum(param._numels) - rank * param.numel()) :] = 0
                optimizer.step()
            held.append({
                (key, name, state): value
                for key, optimizer in optimizers.items()
                for name, param in params.items()
                for state, value in optimizer.state.get(param, {}).items()
            })  # fmt: skip
            if not use_orig_params:
                flats |= params
            with (
                mock.patch("torch.distributed.fsdp._state_dict_utils.init_from_local_shards", sharded),
                FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT),
            ):
                saved = {"model": wrapped.state_dict()}
            content = {**saved, "optimizers": {key: each.state_dict() for key, each in optimizers.items()}}
            torch.save(content, folder / f"state_world_size_{RANKS}_rank_{rank}.pt")
            if rank == 0:
                fsdpckpt.save_units(wrapped, None, str(folder / "units.json"))
                fsdpckpt.save_units(wrapped, optimizers, str(folder.parent / "all.json"))
                for key, optimizer in optimizers.items():
                    fsdpckpt.save_units(wrapped, optimizer, str(folder.parent / f"{key}.json"))
    states: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for key, name, state in dict.fromkeys(each for of_rank in held for each in of_rank):
        parts = [of_rank[key, name, state] for of_rank in held if (key, name, state) in of_rank]
        for fqn, value in apart(name, parts[0], parts, flats.get(name)).items():
            shaped = value if value.ndim == 0 else value.view(sizes[fqn])
            states.setdefault(key, {}).setdefault(fqn, {})[state] = shaped
    return states


ODD = [(7, 5), (3, 7)]
JOBS: dict[str, dict[str, Any]] = {
    "matrices and rest": {"optimizers_of": matrices_and_rest, "use_orig_params": True},
    "frozen": {
        "optimizers_of": matrices_and_rest,
        "use_orig_params": True,
        "frozen": ("blocks.0.norm.weight", "head.bias"),
    },
    "by module": {"optimizers_of": by_module, "use_orig_params": False},
}


@pytest.mark.parametrize("job", JOBS)
def test_each_optimizer_gets_the_states_of_its_own_parameters(job: str, tmp_path: Path) -> None:
    source, full = tmp_path / "ranks", tmp_path / "full.pt"
    expected = save(source, ODD, **JOBS[job])
    report = fsdpckpt.convert(source, full, key_type="name")
    found = torch.load(full)["optimizers"]
    for key, states in expected.items():
        require_identical(found[key]["state"], states)
    assert any("found by the lengths of its slices" in note.message for note in report.notes)
    assert fsdpckpt.verify(source).whole
    assert fsdpckpt.diff(source, full).same
    # One alone is named by the same division, and other ranks get the same.
    last = list(expected)[-1]
    fsdpckpt.convert(source, tmp_path / "one.pt", only=f"optim:{last}", key_type="name")
    require_identical(torch.load(tmp_path / "one.pt")["state"], expected[last])
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", world_size=2)
    assert fsdpckpt.diff(tmp_path / "dcp", full).same


def test_names_and_wrapping_are_taken_from_a_reference_too(tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    expected = save(source, ODD, matrices_and_rest, use_orig_params=True)
    fsdpckpt.convert(source, tmp_path / "full.pt", key_type="name")
    (source / "units.json").unlink()
    fsdpckpt.convert(source, tmp_path / "again.pt", reference=str(tmp_path / "full.pt"), key_type="name")
    for key, states in expected.items():
        require_identical(torch.load(tmp_path / "again.pt")["optimizers"][key]["state"], states)


def test_between_parameters_that_look_alike_nothing_is_chosen(tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    expected = save(source, [(7, 5), (7, 5)], twins, use_orig_params=False)
    for target in ({}, {"only": "optim:second"}):
        with pytest.raises(NeedsInformationError, match="which parameters each optimizer") as error:
            fsdpckpt.convert(source, tmp_path / "full.pt", **target)  # type: ignore[arg-type]
        assert "save_units(model, optimizer)" in str(error.value)
    # Units with the order of one optimizer say what is left for the other one.
    for key in expected:
        units = str(tmp_path / f"{key}.json")
        fsdpckpt.convert(source, tmp_path / f"{key}.pt", units=units, key_type="name")
        for other, states in expected.items():
            require_identical(torch.load(tmp_path / f"{key}.pt")["optimizers"][other]["state"], states)


def test_units_with_the_groups_of_one_optimizer_divide_the_rest(tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    expected = save(source, ODD, without_decay, use_orig_params=True)
    with pytest.raises(NeedsInformationError, match="no division in the order of the model fits"):
        fsdpckpt.convert(source, tmp_path / "full.pt")
    fsdpckpt.convert(source, tmp_path / "full.pt", units=str(tmp_path / "adam.json"), key_type="name")
    found = torch.load(tmp_path / "full.pt")["optimizers"]
    for key, states in expected.items():
        require_identical(found[key]["state"], states)
    assert [len(group["params"]) for group in found["adam"]["param_groups"]] == [6, 2]


def test_units_that_fit_two_optimizers_name_neither(tmp_path: Path) -> None:
    source = tmp_path / "ranks"

    def each_one(params: Named) -> Optimizers:
        return {f"of_{at}": torch.optim.Adam([params[f"blocks.{at}._flat_param"]]) for at in range(2)}

    save(source, [(7, 5), (7, 5)], each_one, use_orig_params=False)
    for key in ("of_0", "of_1"):
        with pytest.raises(NeedsInformationError, match="several divisions fit"):
            fsdpckpt.convert(source, tmp_path / "full.pt", units=str(tmp_path / "of_0.json"), only=f"optim:{key}")


def test_an_optimizer_of_another_model_takes_no_part(tmp_path: Path) -> None:
    source = tmp_path / "ranks"

    def one(params: Named) -> Optimizers:
        return {"generator": torch.optim.Adam(params.values())}

    expected = save(source, ODD, one, use_orig_params=True)
    for rank in range(RANKS):
        path = source / f"state_world_size_{RANKS}_rank_{rank}.pt"
        with as_rank(rank, RANKS):
            content = torch.load(path, weights_only=False)
            states = {0: {"exp_avg": torch.randn(7 + rank)}}
            content["optimizers"]["critic"] = {"state": states, "param_groups": [{"lr": 0.1, "params": [0]}]}
            torch.save(content, path)
    fsdpckpt.convert(source, tmp_path / "one.pt", only="optim:generator", key_type="name")
    require_identical(torch.load(tmp_path / "one.pt")["state"], expected["generator"])
    with pytest.raises(NeedsInformationError, match="the optimizers list 11 parameters, the units have 10"):
        fsdpckpt.convert(source, tmp_path / "all.pt")


def parameters(*lengths: int) -> dict[str, tuple[int, ...]]:
    return {f"p{at}": (length, 0) for at, length in enumerate(lengths)}


def listed(*lengths: int | None) -> list[tuple[int, ...] | None]:
    return [None if length is None else (length, 0) for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "groups", "optional", "names"),
    [
        ((5, 3, 5, 3), [listed(5, 5), listed(3, 3)], (), (("p0", "p2"), ("p1", "p3"))),
        ((5, 3, 4), [listed(4, 5), listed(3)], (), (("p2", "p0"), ("p1",))),  # not in the order of the model
        ((5, 3, 5), [listed(5, None, 5)], (), (("p0", "p1", "p2"),)),
        ((5, 3, 5), [listed(5), listed(3)], ("p2",), (("p0",), ("p1",))),
        ((5, 3, 7), [listed(5), listed(7)], (), (("p0",), ("p2",))),  # p1 has no optimizer
        ((5, 3), [listed(), listed(5, 3)], (), ((), ("p0", "p1"))),
    ],
)
def test_a_division_is_the_only_one_that_fits(
    lengths: tuple[int, ...], groups: list[Any], optional: tuple[str, ...], names: tuple[tuple[str, ...], ...]
) -> None:
    found = divide(parameters(*lengths), groups, frozenset(optional))
    assert found == Divided(names, by_order=lengths != (5, 3, 4))


@pytest.mark.parametrize(
    ("lengths", "groups", "why"),
    [
        ((5, 5), [listed(5), listed(5)], "several"),
        ((5, 3, 5), [listed(5), listed(3)], "several"),  # either of two may be without an optimizer
        ((5, 3), [listed(None), listed(None)], "several"),
        ((5, 3), [listed(5), listed(4)], "no division"),
        ((5, 5, 3), [listed(3, 5), listed(5)], "no division"),  # out of order, and two are alike
        ((5,), [listed(5), listed(5)], "list 2"),
    ],
)
def test_nothing_is_chosen(lengths: tuple[int, ...], groups: list[Any], why: str) -> None:
    with pytest.raises(UndividedError, match=why):
        divide(parameters(*lengths), groups, frozenset())
