"""Models and optimizers in lists, tuples and dicts of any keys are written in the containers that they were in."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdpckpt
from tests.oracle.compare import identical

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(seed: int, *, steps: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of a model and of its optimizer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        net(torch.randn(2, 5)).sum().backward()
        optimizer.step()
    return net.state_dict(), optimizer.state_dict()


def job(seed: int, *, steps: int = 1, **more: Any) -> dict[str, Any]:
    model, optimizer = trained(seed, steps=steps)
    return {"model": model, "optimizer": optimizer, **more}


def difference(a: Any, b: Any, at: str = "") -> str:
    """Where ``a`` and ``b`` differ in values, types, keys, bits, or the order of an OrderedDict; "" if nowhere."""
    if type(a) is not type(b):
        return f"{at}: {type(a).__name__} became {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        return "" if identical(a, b) else f"{at}: another tensor"
    if isinstance(a, dict):
        keys = [[(type(key), key) for key in each] for each in (a, b)]
        if isinstance(a, OrderedDict) and keys[0] != keys[1]:
            return f"{at}: order {list(a)} became {list(b)}"
        if set(keys[0]) != set(keys[1]):
            return f"{at}: keys {list(a)} became {list(b)}"
        return next(filter(None, (difference(a[key], b[key], f"{at}.{key}") for key in a)), "")
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{at}: {len(a)} items became {len(b)}"
        return next(
            filter(None, (difference(*pair, f"{at}[{n}]") for n, pair in enumerate(zip(a, b, strict=True)))), ""
        )
    return "" if a == b else f"{at}: {a!r} became {b!r}"


TREES = {
    "a list of jobs": lambda: {"items": [job(0), job(1)]},
    "with counters in the items": lambda: {"items": [job(0, epoch=1), job(1, epoch=2)], "step": 3},
    "other items between": lambda: {"items": [job(0), 5, None, job(1), {"x": 1}]},
    "lists in a list": lambda: {"items": [[job(0)], [job(1), job(2)]]},
    "a tuple": lambda: {"items": (job(0), job(1))},
    "keys that are numbers": lambda: {"stages": {0: job(0), 1: job(1)}},
    "numbers at the top": lambda: {0: job(0), 1: job(1)},
    "numbers with gaps": lambda: {"stages": {3: job(0), 7: [job(1), job(2)]}},
    "keys that look like numbers": lambda: {"stages": {"0": job(0), "1": job(1)}},
    "numbers and texts of them": lambda: {"stages": {0: job(0), "0": job(1)}},
    "keys of other types": lambda: {"stages": {None: job(0), 1.5: job(1), True: job(2), (1, 2): job(3)}},
    "an OrderedDict": lambda: {"stages": OrderedDict(z=1, a=job(0), x=4, w=job(1))},
    "models and optimizers apart": lambda: {
        "model": [trained(0)[0], trained(1)[0]],
        "optimizer": (trained(0)[1], trained(1)[1]),
    },
    "numbers below model": lambda: {
        "model": {0: trained(0)[0], 1: trained(1)[0]},
        "optimizer": {0: trained(0)[1], 1: trained(1)[1]},
    },
    "numbers in dicts in lists": lambda: {"a": {"b": [{"c": {3: job(0)}, "d": (1, 2)}, {"c": {3: job(1)}}]}},
    "keys with dots": lambda: {"a.b": job(0), "a": {"c": job(1)}},
    "before the first step": lambda: {
        "items": [dict(zip("mo", trained(seed, steps=0), strict=True)) for seed in (0, 1)]
    },
}


@pytest.mark.parametrize("name", TREES)
def test_containers_are_written_as_they_were(name: str, tmp_path: Path) -> None:
    tree = TREES[name]()
    torch.save(tree, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "ranks", to="sharded", container="torch", world_size=2)
    fsdpckpt.convert(tmp_path / "ranks", tmp_path / "full.pt", to="full")
    assert difference(tree, torch.load(tmp_path / "full.pt", weights_only=False)) == ""


def test_an_optimizer_beside_its_model_is_that_of_this_model(tmp_path: Path) -> None:
    """Both models have the same names and shapes, and ids say nothing."""
    torch.save(
        {"items": [job(0), {"model": trained(1)[0], "optimizer": trained(1, steps=3)[1]}]}, tmp_path / "source.pt"
    )
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "full.pt", to="full", key_type="name")
    items = torch.load(tmp_path / "full.pt", weights_only=True)["items"]
    assert [float(item["optimizer"]["state"]["1.bias"]["step"]) for item in items] == [1, 3]


def test_a_section_that_is_left_out_moves_no_other(tmp_path: Path) -> None:
    torch.save({"items": (trained(0)[0], job(1), job(2))}, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "full.pt", to="full", exclude=["items.0.*"])
    items = torch.load(tmp_path / "full.pt", weights_only=True)["items"]
    assert difference(({}, job(1), job(2)), items) == ""


def as_dcp_keeps(tree: Any) -> Any:
    """``tree`` as it comes back through a DCP directory, which has no ``_metadata``: models are plain dicts."""
    if isinstance(tree, dict):
        entries = {key: as_dcp_keeps(item) for key, item in tree.items()}
        return OrderedDict(entries) if isinstance(tree, OrderedDict) and not vars(tree) else entries
    return [as_dcp_keeps(item) for item in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("name", [name for name in TREES if name != "numbers and texts of them"])
def test_containers_come_back_from_a_dcp_directory(name: str, tmp_path: Path) -> None:
    tree = TREES[name]()
    torch.save(tree, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "dcp", to="sharded", world_size=2)
    assert fsdpckpt.diff(tmp_path / "source.pt", tmp_path / "dcp").same
    fsdpckpt.convert(tmp_path / "dcp", tmp_path / "full.pt", to="full")
    assert difference(as_dcp_keeps(tree), torch.load(tmp_path / "full.pt", weights_only=False)) == ""


def test_pytorch_loads_the_tensors_below_keys_that_are_numbers_and_a_warning_names_the_values(tmp_path: Path) -> None:
    source = {"stages": {0: job(0), 1: job(1)}}
    torch.save(source, tmp_path / "source.pt")
    with pytest.warns(fsdpckpt.FsdpckptWarning, match=r"dcp.load does not set 24 values .*stages\.0\.optimizer"):
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "dcp", to="sharded", world_size=2)
    loaded = {"stages": {0: job(5), 1: job(6)}}
    for stage in loaded["stages"].values():
        stage["optimizer"]["param_groups"][0]["lr"] = 7.0
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for number in (0, 1):
        found, expected = loaded["stages"][number], source["stages"][number]
        assert difference(expected["model"], found["model"]) == ""
        assert difference(expected["optimizer"]["state"], found["optimizer"]["state"]) == ""
        assert found["optimizer"]["param_groups"][0]["lr"] == 7.0  # what the warning says


def test_two_keys_that_would_be_the_same_text_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    torch.save(TREES["numbers and texts of them"](), tmp_path / "source.pt")
    with pytest.raises(fsdpckpt.SourceUnsupportedError, match="same key in a DCP directory"):
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "dcp", to="sharded", world_size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_an_empty_key_is_one_as_in_pytorch(tmp_path: Path) -> None:
    source = {"": {"a": trained(0)[0], "n": 1}, "b": {"": trained(1)[0]}}
    torch.save(source, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "dcp", to="sharded", world_size=2)
    loaded = {"": {"a": trained(5)[0], "n": 0}, "b": {"": trained(6)[0]}}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert difference(source, loaded) == ""


@pytest.mark.parametrize("container", ["torch", "dcp"])
@pytest.mark.parametrize(
    "tree",
    [
        lambda model: {"model": ("text", 5, model)},
        lambda model: {"model": ["text", model]},
        lambda model: {"model": {"kind": "resnet"}, "a": [{"net": model}]},
    ],
)
def test_an_extra_that_has_the_key_of_the_only_model_is_no_reason_to_lose_one(
    tree: Any, container: str, tmp_path: Path
) -> None:
    torch.save(tree(trained(0)[0]), tmp_path / "source.pt")
    with pytest.raises(fsdpckpt.SourceUnsupportedError, match="the model and an extra would both get the key model"):
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out", to="full", container=container)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out", to="full", container=container, only="model")
