"""One torch file: real FSDP1 full state dicts of old versions, and what a single file cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.tensors import Tensor
from tests.makers import GOLDEN, copied, files
from tests.readers.contents import opened
from tests.readers.played_ranks import as_rank
from tests.readings import Reading, each_reading
from tests.refusals import Refusal, each_of, incomplete, unsafe, unsupported

FULL = {"layout": Layout.FULL, "container": Container.TORCH, "world_size": 1}
TRUTH = {
    name: torch.load(GOLDEN / name / "truth/full.pt") for name in ("torch-2.1/f1_flat_full", "torch-2.4/f1_orig_full")
}
IDS = torch.load(GOLDEN / "torch-2.1/f1_flat_full/full_old_rekeyed_ids.pt")
WHOLE, TABLE = torch.rand(5, 3), {("a", 1): torch.ones(3), ("b", (2, None)): 4}
NORM = torch.nn.LayerNorm(5)
ADAM = torch.optim.Adam(NORM.parameters())
NORM(torch.rand(2, 5)).sum().backward()
ADAM.step()
COLOURED = torch.rand(3)
COLOURED.colour = "red"  # type: ignore[attr-defined]


def one_of_one(directory: Path) -> None:
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        torch.save({"w.w": distribute_tensor(WHOLE, mesh, [Shard(0)], src_data_rank=None)}, directory / "m.pt")


READINGS = (
    *(
        Reading(f"{section} of {name}", copied(GOLDEN / name, given=f"{section}.pt"), is_a=FULL,
                **{section: truth[section]})
        for name, truth in TRUTH.items()
        for section in ("model", "optim")
    ),
    Reading("integer ids stay integers", copied(GOLDEN / "torch-2.1/f1_flat_full", given="full_old_rekeyed_ids.pt"),
            optim=IDS, is_a=FULL),
    Reading("vectors are full in one file", files({"o.pt": ADAM.state_dict()}), optim=ADAM.state_dict(), is_a=FULL),
    Reading("one rank of a world of one", one_of_one, {"w.w": WHOLE}, is_a={"layout": Layout.SHARDED, "world_size": 1}),
    Reading("keys of a table that are tuples", files({"m.pt": {"model": {"w": WHOLE}, "table": TABLE}}), {"w": WHOLE},
            extra={"table": TABLE}),
    Reading("attributes of a tensor", files({"m.pt": {"w.w": COLOURED}}), {"w.w": COLOURED}, notes=["colour"]),
    Reading("flat parameters", files({"m.pt": {"l.0._flat_param": WHOLE[0], "buf": WHOLE[1]}}),
            {"l.0._flat_param": WHOLE[0], "buf": WHOLE[1]}, is_a={"layout": Layout.FLATTENED}),
)  # fmt: skip


@each_reading(READINGS)
def test_it_is_read(reading: Reading, tmp_path: Path) -> None:
    reading.require(tmp_path)


@pytest.mark.parametrize("name", TRUTH)
def test_the_marks_of_fsdp1_tell_buffers_from_parameters(name: str) -> None:
    model = opened(GOLDEN / name / "model.pt").model
    assert model is not None
    kinds = {key: leaf.sharded for key, leaf in model.params.items() if isinstance(leaf, Tensor)}
    assert kinds == {key: key != "buf" for key in kinds} and "buf" in kinds


class Quantized(torch.Tensor):
    """A tensor of a library's own class around another one, as torchao keeps 8-bit states."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    __torch_dispatch__ = classmethod(lambda cls, function, *_: NotImplemented)


ONE_OF_TWO = copied(GOLDEN / "torch-2.1/f1_flat_sh_st", given="model_1.pt")
ONE_OF_FOUR = copied(GOLDEN / "torch-2.4/f1_hyb_sh_dt", given="optim_1.pt")
CODES = torch.zeros(4, dtype=torch.uint8)
REFUSALS = (
    incomplete("one rank of two", ONE_OF_TWO, "DIR/model_1.pt: 1 of 2 ranks is missing: 0\n"),
    incomplete("one rank of four", ONE_OF_FOUR, "DIR/optim_1.pt: 3 of 4 ranks are missing: 0, 2, 3\n"),
    unsupported("a sparse tensor", files({"bad.pt": {"a": torch.eye(2).to_sparse()}}), "DIR/bad.pt", "  - a: "),
    unsafe("a random generator", files({"bad.pt": {"a": torch.Generator()}}), "DIR/bad.pt", "torch._C.Generator"),
    unsafe(
        "a tensor of a class of others", files({"c.pt": {"w": Quantized(CODES)}}), "\n  - " + __name__ + ".Quantized"
    ),
)


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)
