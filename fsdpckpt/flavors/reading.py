"""Producers whose checkpoints are read and not written."""

from __future__ import annotations

from fsdpckpt.flavors.forms import Flavor, Sign

__all__ = ["COMPOSER", "TORCHTUNE"]

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
