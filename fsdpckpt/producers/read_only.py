"""Describes frameworks whose checkpoints are read but not written."""

from __future__ import annotations

from fsdpckpt.producers.forms import Flavor, Sign

__all__ = ["COMPOSER", "FAIRSCALE", "TORCHTUNE", "TORCH_XLA"]

COMPOSER = Flavor(
    name="composer",
    title="Composer",
    signs=(Sign((r"^\.metadata$", r"^\.\./ep\d+-ba\d+$")), Sign(keys=("state", "rng"))),
)

TORCHTUNE = Flavor(
    name="torchtune",
    title="torchtune",
    signs=(Sign((r"^recipe_state\.pt$",)), Sign((r"^\.metadata$", r"^\.\./(dist_)?epoch_\d+$"))),
)


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
