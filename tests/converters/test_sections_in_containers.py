"""Models and optimizers in lists, tuples and dicts of any keys are written in the containers that they were in.

Also at random places of random trees: from every layout they come back where they were, bit for bit.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fsdpckpt
from tests.converters.jobs import RANK_FILES, converted, refused, save
from tests.ir.test_text_keys import same_texts
from tests.oracle.compare import identical

pytestmark = pytest.mark.filterwarnings("ignore")

DCP: dict[str, Any] = {"to": "sharded", "world_size": 2}


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


def as_dcp_keeps(tree: Any) -> Any:
    """``tree`` as it comes back through a DCP directory, which has no ``_metadata``: models are plain dicts."""
    if isinstance(tree, dict):
        entries = {key: as_dcp_keeps(item) for key, item in tree.items()}
        return OrderedDict(entries) if isinstance(tree, OrderedDict) and not vars(tree) else entries
    return [as_dcp_keeps(item) for item in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("name", TREES)
def test_containers_are_written_as_they_were(name: str) -> None:
    tree = TREES[name]()
    fsdpckpt.convert(save(tree), "ranks", **RANK_FILES, world_size=2)
    fsdpckpt.convert("ranks", "full.pt", to="full")
    assert difference(tree, torch.load("full.pt", weights_only=False)) == ""
    if name == "numbers and texts of them":
        refused(fsdpckpt.SourceUnsupportedError, "same key in a DCP directory", "source.pt", "dcp", **DCP)
        assert {path.name for path in Path().iterdir()} == {"source.pt", "ranks", "full.pt"}
        return
    fsdpckpt.convert("source.pt", "dcp", **DCP)
    assert fsdpckpt.diff("source.pt", "dcp").same
    fsdpckpt.convert("dcp", "back.pt", to="full")
    assert difference(as_dcp_keeps(tree), torch.load("back.pt", weights_only=False)) == ""


def test_an_optimizer_beside_its_model_is_that_of_this_model() -> None:
    """Both models have the same names and shapes, and ids say nothing."""
    save({"items": [job(0), job(1, steps=3)]})
    items = converted("source.pt", "full.pt", key_type="name")["items"]
    assert [float(item["optimizer"]["state"]["1.bias"]["step"]) for item in items] == [1, 3]


def test_a_section_that_is_left_out_moves_no_other() -> None:
    save({"items": (trained(0)[0], job(1), job(2))})
    items = converted("source.pt", "full.pt", exclude=["items.0.*"])["items"]
    assert difference(({}, job(1), job(2)), items) == ""


def test_pytorch_loads_the_tensors_below_keys_that_are_numbers_and_a_warning_names_the_values() -> None:
    source = {"stages": {0: job(0), 1: job(1)}}
    with pytest.warns(fsdpckpt.FsdpckptWarning, match=r"dcp.load does not set 24 values .*stages\.0\.optimizer"):
        fsdpckpt.convert(save(source), "dcp", **DCP)
    loaded = {"stages": {0: job(5), 1: job(6)}}
    for stage in loaded["stages"].values():
        stage["optimizer"]["param_groups"][0]["lr"] = 7.0
    dcp.load(loaded, checkpoint_id="dcp", no_dist=True)
    for number in (0, 1):
        found, expected = loaded["stages"][number], source["stages"][number]
        assert difference(expected["model"], found["model"]) == ""
        assert difference(expected["optimizer"]["state"], found["optimizer"]["state"]) == ""
        assert found["optimizer"]["param_groups"][0]["lr"] == 7.0  # what the warning says


def test_an_empty_key_is_one_as_in_pytorch() -> None:
    source = {"": {"a": trained(0)[0], "n": 1}, "b": {"": trained(1)[0]}}
    fsdpckpt.convert(save(source), "dcp", **DCP)
    loaded = {"": {"a": trained(5)[0], "n": 0}, "b": {"": trained(6)[0]}}
    dcp.load(loaded, checkpoint_id="dcp", no_dist=True)
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
def test_an_extra_that_has_the_key_of_the_only_model_is_no_reason_to_lose_one(tree: Any, container: str) -> None:
    options = {"to": "full", "container": container}
    words = "the model and an extra would both get the key model"
    refused(fsdpckpt.SourceUnsupportedError, words, save(tree(trained(0)[0])), "out", **options)
    assert [path.name for path in Path().iterdir()] == ["source.pt"]
    fsdpckpt.convert("source.pt", "out", **options, only="model")


# Random trees

EXAMPLES = int(os.environ.get("FSDPCKPT_TREES", "8"))
MANY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
KEYS = st.sampled_from(["a", "b.c", "x", "0", "1", "", "opt", 0, 1, 2, 5, None, True, 1.5, (1, 2)])
TEXTS = st.sampled_from(["a", "b.c", "x.y.z", "0", "1", "", "opt", "\\", "a b", "é", ".", "state"])
OTHERS = st.sampled_from([1, 0.5, "text", None, True, (3, "x")])


class Place:
    """Where a job is put: the names of its sections."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __repr__(self) -> str:
        return f"<{' '.join(self.names)}>"


