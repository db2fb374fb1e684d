"""An option that does not apply is an error, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import UsageError


def saved(path: Path, *sections: str) -> Path:
    weight = torch.randn(7, 3)
    states = {"state": {0: {"exp_avg": torch.randn(7, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    whole = {"model": {"w": weight}, "optimizer": states}
    torch.save({section: whole[section] for section in sections}, path)
    return path


@pytest.mark.parametrize(
    ("sections", "options", "message"),
    [
        (("model", "optimizer"), {"only": "model", "optim_dtype": "bfloat16"}, "optim_dtype .* only='model'"),
        (("model", "optimizer"), {"only": "model", "key_type": "name"}, "key_type .* only='model'"),
        (("model", "optimizer"), {"only": "model", "missing_state": "skip"}, "missing_state .* only='model'"),
        (("model", "optimizer"), {"only": "optim", "dtype": "bfloat16"}, "dtype .* only='optim'"),
        (("model",), {"optim_dtype": "bfloat16"}, "optim_dtype .* has no optimizer"),
        (("model",), {"key_type": "name"}, "key_type .* has no optimizer"),
        (("optimizer",), {"dtype": "bfloat16"}, "dtype .* has no model"),
        (("model", "optimizer"), {"only": "model", "exclude": ["v.*"]}, "matches no key"),
        (("model", "optimizer"), {"only": "model", "rename": [("v", "u")]}, "applies to no key"),
        (("model", "optimizer"), {"node_rank": 1}, "node_rank has no effect"),
        (("model", "optimizer"), {"rdzv_endpoint": "host:1", "fault_limit": 3.0}, "rdzv_endpoint and fault_limit"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    tmp_path: Path, sections: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    source = saved(tmp_path / "source.pt", *sections)
    with pytest.raises(UsageError, match=message):
        fsdpckpt.convert(source, tmp_path / "out.pt", to="full", **options)
    assert not (tmp_path / "out.pt").exists()


def test_an_option_about_an_optimizer_that_the_framework_does_not_save_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source.pt", "model", "optimizer")
    with pytest.raises(UsageError, match=r"optim_dtype .* has no place for the optimizer"):
        fsdpckpt.convert(source, tmp_path / "out", flavor="huggingface", optim_dtype="bfloat16")


def test_a_key_type_for_a_framework_without_an_optimizer_is_refused_for_that_reason(tmp_path: Path) -> None:
    source = saved(tmp_path / "source.pt", "model", "optimizer")
    with pytest.raises(UsageError, match=r"key_type .* has no place for the optimizer"):
        fsdpckpt.convert(source, tmp_path / "out", flavor="huggingface", key_type="name")


@pytest.mark.parametrize("key_type", ["id", "name"])
def test_a_form_with_keys_of_its_own_refuses_key_type(tmp_path: Path, key_type: str) -> None:
    source = saved(tmp_path / "source.pt", "model", "optimizer")
    options = {"flavor": "accelerate", "to": "flattened", "world_size": 2, "unit": ["none"], "use_orig_params": True}
    with pytest.raises(UsageError, match=r"key_type=.* its own kind of keys in this form"):
        fsdpckpt.convert(source, tmp_path / "out", key_type=key_type, **options)


def test_units_of_an_optimizer_without_states_are_asked_for_as_a_file(tmp_path: Path) -> None:
    """SGD without momentum under NO_SHARD: each id may be a parameter or a flat parameter."""
    model = {"w": torch.randn(2, 5), "a.w": torch.randn(5, 3), "a.b": torch.randn(5)}
    names = {"state": {}, "param_groups": [{"lr": 0.1, "params": list(model)}]}
    torch.save({"model": model, "optimizer": names}, tmp_path / "full.pt")
    wrapping = {"unit": ["a"], "strategy": "no-shard", "use_orig_params": False}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "flat", to="flattened", world_size=2, **wrapping)  # type: ignore[arg-type]
    units = json.loads((tmp_path / "flat" / "fsdpckpt.json").read_text())["units"]
    (tmp_path / "flat" / "fsdpckpt.json").unlink()
    with pytest.raises(
        UsageError, match=r"unit has no effect: the optimizer of .*flat has ids without states"
    ) as refused:
        fsdpckpt.convert(tmp_path / "flat", tmp_path / "out.pt", to="full", key_type="name", unit=["a"])
    assert "give --units FILE" in str(refused.value.next_step)
    (tmp_path / "of-a-job.json").write_text(json.dumps(units))
    given = tmp_path / "of-a-job.json"
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "out.pt", to="full", key_type="name", units=given)
    assert sorted(torch.load(tmp_path / "out.pt")["optimizer"]["param_groups"][0]["params"]) == sorted(model)
