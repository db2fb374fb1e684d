"""What is written is read by PyTorch's own offline tools, and chains of conversions lose nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.options import ConvertOptions, LinkMode, TensorForm
from fsdpckpt.progress import NoProgress
from tests.e2e.conversions import buffers, converted, expected, load_full, same_as_truth
from tests.oracle.compare import differences
from tests.oracle.forms import form
from tests.oracle.session import Oracle
from tests.oracle.toy import BUFFERS

FULL = ConvertOptions(to=Layout.FULL)
WORLD = 3


def again(source: Path, target: Path, options: ConvertOptions) -> Path:
    convert(Solo(), str(source), str(target), options, NoProgress())
    return target


def as_dcp_gives_it_back(value: Any) -> Any:
    """A state dict after DCP: every dict key is a string."""
    if isinstance(value, dict):
        return {str(key): as_dcp_gives_it_back(child) for key, child in value.items()}
    return value


@pytest.mark.parametrize(
    "source", ["f1_full.pt", "f1_ranks", "f2_dcp", "f2_full_ids.pt", "f2_ranks_ids", "f2_rich_dcp"]
)
def test_dcp_to_torch_save_reads_the_dcp_that_is_written(oracle: Oracle, tmp_path: Path, source: str) -> None:
    entry = form(source)
    options = ConvertOptions(
        to=Layout.SHARDED, container=Container.DCP, world_size=4, buffers=buffers(entry, WORLD, Container.DCP)
    )
    converted(oracle, entry, WORLD, tmp_path / "dcp", options)
    dcp_to_torch_save(str(tmp_path / "dcp"), str(tmp_path / "torch.pt"))
    truth = expected(oracle, entry, WORLD)
    assert same_as_truth(load_full(tmp_path / "torch.pt"), as_dcp_gives_it_back(truth)) == []


@pytest.mark.parametrize("source", ["f1_dcp", "f2_dcp", "f2_rich_dcp"])
def test_links_to_what_fsdp_saved_are_read_by_pytorch(oracle: Oracle, tmp_path: Path, source: str) -> None:
    entry, named = form(source), ConvertOptions(add_prefix="x.", link=LinkMode.HARDLINK)
    report = converted(oracle, entry, WORLD, tmp_path / "named", named)
    assert sum(file.source is not None for file in report.files) == WORLD
    again(tmp_path / "named", tmp_path / "dcp", ConvertOptions(strip_prefix="x.", link=LinkMode.HARDLINK))
    dcp_to_torch_save(str(tmp_path / "dcp"), str(tmp_path / "torch.pt"))
    truth = expected(oracle, entry, WORLD)
    assert same_as_truth(load_full(tmp_path / "torch.pt"), as_dcp_gives_it_back(truth)) == []


@pytest.mark.parametrize("source", ["f1_dcp", "f2_ranks", "f2_full_ids.pt", "f2_dcp_ids", "f2_rich_ranks", "f2_dcp"])
@pytest.mark.parametrize("shard", [10_000_000, 4_000], ids=["one-file", "several-files"])
def test_model_optimizer_and_groups_survive_safetensors(
    oracle: Oracle, tmp_path: Path, source: str, shard: int
) -> None:
    entry = form(source)
    options = ConvertOptions(to=Layout.FULL, container=Container.SAFETENSORS, max_shard_size=shard)
    converted(oracle, entry, WORLD, tmp_path / "safetensors", options)
    again(tmp_path / "safetensors", tmp_path / "full.pt", FULL)
    assert same_as_truth(load_full(tmp_path / "full.pt"), expected(oracle, entry, WORLD)) == []


def test_the_safetensors_library_reads_the_model(oracle: Oracle, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source = oracle.checkpoints(WORLD) / "f2_model.pt"
    again(source, tmp_path / "model.safetensors", ConvertOptions())
    truth = expected(oracle, form("f2_dcp"), WORLD)["model"]
    found = load_file(tmp_path / "model.safetensors")
    for tied in {"embed.weight", "head.weight"} - set(found):
        truth.pop(tied)  # safetensors keeps one name of weights that share memory
    assert differences(found, truth) == []


CHAINS = {
    "full, 5 ranks of DTensor files, DCP of 2, full": (
        ConvertOptions(to=Layout.FULL),
        ConvertOptions(to=Layout.SHARDED, container=Container.TORCH, world_size=5, buffers=BUFFERS),
        ConvertOptions(to=Layout.SHARDED, container=Container.DCP, world_size=2),
        ConvertOptions(to=Layout.FULL),
    ),
    "7 ranks of ShardedTensor files, DCP of 6, 3 ranks of DTensor files, full": (
        ConvertOptions(
            to=Layout.SHARDED,
            container=Container.TORCH,
            world_size=7,
            tensor=TensorForm.SHARDED_TENSOR,
            buffers=BUFFERS,
        ),
        ConvertOptions(to=Layout.SHARDED, container=Container.DCP, world_size=6),
        ConvertOptions(to=Layout.SHARDED, container=Container.TORCH, world_size=3, buffers=BUFFERS),
        ConvertOptions(to=Layout.FULL),
    ),
    "DCP of 20, DCP as it is cut, full": (
        ConvertOptions(to=Layout.SHARDED, container=Container.DCP, world_size=20),
        ConvertOptions(to=Layout.SHARDED, container=Container.DCP),
        ConvertOptions(to=Layout.FULL),
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("source", ["f1_flat_ranks", "f2_dcp", "f2_dcp_ids", "f2_rich_ranks", "f1_mesh_dcp"])
def test_a_chain_of_conversions_ends_where_it_began(oracle: Oracle, tmp_path: Path, source: str, chain: str) -> None:
    at = oracle.checkpoints(WORLD) / source
    for number, options in enumerate(CHAINS[chain]):
        suffix = ".pt" if options.to is Layout.FULL else ""
        at = again(at, tmp_path / f"step-{number}{suffix}", options)
    assert same_as_truth(load_full(at), expected(oracle, form(source), WORLD)) == []


def test_the_same_conversion_twice_writes_the_same_bytes(oracle: Oracle, tmp_path: Path) -> None:
    options = ConvertOptions(to=Layout.SHARDED, container=Container.TORCH, world_size=4, buffers=BUFFERS)
    for name, threads in (("one", 1), ("two", 4)):
        again(
            oracle.checkpoints(WORLD) / "f2_dcp",
            tmp_path / name / "out",
            replace(options, threads=threads),
        )
    files = sorted(path.name for path in (tmp_path / "one" / "out").glob("*.pt"))
    assert len(files) >= 8
    for name in files:
        assert (tmp_path / "one" / "out" / name).read_bytes() == (tmp_path / "two" / "out" / name).read_bytes()


def test_the_source_is_left_as_it_was(oracle: Oracle, tmp_path: Path) -> None:
    def state() -> list[tuple[str, int, int]]:
        at = oracle.checkpoints(WORLD) / "f1_ranks"
        return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in at.rglob("*"))

    before = state()
    converted(oracle, form("f1_ranks"), WORLD, tmp_path / "full.pt", FULL)
    assert state() == before


DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES += (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)


def test_every_dtype_that_adam_and_buffers_use_arrives_unchanged(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)

    def random_bytes() -> torch.Tensor:
        return torch.randint(0, 256, (7, 48), dtype=torch.uint8, generator=generator)

    model = {str(dtype): random_bytes().view(dtype) for dtype in DTYPES}
    model |= {"bool": random_bytes() > 99, "empty": torch.empty(0, 5), "scalar": torch.tensor(2.5)}
    model |= {"transposed": torch.randn(6, 4, generator=generator).t()}
    at = tmp_path / "full.pt"
    torch.save({"model": model}, at)
    chain = [
        replace(options, buffers=("none",)) if options.to is Layout.SHARDED else options
        for options in CHAINS["full, 5 ranks of DTensor files, DCP of 2, full"]
    ]
    for number, options in enumerate(chain[1:]):
        at = again(at, tmp_path / f"step-{number}{'.pt' if options.to is Layout.FULL else ''}", options)
    assert differences(load_full(at)["model"], model) == []


def test_dcp_metadata_says_what_is_sharded_and_asks_about_nothing_else(oracle: Oracle, tmp_path: Path) -> None:
    source = oracle.checkpoints(WORLD) / "f2_dcp"
    options = ConvertOptions(to=Layout.SHARDED, container=Container.TORCH, world_size=2)
    with pytest.raises(NeedsInformationError) as asked:
        again(source, tmp_path / "ranks", options)
    assert asked.value.details == ("void",)
    again(source, tmp_path / "ranks", replace(options, exclude=("void",)))
    held = torch.load(tmp_path / "ranks" / "model_world_size_2_rank_1.pt", weights_only=True)
    plain = {key for key, value in held.items() if not isinstance(value, DTensor)}
    assert plain == set(BUFFERS) - {"void"}
