"""Frameworks are recognised by their files and keys, and every form in the tables can be asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpckpt.converters.target.layout import choose_layout
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Layout, ModelState
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers import Form, RankFileName
from fsdpckpt.producers.recognition import export_files, flavor_named, recognise
from fsdpckpt.producers.table import FLAVORS, WRITABLE
from tests.flat.flat_synthetic import checkpoint

META, DCP = "meta.pt", ".metadata"


STEP, LATEST, VERL = {"directory": "/run/step-20/"}, {"directory": "/run/latest"}, "model_world_size_2_rank_1.pt"
AT_THE_TOP, IN_MODEL = {"model": (), "flattened": True}, {"model": ("model",), "flattened": True}
NEITHER, PARTS = {"model": (), "optim": ()}, ["weights", "optimizer"]


@pytest.mark.parametrize(
    ("names", "known", "flavor"),
    [
        (["pytorch_model_fsdp.bin", "optimizer.bin"], {}, "accelerate"),
        (["pytorch_model_fsdp_rank3.bin", "optimizer_0"], {}, "accelerate"),
        (["pytorch_model_fsdp_0", "optimizer_0", "trainer_state.json"], {"directory": "/run/checkpoint-5"}, "trainer"),
        ([VERL, "huggingface"], {"directory": "/step/actor"}, "verl"),
        ([DCP, META], {"keys": ["loops", "epoch"]}, "lightning"),
        ([DCP, META], {"keys": ["iteration"]}, "fabric"),
        (["last.ckpt"], {"directory": "", "keys": ["pytorch-lightning_version", "state_dict"]}, "lightning"),
        ([DCP, "__0_0.distcp"], {"directory": "/run/ep1-ba20"}, "composer"),
        ([DCP, "__0_0.distcp"], {"directory": "/run/dist_epoch_2"}, "torchtune"),
        (["recipe_state.pt", "model-00001-of-00002.safetensors"], {"directory": "/epoch_1"}, "torchtune"),
        (["model-00001-of-00002.safetensors", "config.json"], {}, "huggingface"),
        # Equal files, other keys of a DCP directory
        ([DCP], {**STEP, **AT_THE_TOP}, "torchtitan"),
        ([DCP], {**STEP, "model": ()}, "torchtitan"),  # the last save, of the model alone
        ([DCP], {**LATEST, **AT_THE_TOP, "keys": ["train_state", "dataloader"]}, "torchtitan"),
        ([DCP], {**STEP, **IN_MODEL}, "torchtitan-old"),
        ([DCP], {**LATEST, **IN_MODEL, "keys": ["train_state"]}, "torchtitan-old"),
        ([DCP], {**STEP, "model": ("model",)}, None),  # as anybody saves it
        ([DCP, META], {"keys": ["loops"], "model": ("model",)}, "lightning"),
        ([DCP, META], {"keys": ["loops"], "model": ("state_dict",)}, "lightning-model-parallel"),
        # Equal files, another place of the optimizer
        ([DCP], {"keys": ["app"], "model": ("app", "model"), "optim": ("app", "optimizers")}, "prime-rl"),
        ([DCP], {"keys": ["app"], "model": ("app", "model"), "optim": ("app", "optim")}, None),  # PyTorch's tutorial
        (PARTS, {"keys": ["optim"], "model": ("model",), "optim": ("optim", "optim")}, "nemo-rl-v1"),
        (PARTS, {"keys": ["sched", "optim"], "model": (), "optim": ("optim",)}, "nemo-rl"),
        (PARTS, {"keys": ["optim"], "model": ("model",), "optim": ("optim",)}, None),  # as anybody names directories
        (["model", "optimizer"], {"model": ("model_state", "model"), "optim": ("optim_state", "optim")}, "slime"),
        (["model", "optimizer"], {"model": ("model",), "optim": ("optim",)}, None),
        (["model_and_optim", "train"], {"model": ("model",), "optim": ("optim",)}, "olmo-core"),
        ([DCP, "extra_state"], {"model": ("model",), "optim": ("optimizer",)}, "veomni"),
        (
            [DCP],
            {"keys": ["epochs_run", "max_steps_per_epoch"], "model": ("model",), "optim": ("optimizer",)},
            "torchtune",
        ),
        ([VERL, "fsdp_config.json"], {**NEITHER, "keys": ["fsdp_strategy", "client_state"]}, "skyrl"),
        ([VERL, "fsdp_config.json"], {**NEITHER, "keys": ["lr_scheduler", "rng"]}, "verl"),
    ],
)
def test_a_framework_is_recognised_by_its_files_and_keys(
    names: list[str], known: dict[str, Any], flavor: str | None
) -> None:
    found = recognise(names, **{"directory": "/a", **known})
    assert (found.name if found is not None else None) == flavor


@pytest.mark.parametrize(
    "names", [[DCP], ["model.safetensors"], ["model_world_size_2_rank_0.pt"], ["optimizer.bin"], []]
)
def test_files_that_several_frameworks_write_name_none(names: list[str]) -> None:
    assert recognise(names, directory="/a/x") is None


def test_names_are_unique_and_every_writable_one_is_found() -> None:
    names = [flavor.name for flavor in FLAVORS]
    assert len(set(names)) == len(names)
    assert all(flavor_named(name) is not None for name in WRITABLE if name != "plain")
    assert {"accelerate", "trainer", "verl", "lightning", "fabric", "torchtitan", "huggingface"} <= set(WRITABLE)


def test_weights_beside_the_state_of_fsdp_are_an_export_and_alone_they_are_the_model() -> None:
    weights = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"]
    assert export_files([*weights, "pytorch_model_fsdp.bin", "trainer_state.json"]) == set(weights)
    assert export_files([*weights, "pytorch_model_fsdp_0", "random_states_0.pkl"]) == set(weights)
    assert export_files([*weights, "optimizer.bin", "random_states_0.pkl"]) == set()
    assert export_files([*weights, "config.json"]) == set()


@pytest.mark.parametrize(
    ("flavor", "form"),
    [
        pytest.param(flavor.name, form, id=f"{flavor.name}-{form.layout}-{form.container}-{number}")
        for flavor in FLAVORS
        for number, form in enumerate(flavor.forms)
    ],
)
def test_every_form_is_reached_by_layout_and_container(flavor: str, form: Form) -> None:
    world_size = None if form.layout is Layout.FULL else 2
    options = ConvertOptions(flavor=flavor, to=form.layout, container=form.container, world_size=world_size)
    adapter = ModelState({"base_model.model.up.lora_A.weight": 0}) if form.adapter else None
    source = checkpoint(1, layout=Layout.FULL, model=adapter)
    if form.optimizers and form.adapter:  # the second of two that have the same files is for what it saved itself
        origin = replace(source.origin, flavor=flavor, layout=form.layout, container=form.container)
        source = replace(source, origin=origin)
    spec = choose_layout("out" if form.directory else "out.ckpt", options, source)
    assert spec.form is form and spec.directory is form.directory


@pytest.mark.parametrize("layout", [Layout.FULL, Layout.SHARDED])
def test_the_sources_layout_decides_where_nothing_else_does(layout: Layout) -> None:
    spec = choose_layout("out", ConvertOptions(flavor="accelerate"), checkpoint(1, layout=layout))
    assert spec.layout is layout


@pytest.mark.parametrize(
    ("target", "options", "what"),
    [
        ("out", {"flavor": "acelerate"}, "an unknown flavor"),
        ("out", {"flavor": "composer"}, "reads, but does not write"),
        ("out", {"flavor": "huggingface", "to": Layout.SHARDED}, "cannot be combined with"),
        ("out.ckpt", {"flavor": "torchtitan"}, "cannot be combined with"),
        ("out", {"flavor": "torchtitan", "world_size": 2, "key_type": "id"}, "keys its optimizer by name"),
        ("out", {"flavor": "verl"}, "a number of ranks"),
        ("out", {"flavor": "accelerate", "to": Layout.FULL, "world_size": 2}, "cannot be combined with"),
    ],
)
def test_what_a_producer_does_not_save_is_refused(target: str, options: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        choose_layout(target, ConvertOptions(**options), checkpoint(1, layout=Layout.SHARDED))  # type: ignore[arg-type]


def test_a_world_of_one_has_the_trainers_single_name() -> None:
    kind = RankFileName("rng_state_{rank}.pth", single="rng_state.pth")
    assert (kind.of(0, 1), kind.of(3, 8)) == ("rng_state.pth", "rng_state_3.pth")


def test_every_framework_that_is_written_says_how_its_user_loads_it() -> None:
    for flavor in FLAVORS:
        assert bool(flavor.loads) is bool(flavor.forms), flavor.name
        shown = flavor.loads.format(target="on-6")
        assert not flavor.loads or ("on-6" in shown and "{" not in shown.replace('{"', "").replace("{ ", "")), shown
