"""Megatron-LM's torch format of one tensor-parallel rank and pipeline stage, as ``save_checkpoint`` builds it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceUnsupportedError
from tests.oracle.compare import identical, require_parts

SHAPES = {
    "embedding.word_embeddings.weight": (13, 6),
    "decoder.layers.0.self_attention.linear_qkv.weight": (18, 6),
    "decoder.layers.0.self_attention.linear_qkv.bias": (18,),
    "decoder.final_layernorm.weight": (6,),
}
DECAYED = [name for name, shape in SHAPES.items() if len(shape) > 1]  # _get_param_groups: these come first
OTHERS = [name for name in SHAPES if name not in DECAYED]


class Saved:
    """What the ranks hold after training, and ``generate_state_dict`` of it."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.masters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self.states = {
            name: {key: torch.rand(shape) for key in ("exp_avg", "exp_avg_sq")} for name, shape in SHAPES.items()
        }

    def save(self, path: Path, *, distributed: bool = False, **arguments: int) -> Path:
        groups: list[dict[str, Any]] = [{"lr": 0.1, "weight_decay": decay, "step": 500} for decay in (0.1, 0.0)]
        if not distributed:
            groups[0]["params"], groups[1]["params"] = [0, 1], [2, 3]
        optimizer: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if not distributed:  # Float16OptimizerWithFloat16Params
            optimizer["optimizer"]["state"] = dict(enumerate(self.states[name] for name in (*DECAYED, *OTHERS)))
            optimizer["fp32_from_fp16_params"] = [[self.masters[name] for name in each] for each in (DECAYED, OTHERS)]
        model: dict[str, Any] = {name: value.bfloat16() for name, value in self.masters.items()}
        model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
        parallel = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, **arguments}
        content = {
            "args": argparse.Namespace(**parallel), "checkpoint_version": 3.0, "iteration": 500, "model": model,
            "optimizer": optimizer, "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 500},
            "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
        }  # fmt: skip
        folder = path / "iter_0000500" / "mp_rank_00"
        folder.mkdir(parents=True)
        torch.save(content, folder / "model_optim_rng.pt")
        if distributed:
            count = sum(value.numel() for value in self.masters.values())
            buffers = {key: torch.rand(count) for key in ("param", "exp_avg", "exp_avg_sq")}
            dtypes = (torch.bfloat16, torch.float32)
            state = {"buckets_coalesced": True, 0: {dtypes: {**buffers, "numel_unpadded": count}}}
            torch.save(state, folder / "distrib_optim.pt")
        (path / "latest_checkpointed_iteration.txt").write_text("500")
        return path


@pytest.mark.filterwarnings("ignore")
def test_weights_and_states_of_one_rank_have_their_names(tmp_path: Path) -> None:
    saved = Saved()
    source = saved.save(tmp_path / "run")
    assert fsdpckpt.inspect(source).checkpoint.flavor == "megatron-torch"
    assert not fsdpckpt.verify(source).problems
    fsdpckpt.convert(source, tmp_path / "full.pt", to="full", key_type="name")
    found = torch.load(tmp_path / "full.pt")
    for name, value in saved.masters.items():
        assert identical(found["model"][name], value)
        require_parts(found["optimizer"]["state"][name], saved.states[name])
    assert [group["params"] for group in found["optimizer"]["param_groups"]] == [DECAYED, OTHERS]


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_whose_states_are_buffers_is_no_optimizer_without_states(tmp_path: Path) -> None:
    saved = Saved()
    source = saved.save(tmp_path / "run", distributed=True)
    problems = fsdpckpt.verify(source).problems
    assert len(problems) == 1 and "cannot tell where each parameter is in Megatron's buffers" in problems[0].message
    with pytest.raises(SourceUnsupportedError, match="contents are not known"):
        fsdpckpt.convert(source, tmp_path / "full.pt", to="full")
    fsdpckpt.convert(source, tmp_path / "model.pt", to="full", only="model")
    found = torch.load(tmp_path / "model.pt")
    assert all(identical(found[name], value.bfloat16()) for name, value in saved.masters.items())


@pytest.mark.parametrize("size", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_one_part_of_a_parallel_model_is_refused(size: str, tmp_path: Path) -> None:
    source = Saved().save(tmp_path / "run", **{size: 2})
    with pytest.raises(SourceUnsupportedError, match="is one part of a model"):
        fsdpckpt.inspect(source)
