"""Ids and names of real optimizers, against what torch.optim numbers and what FSDP's own rekeying gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.rekey import apply_key_type
from fsdpckpt.transform.stated_orders import GivenNames, parameter_orders
from tests.oracle import toy
from tests.oracle.session import Oracle

GOLDEN = Path(__file__).parents[1] / "golden"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.wide = nn.Linear(7, 11)
        self.narrow = nn.Linear(11, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(7, 13)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[1](self.layers[0](self.embed(tokens))))


def _one_group(model: Model) -> list[Any]:
    return list(model.parameters())


def _by_dimension(model: Model) -> list[Any]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]


def _named(model: Model) -> list[Any]:
    last = [(name, parameter) for name, parameter in model.named_parameters() if "layers.1" in name]
    rest = [(name, parameter) for name, parameter in model.named_parameters() if "layers.1" not in name]
    return [{"params": last, "lr": 0.5}, {"params": rest}]


def _trained(groups: Callable[[Model], list[Any]]) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(13, (5,))).square().sum().backward()
        optimizer.step()
    return model, optimizer


def _open(path: Path, content: object | None = None) -> Checkpoint:
    if content is not None:
        torch.save(content, path)
    with Sources() as sources:
        return open_checkpoint(str(path), sources=sources, locate=Locate.ALL)


def _rekeyed(checkpoint: Checkpoint, key_type: str, **more: Any) -> Checkpoint:
    return apply_key_type(checkpoint, key_type, GivenNames(**more))


def _keys(checkpoint: Checkpoint) -> dict[Any, Any]:
    """Each key of the state with where its first tensor lies, which tells the states apart."""
    return {
        key: int(states["exp_avg"].chunks.offset[0]) if "exp_avg" in states else None
        for key, states in checkpoint.optim.state.items()
    }


def _groups(checkpoint: Checkpoint) -> list[Any]:
    return [group["params"] for group in checkpoint.optim.param_groups]


@pytest.mark.parametrize("groups", [_one_group, _by_dimension, _named])
def test_ids_become_the_names_that_fsdp_gives_them_and_ids_again(groups: Any, tmp_path: Path) -> None:
    model, optimizer = _trained(groups)
    source = _open(tmp_path / "a.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = FullyShardedDataParallel.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )
    named = _rekeyed(source, "name")
    assert list(named.optim.state) == list(expected["state"])
    # FSDP sorts each group's names, which forgets their ids; these are in the optimizer's order.
    assert [sorted(group) for group in _groups(named)] == [group["params"] for group in expected["param_groups"]]
    assert list(_keys(named).values()) == list(_keys(source).values())
    again = _rekeyed(named, "id")
    assert _keys(again) == _keys(source) and _groups(again) == _groups(source)


def test_a_tied_weight_of_a_full_file_is_one_parameter_even_as_a_copy(tmp_path: Path) -> None:
    """FSDP1's full files hold tied weights twice, as clones: the order and the shapes tell which name has no id."""
    model, optimizer = _trained(_one_group)
    cloned = {name: value.clone() for name, value in model.state_dict().items()}
    source = _open(tmp_path / "a.pt", {"model": cloned, "optimizer": optimizer.state_dict()})
    assert list(_rekeyed(source, "name").optim.state) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("alike", [True, False], ids=["equal", "different"])
