"""Sections at random places of random trees come back from every layout where they were, bit for bit."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fsdpckpt
from tests.converters.test_sections_in_containers import as_dcp_keeps, difference, job, trained
from tests.ir.test_text_keys import same_texts

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = int(os.environ.get("FSDPCKPT_TREES", "8"))
KEYS = st.sampled_from(["a", "b.c", "x", "0", "1", "", "opt", 0, 1, 2, 5, None, True, 1.5, (1, 2)])
OTHERS = st.sampled_from([1, 0.5, "text", None, True, (3, "x")])
JOBS = st.sampled_from(
    [("model", "optimizer"), ("net", "opt"), ("enc", "o"), ("model", "optimizer", "epoch"), ("alone",)]
)


class Place:
    """Where a job is put: the names of its sections."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __repr__(self) -> str:
        return f"<{' '.join(self.names)}>"


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, children, min_size=1, max_size=4)
    lists = st.lists(children, min_size=1, max_size=4)
    return dicts | dicts.map(OrderedDict) | lists | lists.map(tuple)


PLACES = JOBS.map(Place)
TREES = st.dictionaries(KEYS, st.recursive(PLACES | PLACES | OTHERS, containers, max_leaves=8), min_size=1, max_size=4)


def grown(tree: Any, seeds: list[int]) -> Any:
    """``tree`` with a job of its own seed at each place."""
    if isinstance(tree, Place):
        seeds.append(len(seeds))
        if tree.names == ("alone",):
            return trained(seeds[-1])[0]
        made = job(seeds[-1], epoch=seeds[-1])
        return dict(zip(tree.names, made.values(), strict=False))
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


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(TREES.filter(with_jobs), st.sampled_from(["full", "ranks", "dcp", "flattened"]))
def test_every_layout_keeps_them(tree: dict[Any, Any], layout: str) -> None:
    content = grown(tree, [])
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        torch.save(content, top / "source.pt")
        options: dict[str, Any] = {
            "full": {"to": "full"},
            "ranks": {"to": "sharded", "container": "torch", "world_size": 3},
            "dcp": {"to": "sharded", "world_size": 3},
            "flattened": {
                "to": "flattened",
                "world_size": 3,
                "use_orig_params": True,
                "unit": ["none"],
                "buffers": ["none"],
            },
        }[layout]
        if layout in ("ranks", "flattened"):
            options["buffers"] = ["none"]  # of models without an optimizer
        try:
            fsdpckpt.convert(top / "source.pt", top / "there", **options)
        except fsdpckpt.SourceUnsupportedError as error:
            assert layout == "dcp"
            assert "same key" in error.what
            assert same_texts(content)
            return
        fsdpckpt.convert(top / "there", top / "back.pt", to="full", container="torch")
        expected = as_dcp_keeps(content) if layout == "dcp" else content
        assert difference(expected, torch.load(top / "back.pt", weights_only=False)) == ""


TEXTS = st.sampled_from(["a", "b.c", "x.y.z", "0", "1", "", "opt", "\\", "a b", "é", ".", "state"])
DCP_TREES = st.recursive(
    PLACES | PLACES | OTHERS,
    lambda children: (
        st.dictionaries(TEXTS | st.sampled_from([0, 3, None, True]), children, min_size=1, max_size=4)
        | st.lists(children, min_size=1, max_size=3)
        | st.lists(children, min_size=1, max_size=2).map(tuple)
    ),
    max_leaves=8,
)


def as_pytorch_nests(value: Any) -> Any:
    """What ``dcp.load`` gives a job whose state dict has the keys that PyTorch saved: texts."""
    if isinstance(value, dict):
        return {str(key): as_pytorch_nests(item) for key, item in value.items()}
    return [as_pytorch_nests(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(TEXTS, DCP_TREES, min_size=1, max_size=4).filter(with_jobs), st.sampled_from(["full", "dcp"]))
def test_what_pytorch_saved_is_read_as_pytorch_loads_it(tree: dict[str, Any], layout: str) -> None:
    content = grown(tree, [])
    assume(not same_texts(content))  # PyTorch does not save it either
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        dcp.save(content, checkpoint_id=top / "source", no_dist=True)
        if layout == "dcp":
            fsdpckpt.convert(top / "source", top / "there", to="sharded", world_size=3)
        fsdpckpt.convert(top / ("source" if layout == "full" else "there"), top / "full.pt", to="full")
        found = torch.load(top / "full.pt", weights_only=False)
        assert difference(ids_as_numbers(as_pytorch_nests(content)), found) == ""


def ids_as_numbers(value: Any) -> Any:
    """``value`` with the ids of optimizers as numbers again, without which PyTorch finds no state."""
    if isinstance(value, dict) and value.keys() == {"state", "param_groups"}:
        return {**value, "state": {int(key): states for key, states in value["state"].items()}}
    if isinstance(value, dict):
        return {key: ids_as_numbers(item) for key, item in value.items()}
    return [ids_as_numbers(item) for item in value] if isinstance(value, list) else value
