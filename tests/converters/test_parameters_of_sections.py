"""``--parameters`` with several models: one list for all of them, whose names may begin with a section's keys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, NeedsInformationError
from tests.oracle.compare import identical, require_identical

SHAPES = {
    "actor": {"layers.0.weight": (4, 4), "layers.1.weight": (4, 4), "layers.2.weight": (4, 4), "head.weight": (4, 4)},
    "critic": {"h.p.weight": (5, 5), "h.q.weight": (5, 5), "h.r.weight": (5, 5)},
}
GROUPS = {
    "actor": (["layers.2.weight", "layers.1.weight"], ["head.weight", "layers.0.weight"]),
    "critic": (["h.r.weight"], ["h.q.weight", "h.p.weight"]),
}
"""The optimizers' own groups. Parameters of one shape are in both, and not in the order of the model."""

Truth = dict[tuple[str, str], torch.Tensor]


def saved(
    path: Path, sections: Sequence[str] = ("actor", "critic"), shapes: Any = SHAPES, groups: Any = GROUPS
) -> Truth:
    """Models and optimizers as ``torch.optim`` gives them, by id. Returns each parameter's ``exp_avg``."""
    content: dict[str, Any] = {}
    truth: Truth = {}
    for seed, section in enumerate(sections):
        generator = torch.Generator().manual_seed(seed)
        params = {name: nn.Parameter(torch.randn(s, generator=generator)) for name, s in shapes[section].items()}
        optimizer = torch.optim.AdamW(
            [{"params": [params[n] for n in group]} for group in groups[section]], foreach=False
        )
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        model = {name: param.detach() for name, param in params.items()}
        content[section] = {"model": model, "optimizer": optimizer.state_dict()}
        truth |= {(section, name): optimizer.state[param]["exp_avg"] for name, param in params.items()}
    torch.save(content, path)
    return truth


def written(path: Path, *, prefixes: dict[str, str], groups: Any = GROUPS) -> Path:
    parts = [
        "\n".join(f"{prefix}{name}" for name in group) for key, prefix in prefixes.items() for group in groups[key]
    ]
    path.write_text("\n\n".join(parts))
    return path


def states(path: Path, truth: Truth) -> dict[tuple[str, str], torch.Tensor]:
    content = torch.load(path, weights_only=True)
    return {(section, name): content[section]["optimizer"]["state"][name]["exp_avg"] for section, name in truth}


@pytest.mark.parametrize(
    "prefixes",
    [
        {"actor": "", "critic": ""},
        {"actor": "actor.", "critic": "critic."},
        {"critic": "critic.model.", "actor": "actor.model."},
        {"actor": "actor.optimizer.", "critic": ""},
    ],
    ids=["bare", "by name", "by the model's keys", "by the optimizer's keys"],
)
def test_one_list_names_the_ids_of_every_optimizer(prefixes: dict[str, str], tmp_path: Path) -> None:
    truth = saved(tmp_path / "ids.pt")
    with pytest.raises(NeedsInformationError, match="optim:actor") as asked:
        fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "out.pt", to="full", key_type="name")
    assert "--only optim:actor" in str(asked.value.alternative)
    listed = written(tmp_path / "order.txt", prefixes=prefixes)
    report = fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "out.pt", to="full", key_type="name", parameters=listed)
    assert not [note.message for note in report.notes if note.kind == "unused"], "the models need no list"
    require_identical(states(tmp_path / "out.pt", truth), truth)
    assert fsdpckpt.diff(tmp_path / "ids.pt", tmp_path / "out.pt", parameters=listed).same
    for section, shapes in SHAPES.items():
        options: dict[str, Any] = {"only": f"optim:{section}", "key_type": "name", "parameters": listed}
        fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / f"{section}.pt", to="full", **options)
        one = torch.load(tmp_path / f"{section}.pt", weights_only=True)
        one = one.get("optimizer", one)
        assert all(identical(one["state"][name]["exp_avg"], truth[section, name]) for name in shapes)


@pytest.mark.parametrize("prefixes", [{"actor": "", "critic": ""}, {"actor": "actor.", "critic": "critic."}])
def test_one_list_for_flattened_targets_says_the_order_of_optimizers_and_not_of_models(
    prefixes: dict[str, str], tmp_path: Path
) -> None:
    truth = saved(tmp_path / "ids.pt")
    listed = written(tmp_path / "order.txt", prefixes=prefixes)
    fsdpckpt.convert(
        tmp_path / "ids.pt",
        tmp_path / "flat",
        to="flattened",
        world_size=2,
        unit=["none"],
        use_orig_params=True,
        buffers=["none"],
        parameters=listed,
    )
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "out.pt", to="full", key_type="name")
    require_identical(states(tmp_path / "out.pt", truth), truth)


