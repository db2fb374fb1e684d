"""Libraries whose FSDP saves shards with a record beside them: read, and not written.

Their checkpoints are recognised by that record. A file name is a sign only where it tells of copies of the model.
"""

from __future__ import annotations

from fsdpckpt.flavors.forms import Flavor, Sign

__all__ = ["FAIRSCALE", "TORCH_XLA"]

_RANK = r"^rank\d+-of-\d+-(model|optimizer|optim|pytorch_model|adapter_model)\.(bin|pt|pth)$"
_OTHER = r"[_-]rank-\d{8}-of-\d{8}\.pth?$"

TORCH_XLA = Flavor(
    name="torch_xla",
    title="torch_xla's FSDP",
    signs=(Sign((_RANK,)), Sign((_OTHER,))),
    state=rf"{_RANK}|{_OTHER}",
    model_files="",
    exports=(r"^(model|pytorch_model)([-.].*)?\.(safetensors|bin)(\.index\.json)?$", r"_consolidated\.pth$"),
)

FAIRSCALE = Flavor(
    name="fairscale", title="fairscale's FSDP", signs=(), state=r"[_.-]shard[_-]?\d+\.[^.]+$", model_files=""
)
