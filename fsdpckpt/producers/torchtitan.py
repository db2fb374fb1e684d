"""Describes torchtitan's ``CheckpointManager``: ``step-N`` directories of DCP, in two generations of keys."""

from __future__ import annotations

from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.producers.forms import Flavor, Form, Place, Sign

__all__ = ["TORCHTITAN", "TORCHTITAN_OLD"]


def _form(*model: str) -> Form:
    return Form(
        Layout.SHARDED,
        Container.DCP,
        Place("", model),
        Place("", ("optimizer",)),
        Place(""),
        key_type="name",
        flattened=True,
    )


TORCHTITAN = Flavor(
    name="torchtitan",
    title="torchtitan, the model's names at the top",
    signs=(Sign((r"^\.metadata$", r"^\.\./step-\d+$")), Sign((r"^\.metadata$",), ("train_state",))),
    forms=(_form(),),
)

TORCHTITAN_OLD = Flavor(name="torchtitan-old", title="torchtitan, names below model", signs=(), forms=(_form("model"),))