PLACES = st.sampled_from(
    [("model", "optimizer"), ("net", "opt"), ("enc", "o"), ("model", "optimizer", "epoch"), ("alone",)]
).map(Place)


def trees(keys: st.SearchStrategy[Any], below: st.SearchStrategy[Any], *, ordered: bool) -> st.SearchStrategy[Any]:
    """``keys``: of the top; ``below``: of what is in it."""

    def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dicts, lists = (
            st.dictionaries(below, children, min_size=1, max_size=4),
            st.lists(children, min_size=1, max_size=4),
        )
        return (dicts | dicts.map(OrderedDict) if ordered else dicts) | lists | lists.map(tuple)

    inner = st.recursive(PLACES | PLACES | OTHERS, containers, max_leaves=8)
    return st.dictionaries(keys, inner, min_size=1, max_size=4).filter(with_jobs)


def grown(tree: Any, seeds: Any) -> Any:
    """``tree`` with a job of its own seed at each place."""
    if isinstance(tree, Place):
        seed = next(seeds)
        if tree.names == ("alone",):
            return trained(seed)[0]
        return dict(zip(tree.names, job(seed, epoch=seed).values(), strict=False))
    if isinstance(tree, dict):
        return type(tree)((key, grown(item, seeds)) for key, item in tree.items())
    return type(tree)(grown(item, seeds) for item in tree) if isinstance(tree, (list, tuple)) else tree


def jobs_in(tree: Any) -> list[Place]:
    if isinstance(tree, Place):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [found for item in items for found in jobs_in(item)]


def with_jobs(tree: Any) -> bool:
    """Whether it has several models and several optimizers, so that none is the main one, which has a fixed place in
    what is written: no other model is called one.
    """
    return sum(place.names != ("alone",) for place in jobs_in(tree)) > 1


LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"to": "full"},
    "ranks": {**RANK_FILES, "world_size": 3, "buffers": ["none"]},  # of models without an optimizer
    "dcp": {"to": "sharded", "world_size": 3},
    "flattened": {"to": "flattened", "world_size": 3, "use_orig_params": True, "unit": ["none"], "buffers": ["none"]},
}


@MANY
@given(trees(KEYS, KEYS, ordered=True), st.sampled_from(sorted(LAYOUTS)))
def test_every_layout_keeps_random_trees(tree: dict[Any, Any], layout: str) -> None:
    content = grown(tree, count())
    with TemporaryDirectory() as top:
        torch.save(content, f"{top}/source.pt")
        try:
            fsdpckpt.convert(f"{top}/source.pt", f"{top}/there", **LAYOUTS[layout])
        except fsdpckpt.SourceUnsupportedError as error:
            assert layout == "dcp" and "same key" in error.what and same_texts(content)
            return
        fsdpckpt.convert(f"{top}/there", f"{top}/back.pt", to="full", container="torch")
        expected = as_dcp_keeps(content) if layout == "dcp" else content
        assert difference(expected, torch.load(f"{top}/back.pt", weights_only=False)) == ""


def as_pytorch_loads(value: Any) -> Any:
    """What ``dcp.load`` gives a job whose state dict has the keys that PyTorch saved: texts.

    Ids of optimizers are numbers again, without which PyTorch finds no state.
    """
    if isinstance(value, dict):
        found = {str(key): as_pytorch_loads(item) for key, item in value.items()}
        if found.keys() == {"state", "param_groups"}:
            found["state"] = {int(key): states for key, states in found["state"].items()}
        return found
    return [as_pytorch_loads(item) for item in value] if isinstance(value, list) else value


@MANY
@given(trees(TEXTS, TEXTS | st.sampled_from([0, 3, None, True]), ordered=False), st.sampled_from(["full", "dcp"]))
def test_what_pytorch_saved_is_read_as_pytorch_loads_it(tree: dict[str, Any], layout: str) -> None:
    content = grown(tree, count())
    assume(not same_texts(content))  # PyTorch does not save it either
    with TemporaryDirectory() as top:
        dcp.save(content, checkpoint_id=f"{top}/source", no_dist=True)
        if layout == "dcp":
            fsdpckpt.convert(f"{top}/source", f"{top}/there", to="sharded", world_size=3)
        fsdpckpt.convert(f"{top}/{'source' if layout == 'full' else 'there'}", f"{top}/full.pt", to="full")
        assert difference(as_pytorch_loads(content), torch.load(f"{top}/full.pt", weights_only=False)) == ""