def test_models_with_the_same_names_are_told_apart_by_their_keys(tmp_path: Path) -> None:
    shapes = {"actor": SHAPES["actor"], "critic": SHAPES["actor"]}
    groups = {"actor": GROUPS["actor"], "critic": tuple(list(reversed(group)) for group in GROUPS["actor"])}
    truth = saved(tmp_path / "ids.pt", shapes=shapes, groups=groups)
    listed = written(tmp_path / "order.txt", prefixes={"actor": "actor.", "critic": "critic."}, groups=groups)
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "out.pt", to="full", key_type="name", parameters=listed)
    require_identical(states(tmp_path / "out.pt", truth), truth)


def test_a_list_for_one_model_leaves_the_others_to_be_asked_about_and_a_typing_error_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "ids.pt")
    options: dict[str, Any] = {"to": "full", "key_type": "name"}
    listed = written(tmp_path / "order.txt", prefixes={"actor": "actor."})
    with pytest.raises(NeedsInformationError, match="optim:critic"):
        fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "out.pt", **options, parameters=listed)
    text = written(tmp_path / "order.txt", prefixes={"actor": "", "critic": ""}).read_text()
    listed.write_text(text.replace("head.weight", "haed.weight"))
    with pytest.raises(FsdpckptError, match="contradict"):
        fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "out.pt", **options, parameters=listed)
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("glob", ["critic.*", "critic.h.*", "critic.model.h.*", "h.*"])
def test_globs_take_a_section_by_its_name_by_its_keys_or_by_its_own_names(glob: str, tmp_path: Path) -> None:
    saved(tmp_path / "ids.pt")
    listed = written(tmp_path / "order.txt", prefixes={"actor": "", "critic": ""})
    options: dict[str, Any] = {"to": "full", "key_type": "name", "parameters": listed}
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "in.pt", include=[glob], **options)
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "ex.pt", exclude=[glob], **options)
    found = [torch.load(tmp_path / name, weights_only=True) for name in ("in.pt", "ex.pt")]
    for content, section in zip(found, ("critic", "actor"), strict=True):
        assert content["model"].keys() == SHAPES[section].keys()  # the only one that is left
        assert content["optimizer"]["state"].keys() == SHAPES[section].keys()


def test_the_optimizers_order_is_no_contradiction_to_the_units_of_models(tmp_path: Path) -> None:
    truth = saved(tmp_path / "ids.pt")
    listed = written(tmp_path / "order.txt", prefixes={"actor": "actor.", "critic": "critic."})
    listed.write_text(listed.read_text().replace("\n\n", "\n"))  # groups that blank lines divide are an optimizer's
    fsdpckpt.convert(
        tmp_path / "ids.pt",
        tmp_path / "flat",
        to="flattened",
        world_size=2,
        unit="none",
        use_orig_params=True,
        buffers="none",
        parameters=listed,
    )
    assert fsdpckpt.diff(tmp_path / "ids.pt", tmp_path / "flat", parameters=listed).same
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "out.pt", to="full", key_type="name", parameters=listed)
    require_identical(states(tmp_path / "out.pt", truth), truth)
    other = written(tmp_path / "other.txt", prefixes={"actor": "actor.", "critic": "critic.x"})
    with pytest.raises(FsdpckptError, match=r"xh\.r\.weight in parameters"):
        fsdpckpt.convert(tmp_path / "flat", tmp_path / "not.pt", to="full", key_type="name", parameters=other)


def test_an_option_had_no_effect_where_no_section_uses_it(tmp_path: Path) -> None:
    """One note, on the source: each model, and each optimizer, says itself all that is asked of it."""
    saved(tmp_path / "ids.pt")
    listed = written(tmp_path / "order.txt", prefixes={"actor": "actor.", "critic": "critic."})
    for only in (None, "model:actor"):
        report = fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / f"{only}.pt", to="full", parameters=listed, only=only)
        (note,) = [note.message for note in report.notes if note.kind == "unused"]
        assert note.startswith(f"--parameters had no effect: {tmp_path / 'ids.pt'} records")


ONE_PIPE = {"all": {}, "one section": {"only": "optim:critic"}, "some names": {"include": ["critic.*"]}}


@pytest.mark.parametrize("taken", ONE_PIPE)
def test_the_names_may_come_from_a_pipe(taken: str, tmp_path: Path) -> None:
    """``--parameters <(python names.py)``: what was read from a pipe is gone, so it is read once."""
    truth = saved(tmp_path / "ids.pt")
    listed = written(tmp_path / "order.txt", prefixes={"actor": "actor.", "critic": "critic."})
    options: dict[str, Any] = {"to": "full", "key_type": "name", **ONE_PIPE[taken]}
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "wanted.pt", parameters=listed, **options)
    reading, writing = os.pipe()
    os.write(writing, listed.read_bytes())
    os.close(writing)
    try:
        fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "out.pt", parameters=f"/dev/fd/{reading}", **options)
    finally:
        os.close(reading)
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "wanted.pt").read_bytes()
    if taken == "all":
        require_identical(states(tmp_path / "out.pt", truth), truth)
