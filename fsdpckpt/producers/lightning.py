"""Describes Lightning: the Trainer's checkpoints and Fabric's (``lightning/{fabric,pytorch}/strategies/fsdp.py``)."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.producers.forms import Flavor, Form, Place, Sign

_Defaults = tuple[tuple[str, str | int | tuple[()] | None], ...]
_META = Place("meta.pt", container=Container.TORCH, layout=Layout.FULL)
_FILES = (r"^meta\.pt$", r"^\.metadata$")
_STATE = r"^(meta\.pt|\.metadata|.*\.distcp)$"
_VERSION = "pytorch-lightning_version"


_TRAINING_KEYS = ("lr_schedulers",)  # absent with save_weights_only

# The oldest version that saves what is written here: a Trainer brings what is older up to its own.
_DEFAULTS: _Defaults = ((_VERSION, "2.0.0"), ("epoch", 0), ("global_step", 0), ("lr_schedulers", ()))


def _sharded(model: str, optim: str, defaults: _Defaults = ()) -> Form:
    places = (Place("", (model,)), Place("", (optim,)), _META)
    return Form(Layout.SHARDED, Container.DCP, *places, key_type="name", defaults=defaults)


_TRAINER_FULL = Form(
    Layout.FULL,
    Container.TORCH,
    Place("", ("state_dict",)),
    Place("", ("optimizer_states", 0)),
    Place(""),
    key_type="id",
    defaults=_DEFAULTS,
    directory=False,
    suffix=".ckpt",
)

LIGHTNING = Flavor(
    name="lightning",
    title="Lightning's Trainer",
    signs=(Sign(keys=(_VERSION,)), Sign(_FILES, ("loops",))),
    forms=(_sharded("model", "optimizer_0", _DEFAULTS), _TRAINER_FULL),
    state=_STATE,
    schedule=("lr_schedulers", 0),
    training_keys=_TRAINING_KEYS,
)

LIGHTNING_MODEL_PARALLEL = Flavor(  # ModelParallelStrategy: FSDP2
    name="lightning-model-parallel",
    title="Lightning's Trainer with ModelParallelStrategy",
    signs=(Sign(_FILES, ("loops",), model=("state_dict",)),),
    forms=(_sharded("state_dict", "optimizer_0", _DEFAULTS), _TRAINER_FULL),
    state=_STATE,
    schedule=("lr_schedulers", 0),
    training_keys=_TRAINING_KEYS,
)

FABRIC = Flavor(
    name="fabric",
    title="Lightning Fabric",
    signs=(Sign(_FILES),),
    state=_STATE,
    forms=(
        replace(_sharded("model", "optimizer"), own_keys=True),
        Form(
            Layout.FULL,
            Container.TORCH,
            Place("", ("model",)),
            Place("", ("optimizer",)),
            Place(""),
            key_type="name",
            directory=False,
            suffix=".ckpt",
        ),
    ),
)
