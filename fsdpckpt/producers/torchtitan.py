"""Describes torchtitan's ``CheckpointManager``: ``step-N`` directories of DCP, in two generations of keys."""

from __future__ import annotations

from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.producers.forms import Flavor, Form, Place, Sign

_DCP = r"^\.metadata$"


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


_TRAINING_KEYS = ("lr_scheduler", "train_state")  # absent with last_save_model_only
_STEP = r"^\.\./step-\d+$"  # anybody calls a directory so: the keys in it say whose it is


TORCHTITAN = Flavor(
    name="torchtitan",
    title="torchtitan, the model's names at the top",
    signs=(Sign((_DCP, _STEP), model=()), Sign((_DCP,), ("train_state",), model=())),
    forms=(_form(),),
    training_keys=_TRAINING_KEYS,
)

TORCHTITAN_OLD = Flavor(
    name="torchtitan-old",
    title="torchtitan, names below model",
    signs=(
        Sign((_DCP, _STEP), model=("model",), flattened=True),
        Sign((_DCP,), ("train_state",), model=("model",)),
    ),
    forms=(_form("model"),),
    training_keys=_TRAINING_KEYS,
)
