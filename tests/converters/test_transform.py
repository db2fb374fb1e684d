"""The steps between reading and writing: which options are refused, and which keys and units come out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.layout import choose_layout
from fsdpckpt.converters.transform import begin, transform
from fsdpckpt.errors import SourceCorruptError, UsageError
from fsdpckpt.flat.units.from_options import listed_parameters, units_request
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Problem, Section
from fsdpckpt.options import ConvertOptions
from fsdpckpt.storage.sources import Sources
from tests.converters.jobs import converted, messages, notes, recorded, refused, save, states
from tests.flat.flat_synthetic import checkpoint, named, sharded_model
from tests.ir.checkpoints import with_ledger
from tests.oracle.compare import identical

SHAPES = {"a.w": (5, 3), "a.b": (5,), "b.w": (2, 5), "b.b": (2,)}
NAMES = list(SHAPES)
FLAT: dict[str, Any] = {"to": "flattened", "world_size": 2, "verify": "full"}


def content(key_type: str = "id", *sections: str) -> dict[str, Any]:
    """What a job saved; all of it without ``sections``."""
    keys: list[Any] = [*range(4)] if key_type == "id" else NAMES
    held = {
        key: {"step": torch.tensor(7.0), "exp_avg": torch.rand(shape)}
        for key, shape in zip(keys, SHAPES.values(), strict=True)
    }
    model = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    whole = {"model": model, "optimizer": {"state": held, "param_groups": [{"lr": 0.1, "params": keys}]}}
    return {section: whole[section] for section in sections or whole}


def units_of_job() -> str:
    """``units.json`` of the job that ``source.pt`` is from."""
    fsdpckpt.convert("source.pt", "job", unit=["a", "b"], use_orig_params=True, buffers=["none"], **FLAT)
    Path("units.json").write_text(json.dumps({**recorded("job")["units"], "world_size": None}))
    return "units.json"


BOTH = ("model", "optimizer")
NO_PLACE = "has no place for the optimizer"


@pytest.mark.parametrize(
    ("sections", "options", "message"),
    [
        (BOTH, {"only": "model", "optim_dtype": "bfloat16"}, "optim_dtype .* only='model'"),
        (BOTH, {"only": "model", "key_type": "name"}, "key_type .* only='model'"),
        (BOTH, {"only": "model", "missing_state": "skip"}, "missing_state .* only='model'"),
        (BOTH, {"only": "optim", "dtype": "bfloat16"}, "dtype .* only='optim'"),
        (["model"], {"optim_dtype": "bfloat16"}, "optim_dtype .* has no optimizer"),
        (["model"], {"key_type": "name"}, "key_type .* has no optimizer"),
        (["optimizer"], {"dtype": "bfloat16"}, "dtype .* has no model"),
        (BOTH, {"only": "model", "exclude": ["v.*"]}, "matches no key"),
        (BOTH, {"only": "model", "rename": [("v", "u")]}, "applies to no key"),
        (BOTH, {"node_rank": 1}, "node_rank has no effect"),
        (BOTH, {"rdzv_endpoint": "host:1", "fault_limit": 3.0}, "rdzv_endpoint and fault_limit"),
        (BOTH, {"flavor": "huggingface", "optim_dtype": "bfloat16"}, f"optim_dtype .* {NO_PLACE}"),
        (BOTH, {"flavor": "huggingface", "key_type": "name"}, f"key_type .* {NO_PLACE}"),
        *(
            (BOTH, {"flavor": "accelerate", "to": "flattened", "world_size": 2, "unit": ["none"],
                    "use_orig_params": True, "key_type": key_type}, r"key_type=.* its own kind of keys in this form")
            for key_type in ("id", "name")
        ),
        *(
            (BOTH, {**option, **more}, f"{next(iter(option))}.* has no effect")  # names for ids do not use it either
            for more in ({}, {"key_type": "name"})
            for option in ({"unit": ["a"]}, {"use_orig_params": False}, {"use_orig_params": True},
                           {"strategy": "no-shard"}, {"param_dtype": "bfloat16"}, {"shard_size": 2})
        ),
    ],
    ids=str,
)  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(
    sections: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    target = "out" if "flavor" in options else "out.pt"
    refused(UsageError, message, save(content("id", *sections)), target, **options)


def test_units_of_an_optimizer_without_states_are_asked_for_as_a_file() -> None:
    """SGD without momentum under NO_SHARD: each id may be a parameter or a flat parameter."""
    model = {"w": torch.randn(2, 5), "a.w": torch.randn(5, 3), "a.b": torch.randn(5)}
    save({"model": model, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": list(model)}]}})
    wrapping = {"unit": ["a"], "strategy": "no-shard", "use_orig_params": False}
    fsdpckpt.convert("source.pt", "flat", **{**FLAT, **wrapping})
    Path("of-a-job.json").write_text(json.dumps(recorded("flat")["units"]))
    Path("flat/fsdpckpt.json").unlink()
    words = r"unit has no effect: the optimizer of .*flat has ids without states"
    error = refused(UsageError, words, "flat", "out.pt", to="full", key_type="name", unit=["a"])
    assert "give --units FILE" in str(error.next_step)
    found = converted("flat", "out.pt", key_type="name", units="of-a-job.json")
    assert sorted(found["optimizer"]["param_groups"][0]["params"]) == sorted(model)


def test_a_units_file_serves_keys_and_is_noted_where_there_is_no_need_of_it() -> None:
    save(content())
    refused(UsageError, "shard_size has no effect", "source.pt", "no.pt", units=units_of_job(), shard_size=2)
    for options, used in (({}, False), ({"key_type": "name"}, True), ({"include": ["a.*"]}, True)):
        report = fsdpckpt.convert("source.pt", "out.pt", units="units.json", overwrite=True, **options)
        assert bool(messages(report, "--units had no effect")) is not used
    assert list(states(torch.load("out.pt"))) == [0, 1]


@pytest.mark.parametrize(
    ("own", "options", "keys"),
    [
        ("id", {}, [0, 1, 2, 3]), ("name", {}, NAMES), ("id", {"key_type": "name"}, NAMES),
        ("name", {"key_type": "id"}, [0, 1, 2, 3]), ("name", {"use_orig_params": False}, [0, 1]),
        ("name", {"only": "optim"}, NAMES), ("name", {"include": ["a.*"], "units": None, "unit": ["a"]}, NAMES[:2]),
    ],
)  # fmt: skip
def test_flat_shards_have_the_keys_that_are_wanted_and_the_units_of_what_is_taken(
    own: str, options: dict[str, Any], keys: list[Any]
) -> None:
    save(content())
    given = {"use_orig_params": True, "units": units_of_job(), **FLAT, **options}
    report = fsdpckpt.convert(save(content(own)), "flat", **given)
    optim = torch.load("flat/optim_world_size_2_rank_0.pt")
    listed = [key for group in optim["param_groups"] for key in group["params"]]
    assert [key.replace("_fsdp_wrapped_module.", "") if isinstance(key, str) else key for key in listed] in (
        keys, [0, 1, 2]  # the root has a flat parameter of its own
    )  # fmt: skip
    assert recorded("flat")["units"]["parameters"] == (NAMES[:2] if "include" in options else NAMES)
    if given["units"] is not None:
        assert any("units.json" in note.message for note in notes(report, "units"))


def test_units_say_the_dtype_that_is_written_and_names_are_no_keys_of_flat_parameters() -> None:
    save(content())
    options = {**FLAT, "units": units_of_job()}
    words = "a.w: float32 in the units, bfloat16 in the model section"
    error = refused(SourceCorruptError, "", "source.pt", "flat", **options, dtype="bfloat16")
    assert words in f"{error.what} {error.details}" and error.exit_code == 3
    named = {**options, "use_orig_params": False, "key_type": "name"}
    assert "--use-orig-params" in refused(UsageError, "", save(content("name")), "flat", **named).text


@pytest.mark.parametrize("options", [{}, {"to": "sharded", "world_size": 2}], ids=str)
def test_a_weight_with_two_names_is_cast_under_both(options: dict[str, Any]) -> None:
    """Names that share bytes would be cast as one, which their container may not be able to say."""
    saved = content()
    saved["model"]["head"] = saved["model"]["a.w"]
    target = "out" if options else "out.pt"
    fsdpckpt.convert(save(saved), target, dtype="bfloat16", verify="full", **options)
    with fsdpckpt.open(target) as found:
        for name in ("head", "a.w"):
            assert identical(found[name].torch(), saved["model"]["a.w"].bfloat16())


@pytest.mark.parametrize("name", ["int32", "half-ish"])
def test_a_dtype_of_the_mixed_precision_has_to_be_a_floating_one(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        ConvertOptions(param_dtype=name)
    offered = (caught.value.expected or "").split(", ")
    assert {"bfloat16", "float32"} <= set(offered)
    assert not {"int32", "bool", name} & set(offered)


# What no file shows


def steps(held: Checkpoint, target: str = "out.pt", **options: Any) -> Draft:
    with Sources() as sources:
        asked = ConvertOptions(**options)
        layout, request = choose_layout(target, asked, held), units_request(asked, listed_parameters(asked))
        return transform(begin(held, layout, sources, request=request), layout)


def test_problems_count_in_the_sections_that_are_asked_for_also_where_nothing_of_them_is_left() -> None:
    """Without a section they are of all; those of extras count where the extras are taken."""
    full = checkpoint(1, model=sharded_model([named("w", 5, 3)]), layout=Layout.FULL)
    problem = Problem("gap", "optim 0.exp_avg lacks elements", section=Section.OPTIM)
    extra = with_ledger(full, problems=(replace(problem, section=Section.EXTRA),))
    anywhere = with_ledger(full, problems=(replace(problem, section=None),))
    of_optim = with_ledger(full, problems=(problem,))
    for held, always in ((of_optim, False), (anywhere, True), (replace(extra, extra={"epoch": 3}), False)):
        with pytest.raises(SourceCorruptError):
            steps(held)
        if always:
            with pytest.raises(SourceCorruptError):
                steps(held, only=Section.MODEL)
        else:
            assert steps(held, only=Section.MODEL).checkpoint.optim is None
    with pytest.raises(SourceCorruptError):
        steps(replace(extra, rank_extra=({"epoch": 3},)))
    steps(with_ledger(full, problems=(replace(problem, fatal=False),)))


def test_there_has_to_be_something_to_flatten() -> None:
    held = replace(checkpoint(1, layout=Layout.FULL), extra={"epoch": 3})
    with pytest.raises(UsageError, match="neither a model nor an optimizer"):
        steps(held, "out", to=Layout.FLATTENED, world_size=2)
