"""Shards of torch_xla's and fairscale's FSDP: version 0.1 reads them, and later ones say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceUnsupportedError

SHARD = "_fsdp_shard_FSDP_SHARD_SEPARATOR__fsdp_wrapped_module_FSDP_SHARD_SEPARATOR_flat_param_0"


def torch_xla(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank saves; the form is that of ``get_shard_metadata``."""
    info = {"": {SHARD: {"_orig_size": torch.Size([12]), "_orig_name": "_fsdp_wrapped_module.flat_param_0"}}}
    flat = {"_fsdp_wrapped_module.flat_param_0": (["_fpw_module.weight"], [torch.Size([4, 3])], [12])}
    metadata = {"shard_info": info, "flatten_info": flat, "buffer_info": {}, "world_size": world_size, "rank": rank}
    return {"model": {f"block.{SHARD}": torch.rand(12 // world_size)}, "shard_metadata": metadata}


def fairscale(_rank: int, world_size: int) -> dict[str, Any]:
    """What a rank saves; the form is that of ``local_metadata_dict``."""
    params = {"flat_param_0": {"names": ["weight"], "shapes": [torch.Size([4, 3])], "numels": [12], "padding": 0}}
    module = {"fsdp_path": "block", "params": params, "no_broadcast_optim_state": False, "shared_param_info": []}
    metadata = {"param_metadata": [module], "buffer_names": ["scale"]}
    return {"model": {"block.flat_param_0": torch.rand(12 // world_size)}, "shard_metadata": metadata}


def unflattened(rank: int, world_size: int) -> dict[str, Any]:
    """The same with ``flatten_parameters=False``: only the metadata shows that the vector is a shard."""
    saved = fairscale(rank, world_size)
    return {"model": {"block.weight": torch.rand(12 // world_size)}, "meta": {"of": saved["shard_metadata"]}}


@pytest.mark.parametrize(
    ("make", "name", "library", "metadata"),
    [
        (torch_xla, "rank{}-of-2-model.pt", "torch_xla", True),
        (torch_xla, "run_rank-{:08d}-of-00000002.pth", "torch_xla", False),
        (fairscale, "last-shard{}.pt", "fairscale", True),
        (fairscale, "last-shard{}.pt", "fairscale", False),
        (unflattened, "last-shard{}.pt", "fairscale", True),
    ],
)
def test_shards_are_refused_with_the_version_that_reads_them(
    make: Any, name: str, library: str, metadata: bool, tmp_path: Path
) -> None:
    source = tmp_path / "saved"
    source.mkdir()
    for rank in range(2):
        content = make(rank, 2)
        torch.save(content if metadata else {"model": content["model"]}, source / name.format(rank))
    for path in (source, source / name.format(1)):
        for read in (fsdpckpt.inspect, fsdpckpt.api.verify):  # type: ignore[attr-defined]
            with pytest.raises(SourceUnsupportedError, match=f"contains shards of {library}'s FSDP") as refused:
                read(path)
    assert 'pip install "fsdpckpt==0.1.*"' in str(refused.value)
    assert str(refused.value.file).startswith(str(source))


def test_names_that_only_look_like_theirs_are_a_model(tmp_path: Path) -> None:
    state = {"flat_parameter_0": torch.rand(3), "shard_info": torch.rand(2), "my_fsdp_shard": torch.rand(4)}
    torch.save(state, tmp_path / "model.pt")
    assert [named.key for named in fsdpckpt.inspect(tmp_path / "model.pt").tensors] == list(state)
