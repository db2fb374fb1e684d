"""Imports what the package uses of DTensor; torch 2.4 has it in ``torch.distributed._tensor``."""

from __future__ import annotations

try:
    from torch.distributed.tensor import DTensor, placement_types
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError:
    from torch.distributed._tensor import DTensor, placement_types  # type: ignore[no-redef,attr-defined]
    from torch.distributed._tensor._utils import (  # type: ignore[no-redef,import-not-found]
        compute_local_shape_and_global_offset,
    )

__all__ = ["DTensor", "Placement", "Shard", "StridedShard", "compute_local_shape_and_global_offset"]

Placement = placement_types.Placement
Shard = placement_types.Shard
StridedShard: type[Shard] | None = getattr(placement_types, "_StridedShard", None)  # 2.4 has none
