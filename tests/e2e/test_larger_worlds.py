"""Per-rank files for worlds too large to start here, against the shards real FSDP gives on the "fake" process group."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest

from tests.e2e.conversions import buffers, converted
from tests.oracle.forms import form
from tests.oracle.launch import python
from tests.oracle.session import Oracle

FAKE_LIMIT = 120.0  # seconds; about 10 on an idle core
SOURCE_WORLD = 3
# Source form, what the files hold, how many ranks, which are compared: the ends and where tensors run out of rows.
TABLE = [
    ("f2_dcp", "dtensor", 5, range(5)),
    ("f2_ranks", "dtensor", 8, range(8)),
    ("f1_dcp", "dtensor", 16, (0, 7, 8, 9, 15)),
    ("f2_full.pt", "dtensor", 64, (0, 1, 12, 16, 17, 63)),
    ("f2_ranks_ids", "dtensor-ids", 16, (0, 8, 12, 13, 15)),
    ("f1_ranks", "sharded-tensor", 5, range(5)),
    ("f1_full.pt", "sharded-tensor", 8, range(8)),
    ("f1_flat_dcp", "sharded-tensor", 64, (0, 1, 8, 9, 12, 16, 17, 63)),
]
IDS = [f"{source}-to-{held}-of-{world}" for source, held, world, _ in TABLE]


def _convert_and_compare(oracle: Oracle, directory: Path) -> None:
    jobs, results = [], {}
    for name, (source, held, world_size, ranks) in zip(IDS, TABLE, strict=True):
        entry = form(source)
        options = {"to": "sharded", "container": "torch", "world_size": world_size}
        options |= {"tensor": held.removesuffix("-ids"), "buffers": buffers(entry, SOURCE_WORLD, "torch")}
        try:
            converted(oracle, entry, SOURCE_WORLD, directory / name, **options)
        except Exception:  # noqa: BLE001 - this case's own test shows it
            results[name] = ["the conversion failed: " + traceback.format_exc()]
            continue
        truth = str(oracle.truth(SOURCE_WORLD, entry.truth))
        job = {"id": name, "tensor": held, "path": str(directory / name), "truth": truth, "world_size": world_size}
        jobs.append({**job, "ranks": list(ranks)})
    # The same files held against the weights of another run: if this passed, the comparison would see nothing.
    jobs.append({**jobs[0], "id": "control", "truth": str(oracle.truth(1, "f1"))})
    (directory / "jobs.json").write_text(json.dumps(jobs))
    found = directory / "found.json"
    python("tests.oracle.fake", str(directory / "jobs.json"), str(found), limit=FAKE_LIMIT)
    results.update(json.loads(found.read_text()))
    (directory / "results.json").write_text(json.dumps(results))


@pytest.fixture
def results(oracle: Oracle) -> dict[str, list[str]]:
    directory = oracle.once("larger-worlds", lambda directory: _convert_and_compare(oracle, directory))
    return json.loads((directory / "results.json").read_text())


@pytest.mark.parametrize("name", IDS)
def test_a_rank_of_a_large_world_gets_the_shards_fsdp_would_hold(results: dict[str, list[str]], name: str) -> None:
    assert results[name] == []


def test_the_comparison_notices_the_weights_of_another_run(results: dict[str, list[str]]) -> None:
    assert any("differ" in problem for problem in results["control"])
