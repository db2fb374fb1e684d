"""What is written is read by PyTorch's own offline tools, and chains of conversions lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from tests.e2e.conversions import buffers, converted, expected, load_full, require_truth
from tests.oracle.compare import differences
from tests.oracle.forms import form
from tests.oracle.session import Oracle
from tests.oracle.toy import BUFFERS

WORLD = 3


def as_dcp_gives_it_back(value: Any) -> Any:
    """A state dict after DCP: every dict key is a string."""
    if isinstance(value, dict):
        return {str(key): as_dcp_gives_it_back(child) for key, child in value.items()}
    return value


def require_read_by_pytorch(directory: Path, truth: dict[str, Any]) -> None:
    dcp_to_torch_save(str(directory), str(directory) + ".pt")
    require_truth(Path(f"{directory}.pt"), as_dcp_gives_it_back(truth))


@pytest.mark.parametrize(
    "source", ["f1_full.pt", "f1_ranks", "f2_dcp", "f2_full_ids.pt", "f2_ranks_ids", "f2_rich_dcp"]
)
def test_dcp_to_torch_save_reads_the_dcp_that_is_written(oracle: Oracle, tmp_path: Path, source: str) -> None:
    options = {"to": "sharded", "container": "dcp", "buffers": buffers(form(source), WORLD, "dcp")}
    converted(oracle, form(source), WORLD, tmp_path / "dcp", world_size=4, **options)
    require_read_by_pytorch(tmp_path / "dcp", expected(oracle, form(source), WORLD))


@pytest.mark.parametrize("source", ["f1_dcp", "f2_dcp", "f2_rich_dcp"])
def test_links_to_what_fsdp_saved_are_read_by_pytorch(oracle: Oracle, tmp_path: Path, source: str) -> None:
    report = converted(oracle, form(source), WORLD, tmp_path / "named", add_prefix="x.", link="hardlink")
    assert sum(file.source is not None for file in report.files) == WORLD
    fsdpckpt.convert(tmp_path / "named", tmp_path / "dcp", strip_prefix="x.", link="hardlink")
    require_read_by_pytorch(tmp_path / "dcp", expected(oracle, form(source), WORLD))


@pytest.mark.parametrize("source", ["f1_dcp", "f2_ranks", "f2_full_ids.pt", "f2_dcp_ids", "f2_rich_ranks", "f2_dcp"])
@pytest.mark.parametrize("shard", [10_000_000, 4_000], ids=["one-file", "several-files"])
def test_model_optimizer_and_groups_survive_safetensors(
    oracle: Oracle, tmp_path: Path, source: str, shard: int
) -> None:
    options = {"to": "full", "container": "safetensors", "max_shard_size": shard}
    converted(oracle, form(source), WORLD, tmp_path / "safetensors", **options)
    fsdpckpt.convert(tmp_path / "safetensors", tmp_path / "full.pt", to="full")
    require_truth(tmp_path / "full.pt", expected(oracle, form(source), WORLD))


def test_the_safetensors_library_reads_the_model(oracle: Oracle, tmp_path: Path) -> None:
    fsdpckpt.convert(oracle.checkpoints(WORLD) / "f2_model.pt", tmp_path / "model.safetensors")
    truth = expected(oracle, form("f2_dcp"), WORLD)["model"]
    found = load_file(tmp_path / "model.safetensors")
    for tied in {"embed.weight", "head.weight"} - set(found):
        truth.pop(tied)  # safetensors keeps one name of weights that share memory
    assert differences(found, truth) == []


FULL: dict[str, Any] = {"to": "full"}


def dcp(world_size: int | None) -> dict[str, Any]:
    return {"to": "sharded", "container": "dcp", "world_size": world_size}


def ranks(world_size: int, *names: str, **more: Any) -> dict[str, Any]:
    return {"to": "sharded", "container": "torch", "world_size": world_size, "buffers": names or BUFFERS, **more}


CHAINS = {
    "full, 5 ranks of DTensor files, DCP of 2, full": (FULL, ranks(5), dcp(2), FULL),
    "7 ranks of ShardedTensor files, DCP of 6, 3 ranks of DTensor files, full": (
        ranks(7, tensor="sharded-tensor"),
        dcp(6),
        ranks(3),
        FULL,
    ),
    "DCP of 20, DCP as it is cut, full": (dcp(20), dcp(None), FULL),
}


def through(source: Path, place: Path, chain: tuple[dict[str, Any], ...]) -> Path:
    """The last of the conversions of ``chain``, each of the one before."""
    for number, options in enumerate(chain):
        target = place / f"step-{number}{'.pt' if options['to'] == 'full' else ''}"
        fsdpckpt.convert(source, target, **options)
        source = target
    return source


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("source", ["f1_flat_ranks", "f2_dcp", "f2_dcp_ids", "f2_rich_ranks", "f1_mesh_dcp"])
def test_a_chain_of_conversions_ends_where_it_began(oracle: Oracle, tmp_path: Path, source: str, chain: str) -> None:
    end = through(oracle.checkpoints(WORLD) / source, tmp_path, CHAINS[chain])
    require_truth(end, expected(oracle, form(source), WORLD))


def test_the_same_conversion_twice_writes_the_same_bytes_and_leaves_the_source_as_it_was(
    oracle: Oracle, tmp_path: Path
) -> None:
    source = oracle.checkpoints(WORLD) / "f2_dcp"

    def state() -> list[tuple[str, int, int]]:
        return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in source.rglob("*"))

    before = state()
    for name, threads in (("one", 1), ("two", 4)):
        fsdpckpt.convert(source, tmp_path / name / "out", threads=threads, **ranks(4))
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / n / "out").glob("*.pt")} for n in ("one", "two"))
    assert len(one) >= 8 and one == two
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
    torch.save({"model": model}, tmp_path / "full.pt")
    end = through(tmp_path / "full.pt", tmp_path, (ranks(5, "none"), dcp(2), FULL))
    assert differences(load_full(end)["model"], model) == []


def test_dcp_metadata_says_what_is_sharded_and_asks_about_nothing_else(oracle: Oracle, tmp_path: Path) -> None:
    options = ranks(2) | {"buffers": ()}
    with pytest.raises(NeedsInformationError) as asked:
        converted(oracle, form("f2_dcp"), WORLD, tmp_path / "ranks", **options)
    assert asked.value.details == ("void",)
    converted(oracle, form("f2_dcp"), WORLD, tmp_path / "ranks", exclude="void", **options)
    held = torch.load(tmp_path / "ranks" / "model_world_size_2_rank_1.pt", weights_only=True)
    plain = {key for key, value in held.items() if not isinstance(value, DTensor)}
    assert plain == set(BUFFERS) - {"void"}