def test_copies_are_not_taken_for_a_tied_weight_by_their_values(alike: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3)))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    tied = _open(tmp_path / "tied.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert list(_rekeyed(tied, "name").optim.state) == ["0.weight", "2.weight"]  # one storage
    cloned = {name: value.clone() for name, value in model.state_dict().items()}
    if not alike:
        cloned["1.weight"] += 1
    source = _open(tmp_path / "a.pt", {"model": cloned, "optimizer": optimizer.state_dict()})
    with pytest.raises(NeedsInformationError) as asked:
        _rekeyed(source, "name")
    assert ("1.weight may be another name" in str(asked.value.why)) is alike


@pytest.mark.parametrize("fill", [0.0, 1.0], ids=["zeros", "ones"])
@pytest.mark.parametrize("shape", [(4, 4), (4,)], ids=["matrices", "vectors"])
def test_parameters_that_are_equal_since_they_were_made_keep_their_own_states(
    fill: float, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """As LoRA's second factors: the base weight is frozen, and two adapters of zeros have one state each."""
    model = nn.ParameterDict({name: torch.randn(shape) for name in "abcd"})
    with torch.no_grad():
        for name in "cd":
            model[name].fill_(fill)
    model["a"].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([param for param in model.values() if param.requires_grad], momentum=0.9)
    for param in model.values():
        param.grad = torch.randn_like(param) if param.requires_grad else None
    optimizer.step()
    with torch.no_grad():
        for name in "cd":
            model[name].fill_(fill)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(NeedsInformationError, match="d may be another name"):
        _rekeyed(_open(tmp_path / "one_too_many.pt", saved), "name")
    saved["model"].pop("a")
    assert list(_rekeyed(_open(tmp_path / "all.pt", saved), "name").optim.state) == ["b", "c", "d"]


@pytest.mark.parametrize("states", [{}, {0: "0.weight"}])
def test_equal_vectors_are_not_taken_for_second_names(states: dict[int, str], tmp_path: Path) -> None:
    """The bias of a norm, which is still zero, and a running mean of zeros are two tensors: which has no id is open."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    content = optimizer.state_dict()
    parameters = dict(model.named_parameters())
    content["state"] = {key: {"momentum_buffer": torch.ones_like(parameters[name])} for key, name in states.items()}
    zeros = ("1.bias", "2.running_mean", "3.bias")
    held = {
        name: torch.zeros(4) if name in zeros else torch.rand_like(value.float())
        for name, value in model.state_dict().items()
    }
    held["2.num_batches_tracked"] = torch.tensor(0)
    source = _open(tmp_path / "a.pt", {"model": held, "optimizer": content})
    with pytest.raises(NeedsInformationError):
        _rekeyed(source, "name")


def test_names_that_fsdp_sorted_get_the_ids_they_had(tmp_path: Path) -> None:
    for number, groups in enumerate((_one_group, _by_dimension, _named)):
        model, optimizer = _trained(groups)
        by_name = FullyShardedDataParallel.rekey_optim_state_dict(
            optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
        )
        source = _open(tmp_path / f"{number}.pt", {"model": model.state_dict(), "optimizer": by_name})
        found = _rekeyed(source, "id")
        assert list(found.optim.state) == list(optimizer.state_dict()["state"])
        listed = [dict(group) for group in optimizer.state_dict()["param_groups"]]
        assert _groups(found) == [group["params"] for group in listed]
        names = [group.get("param_names") for group in found.optim.param_groups]
        assert names == [group.get("param_names") for group in listed]


class Scaled(nn.Module):
    """A parameter without dimensions, as CLIP's ``logit_scale``, before a buffer of floats."""

    def __init__(self, *buffers: str) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        for name in buffers:
            self.register_buffer(name, torch.rand(4, 4) if name == "freqs" else torch.tensor(2.5))
        self.head = nn.Linear(5, 3)


def _scaled(path: Path, *buffers: str) -> Checkpoint:
    model = Scaled(*buffers)
    optimizer = torch.optim.Adam(model.parameters())
    (model.head(torch.rand(2, 5)).sum() * model.logit_scale).backward()
    optimizer.step()
    return _open(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def test_moments_without_dimensions_are_those_of_a_parameter_without_dimensions(tmp_path: Path) -> None:
    names = ["logit_scale", "head.weight", "head.bias"]
    source = _scaled(tmp_path / "a.pt", "freqs")
    named = _rekeyed(source, "name")
    assert list(named.optim.state) == names  # and not ``freqs``, of which there are as many as ids, too
    assert list(_rekeyed(named, "id").optim.state) == [0, 1, 2]
    with pytest.raises(SourceCorruptError) as error:
        _rekeyed(source, "name", parameters=["freqs", *names[1:]])
    assert error.value.details == ("id 0 has states of shape [], which no parameter of --parameters has",)
    two = _scaled(tmp_path / "b.pt", "gain")
    with pytest.raises(NeedsInformationError) as ambiguous:
        _rekeyed(two, "name")
    assert ambiguous.value.details == ("id 0 may be logit_scale or gain",)
    assert list(_rekeyed(two, "name", buffers=("gain",)).optim.state) == names


@pytest.mark.parametrize("told", ["--parameters", "param_names"])
def test_a_parameter_without_dimensions_and_states_is_one_in_distributed_data_parallel(
    tmp_path: Path, told: str
) -> None:
    """The list of names, which has no ``module.``, says that it is no buffer."""
    model = Scaled("gain")
    named = [*model.named_parameters()]
    optimizer = torch.optim.Adam(named if told == "param_names" else [param for _, param in named])
    model.head(torch.rand(2, 5)).sum().backward()
    optimizer.step()
    weights = {f"module.{name}": leaf for name, leaf in model.state_dict().items()}
    source = _open(tmp_path / "a.pt", {"model": weights, "optimizer": optimizer.state_dict()})
    names = [name for name, _ in named]
    found = _rekeyed(source, "name", **({"parameters": names} if told == "--parameters" else {}))
    assert found.optim.in_groups() == [[f"module.{name}" for name in names]]


class Pairs(nn.Module):
    """Layers of one shape, in which only the order tells parameters apart."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("up", "down")}) for _ in range(3)
        )


@pytest.mark.parametrize(
    "listed",
    [
        "0.up 1.up 2.up 0.down 1.down 2.down",
        "0.up 1.up 1.down 0.down 2.up 2.down",
        "0.up 2.up 2.down 1.up 1.down 0.down",
    ],
)
def test_keys_that_come_back_to_a_module_are_in_no_model_s_order(tmp_path: Path, listed: str) -> None:
    """Some script put them together so: ids in this order would be other parameters, silently."""
    model = Pairs()
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.rand_like(param)
    optimizer.step()
    weights, names = model.state_dict(), [name for name, _ in model.named_parameters()]
    put_together = {f"blocks.{word}.weight": weights[f"blocks.{word}.weight"] for word in listed.split()}
    assert sorted(put_together) == sorted(names) and list(put_together) != names
    source = _open(tmp_path / "a.pt", {"model": put_together, "optimizer": optimizer.state_dict()})
    with pytest.raises(NeedsInformationError, match="the order of the parameters is not recorded"):
        _rekeyed(source, "name")
    assert list(_rekeyed(source, "name", parameters=names).optim.state) == names
    same = _open(tmp_path / "b.pt", {"model": weights, "optimizer": optimizer.state_dict()})
    assert (
        list(_rekeyed(source, "name", reference=same).optim.state) == names == list(_rekeyed(same, "name").optim.state)
    )


def test_a_dcp_directory_without_planner_data_is_no_order(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner

    model, _ = _trained(_one_group)
    weights = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    for flat, certain in ((True, True), (False, False)):
        path = tmp_path / f"dcp{flat}"
        planner = DefaultSavePlanner(flatten_state_dict=flat)
        dcp.save(weights, checkpoint_id=str(path), planner=planner, no_dist=True)
        opened = _open(path)
        assert (not opened.origin.keys_in_order) is not certain
        orders = parameter_orders(opened)
        assert [order.ordered for order in orders] == [certain]


def test_full_names_of_flat_parameters_get_the_ids_that_fsdp_gave_them(tmp_path: Path) -> None:
    """``use_orig_params=False`` lists the root unit first; ids are in ``model.parameters()`` order all the same."""
    directory = GOLDEN / "torch-2.1" / "f1_flat_full"
    source, expected = _open(directory / "full_old.pt"), _open(directory / "full_old_rekeyed_ids.pt")
    found = _rekeyed(source, "id", reference=_open(directory / "model.pt"))
    assert list(found.optim.state) == list(expected.optim.state)
    assert _groups(found) == _groups(expected)


@pytest.mark.parametrize("world", [2])
def test_every_form_of_real_fsdp_gets_the_ids_of_the_real_optimizer(world: int, oracle: Oracle) -> None:
    model = toy.seeded_model()
    optimizer = toy.adamw(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    expected = {name: number for number, name in enumerate(sorted(trained, key=lambda n: not n.startswith("blocks.")))}
    assert len(expected) == sum(len(group["params"]) for group in optimizer.param_groups)
    directory = oracle.checkpoints(world)
    for form in ("f1_full.pt", "f1_flat_full.pt", "f1_ranks", "f1_flat_dcp", "f2_full.pt", "f2_ranks", "f2_dcp"):
        source = _open(directory / form)
        found = _rekeyed(source, "id")
        assert dict(zip(source.optim.state, found.optim.state, strict=True)) == expected, form
        assert _groups(found) == [list(range(18)), list(range(18, 21))], form
    for form in ("f2_full_ids.pt", "f2_ranks_ids", "f2_dcp_ids"):
        source = _open(directory / form)
        with pytest.raises(NeedsInformationError):  # the frozen bias looks like the last one of the blocks
            _rekeyed(source, "name")
        found = _rekeyed(source, "name", parameters=trained)
        assert {name: old for old, name in zip(source.optim.state, found.optim.state, strict=True)} == expected, form
        again = _rekeyed(found, "id")
        assert list(again.optim.state) == list(source.optim.state) and _groups(again) == _groups(source), form


def test_a_section_that_is_left_out_still_says_what_the_other_one_holds(tmp_path: Path) -> None:
    """``--only`` chooses what is written, not what is known."""
    model, optimizer = _trained(_one_group)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    names = [name for name, _ in model.named_parameters()]
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "optim.pt", only="optim", key_type="name")
    found = torch.load(tmp_path / "optim.pt", weights_only=True)
    assert found["param_groups"][0]["params"] == names and "model" not in found
    ranks = {"to": "sharded", "container": "torch", "world_size": 2}
    torch.save({"model": {name: model.state_dict()[name] for name in names}, "optimizer": found}, tmp_path / "b.pt")
    fsdpckpt.convert(tmp_path / "b.pt", tmp_path / "model", only="model", **ranks)
    assert sorted(path.name[:5] for path in (tmp_path / "model").glob("*.pt")) == ["model", "model"]
