"""States in blocks in a pickle: read where their parts fit together, and refused by what does not fit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceUnsupportedError, UsageError
from fsdpckpt.formats.torch.tensors import StoredTensor, Wrapped
from fsdpckpt.formats.torch.torchao import stored_blocks
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, Origin
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.placements import MeshShape, Placement, Replicate, Shard, Sharding
from fsdpckpt.ir.quantized import split_state
from fsdpckpt.ir.tensors import Chunks, Tensor, contiguous_stride
from fsdpckpt.ir.torchao import CODES, QMAP, SCALE
from fsdpckpt.ir.values import Global
from fsdpckpt.transform.quantized import refuse_casts, refuse_in_blocks, require_whole_blocks


def tensor(shape: tuple[int, ...], dtype: str = "uint8", stride: tuple[int, ...] | None = None) -> StoredTensor:
    return StoredTensor(DTYPES[dtype], shape, stride or contiguous_stride(shape), 64)


FOUR_BITS = Global("torchao.optim.subclass_4bit", "OptimState4bit")


def state(**changes: Any) -> Wrapped:
    """Six rows of four in blocks of eight: a group is two rows."""
    parts: dict[str, Any] = {
        CODES: tensor((6, 4)),
        SCALE: tensor((3,), "float32"),
        QMAP: tensor((256,), "float32"),
        "signed": True,
        "block_size": 8,
    }
    shape = changes.pop("shape", (6, 4))
    kind = changes.pop("kind", Global("torchao.optim.subclass_8bit", "OptimState8bit"))
    return Wrapped(kind, DTYPES["float32"], shape, {**parts, **changes})


def test_parts_that_fit_have_the_shapes_of_whole_groups() -> None:
    found = stored_blocks(state(), "a.pt", "w.exp_avg")
    assert (found.blocks.block, found.blocks.shape, found.blocks.group) == (8, (6, 4), 2)
    assert {part: one.shape for part, one in found.whole().items()} == {CODES: (6, 4), SCALE: (3, 1), QMAP: (256,)}


def test_a_block_may_be_one_element_and_two_codes_one_byte() -> None:
    one = stored_blocks(state(**{"block_size": 1, SCALE: tensor((24,), "float32")}), "a.pt", "w")
    assert (one.blocks.group, one.whole()[SCALE].shape) == (1, (6, 4))
    four = stored_blocks(
        state(**{"kind": FOUR_BITS, CODES: tensor((12,)), QMAP: tensor((16,), "float32")}), "a.pt", "w"
    )
    assert four.whole()[CODES].shape == (3, 4)


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        ({"block_size": 0}, "a block size", "0"),
        ({"block_size": None}, "a block size", "None"),
        ({"block_size": True}, "a block size", "True"),
        ({"signed": 1}, "a block size", "8"),
        ({"block_size": 5}, "elements in whole blocks of 5", "shape (6, 4)"),
        ({"block_size": 3, "kind": FOUR_BITS}, "elements in whole blocks of 3", "shape (6, 4)"),
        ({SCALE: tensor((3,), "float64")}, "scale of type float32", "float64 of shape (3,)"),
        ({CODES: tensor((6, 4), "int8")}, "codes of type uint8", "int8 of shape (6, 4)"),
        ({QMAP: [1.0]}, "qmap of type float32", "list"),
        ({SCALE: tensor((4,), "float32")}, "scale of shape (3,)", "float32 of shape (4,)"),
        ({CODES: tensor((4, 6))}, "codes of shape (6, 4)", "uint8 of shape (4, 6)"),
        ({"_shape": (4, 6)}, "the shape (6, 4)", "(4, 6)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], expected: str, found: str) -> None:
    with pytest.raises(SourceCorruptError, match="the parts of a torchao") as error:
        stored_blocks(state(**changes), "a.pt", "w.exp_avg")
    assert (error.value.file, error.value.key) == ("a.pt", "w.exp_avg")
    assert (error.value.expected, error.value.found) == (expected, found)


def test_codes_that_do_not_lie_row_by_row_are_refused() -> None:
    with pytest.raises(SourceUnsupportedError, match="not in row-major order"):
        stored_blocks(state(**{CODES: tensor((6, 4), stride=(1, 6))}), "a.pt", "w.exp_avg")


def of_extras(extra: Any) -> Checkpoint:
    origin = Origin("a.pt", Layout.FULL, Container.TORCH, "plain", 1)
    return Checkpoint(origin, files=(), model=None, optim=None, extra=extra)


def of_codes(**more: Any) -> Checkpoint:
    blocks = stored_blocks(state(), "a.pt", "w.exp_avg").blocks
    codes = Tensor(DTYPES["uint8"], (6, 4), Chunks.whole(file=0, offset=0, shape=(6, 4)), **more)
    return of_extras(split_state("ema", blocks, {CODES: codes}))


def test_states_among_the_extras_are_seen() -> None:
    found = stored_blocks(state(), "a.pt", "w.exp_avg")
    checkpoint = of_extras({"averages": [split_state("ema", found.blocks, {})]})
    with pytest.raises(UsageError, match=r"cannot cast averages\.0\.ema"):
        refuse_casts(checkpoint)
    with pytest.raises(SourceUnsupportedError, match=r"averages\.0\.ema is torchao's OptimState8bit in blocks of 8"):
        refuse_in_blocks(checkpoint, "flat parameters have no blocks")


def test_only_states_that_ranks_share_are_cut() -> None:
    for ranks in (3, 6):
        require_whole_blocks(of_codes(sharded=False), ranks, placed=False)
    require_whole_blocks(of_codes(sharded=True), 3, placed=False)
    with pytest.raises(NeedsInformationError, match="over 6 ranks cuts blocks apart") as error:
        require_whole_blocks(of_codes(sharded=True), 6, placed=False)
    assert error.value.expected == "shards of whole rows, 2 or a multiple of it"


@pytest.mark.parametrize(
    ("ranks", "placement", "fits"),
    [
        (6, Replicate(), True), (1, Shard(1), True), (2, Shard(1), False), (1, Shard(0), True), (2, Shard(0), False),
        (3, Shard(0), True), (6, Shard(0), False),
    ],
)  # fmt: skip
def test_placements_that_cut_no_block_are_accepted(ranks: int, placement: Placement, fits: bool) -> None:
    checkpoint = of_codes(sharded=True, sharding=Sharding(MeshShape((ranks,)), (placement,)))
    with nullcontext() if fits else pytest.raises(NeedsInformationError, match="cuts blocks apart"):
        require_whole_blocks(checkpoint, ranks, placed=True)
