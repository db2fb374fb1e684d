"""What the pages draw is to scale: the tree map, the memory of a rank, curves by layer, the grid of files and ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import fsdpckpt
from fsdpckpt.describe import FileState, rank_grid
from fsdpckpt.ir.checkpoint import NamedTensor, Section
from fsdpckpt.report.curves import LEFT, RIGHT, WIDTH, Line, curve, layer_curves, layer_of
from fsdpckpt.report.memory import memory_by_ranks
from fsdpckpt.report.page import page
from fsdpckpt.report.treemap import WIDE, tiles, treemap
from tests.cli.conftest import at_step
from tests.report.test_page import sharded

torch = pytest.importorskip("torch")


def test_a_tree_map_divides_its_area_by_bytes_and_nothing_overlaps() -> None:
    sizes = {"embed": 600, "head": 600, **{f"layers.{n}.{part}": 100 * (n + 1) for n in range(4) for part in "abc"}}
    drawn = treemap(tiles(sizes.items()), WIDE, "")
    whole = sum(sizes.values())
    outer = {one.tooltip.split(":")[0]: one for one in drawn["rectangles"] if one.kind in ("tile0", "tile-leaf")}
    for name, nbytes in (("embed", 600), ("head", 600), ("layers", 3000)):
        area = (outer[name].width + 1.5) * (outer[name].height + 1.5)
        assert area == pytest.approx(WIDE[0] * WIDE[1] * nbytes / whole, rel=1e-6), name
    boxes = [(one.x, one.y, one.x + one.width, one.y + one.height) for one in outer.values() if "." not in one.tooltip]
    for at, (left, top, right, bottom) in enumerate(boxes):
        assert 0 <= left <= right <= WIDE[0] and 0 <= top <= bottom <= WIDE[1]
        for other in boxes[at + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_a_tree_map_of_very_many_modules_stays_small_and_shows_the_outer_ones() -> None:
    drawn = treemap(tiles((f"layers.{n}.w{m}", 1000) for n in range(126) for m in range(40)), WIDE, "")
    assert len(drawn["rectangles"]) <= 500
    assert sum(re.match(r"layers\.\d+:", one.tooltip) is not None for one in drawn["rectangles"]) == 126
    assert treemap(tiles([]), WIDE, "")["rectangles"] == []


@pytest.mark.parametrize("ranks", [1, 3, 4, 8, 64])
def test_the_memory_of_a_rank_is_what_torch_chunk_gives_the_first(ranks: int) -> None:
    shapes = {"w": (101, 7), "b": (13,), "scalar": ()}
    tensors = [NamedTensor(Section.MODEL, name, None, sharded(shape, 1)) for name, shape in shapes.items() if shape]
    tensors += [NamedTensor(Section.OPTIM, "w", "exp_avg", sharded((101, 7), 1))]
    tensors += [NamedTensor(Section.MODEL, "mask", None, sharded((50, 2), 1))]
    (row,) = [each for each in memory_by_ranks(tensors, {"mask"}, ranks) if each.ranks == ranks]
    first = {name: torch.empty(shape).chunk(ranks)[0].numel() * 4 for name, shape in shapes.items() if shape}
    assert row.gradients == first["w"] + first["b"]
    assert row.weights == row.gradients + 50 * 2 * 4, "a buffer is whole on each rank"
    assert row.states == first["w"]


def test_a_curve_is_logarithmic_and_breaks_where_there_is_no_value() -> None:
    drawn = curve("t", [0, 1, 2, 4], [Line("RMS", "k", [0.01, 0.1, None, 1.0])])
    (line,) = drawn["lines"]
    assert len(line["points"]) == 2
    (x0, y0, _), (x1, y1, _), (_, y4, words) = line["dots"]
    assert float(x1) - float(x0) == pytest.approx((WIDTH - LEFT - RIGHT) / 4, abs=0.2)
    assert float(y0) - float(y1) == pytest.approx(float(y1) - float(y4), abs=0.2)
    assert words == "layer 4: RMS 1"
    assert curve("zeros", [0, 1, 2], [Line("RMS", "k", [0.0, 0.0, 0.0])]) is None


def test_layers_are_summed_as_numpy_would() -> None:
    assert layer_of("model.layers.3.mlp.weight") == ("model.layers", 3)
    assert layer_of("0.weight") == ("layers", 0)
    assert layer_of("norm.weight") is None
    arrays = {f"layers.{n}.{part}": np.arange(1, 5.0) * (n + 1) for n in range(3) for part in "ab"}
    values = [("weights", name, float(np.linalg.norm(a)), a.size, float(np.abs(a).max())) for name, a in arrays.items()]
    (drawn,) = layer_curves(values)
    rms = [float(words.rsplit(" ", 1)[1]) for *_, words in drawn["lines"][0]["dots"]]
    expected = [
        np.sqrt(np.mean(np.square(np.concatenate([arrays[f"layers.{n}.{p}"] for p in "ab"])))) for n in range(3)
    ]
    assert rms == pytest.approx(expected, rel=1e-2)


def test_the_grid_shows_which_rank_lacks_which_file_also_of_hundreds() -> None:
    names = [f"optim_world_size_512_rank_{rank}.pt" for rank in range(512) if rank not in (3, 17, 300)]
    names += ["model_world_size_512_rank_0.pt", "config.json", "__0_0.distcp", "__1_0.distcp", "__1_1.distcp"]
    grid = rank_grid(names, ["__2_0.distcp"], ["optim_world_size_512_rank_5.pt"])
    rows = {row.pattern: row for row in grid.rows}
    optim = rows["optim_world_size_512_rank_*.pt"]
    assert optim.ranks(FileState.MISSING) == [3, 17, 300]
    assert optim.ranks(FileState.DAMAGED) == [5]
    assert len(rows["model_world_size_512_rank_*.pt"].ranks(FileState.MISSING)) == 511
    assert rows["__*_*.distcp"].ranks(FileState.MISSING) == [2]
    assert rows["__*_*.distcp"].states[3] is FileState.NONE, "not every rank writes one"


def test_ids_are_shown_under_the_names_that_the_checkpoint_proves(tmp_path: Path) -> None:
    torch.save(at_step(100), tmp_path / "a.pt")
    html = page(fsdpckpt.inspect(tmp_path / "a.pt", stats=True))
    assert "layers.1.attn.q_proj.weight.exp_avg" in html
    assert "exp_avg in layers" in html
    assert "scheduler.last_epoch" in html and "40 values, 100" in html
    assert f"fsdpckpt verify {tmp_path / 'a.pt'}" in html
