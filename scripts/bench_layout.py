"""Derive the layout of 1,000 FSDP1 units on 4,096 ranks: every slice of every parameter on every rank."""

from __future__ import annotations

import sys

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import Unit
from fsdpckpt.layouts.flattened import layout_of

UNITS, RANKS, WIDTH = 1000, 4096, 4096


def unit(number: int) -> Unit:
    """A decoder layer of a model with 7 billion parameters, slightly larger in each unit."""
    shapes = [(WIDTH, WIDTH)] * 4 + [(11008, WIDTH)] * 3 + [(WIDTH,)] * 2 + [(number + 1,)]
    params = [Parameter(f"layers.{number}.{at}", shape, DTYPES["float32"]) for at, shape in enumerate(shapes)]
    return Unit(f"layers.{number}", tuple(params))


def main() -> int:
    slices = 0
    for number in range(UNITS):
        layout = layout_of(unit(number), use_orig_params=True, world_size=RANKS, shard_size=RANKS)
        slices += len(layout.slices().rank)
    print(f"{UNITS:,} units on {RANKS:,} ranks: {slices:,} slices")
    return 0


if __name__ == "__main__":
    sys.exit(main())
