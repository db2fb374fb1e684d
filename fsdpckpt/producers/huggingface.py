"""accelerate's ``save_state`` and the Trainer of transformers, which calls it (``accelerate/utils/fsdp_utils.py``)."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.producers.forms import Flavor, Form, MeshForm, Place, RankFile, Sign

WEIGHTS = r"^(model|pytorch_model)([-.].*)?\.(safetensors|bin)(\.index\.json)?$"
"""Names of the files that ``save_pretrained`` writes weights to."""

_MODEL, _OPTIM = "pytorch_model_fsdp", "optimizer"
_STATE = rf"^{_MODEL}(_\d+)?(_rank\d+)?(\.bin)?$"
_OPTIM_STATE = rf"^{_OPTIM}(_\d+(_rank\d+\.bin)?|\.bin)$"
_TRAINED = r"^trainer_state\.json$"

_SCHEDULING = r"^(scheduler(_\d+)?|scaler)\.(bin|pt)$"

_FULL = Form(Layout.FULL, Container.TORCH, Place(f"{_MODEL}.bin"), Place(f"{_OPTIM}.bin"), key_type="name")
_SHARDED = Form(
    Layout.SHARDED,
    Container.DCP,
    Place(f"{_MODEL}_0/", ("model",)),
    Place(f"{_OPTIM}_0/", ("optimizer",)),
    key_type="name",
)
_RANKS = Form(  # use_dcp=False
    Layout.SHARDED,
    Container.TORCH,
    Place(f"{_MODEL}_0_rank{{rank}}.bin"),
    Place(f"{_OPTIM}_0_rank{{rank}}.bin"),
    key_type="name",
    mesh=MeshForm("cuda"),
)

_LOCAL = Form(  # the optimizer is saved by name and sharded all the same
    Layout.FLATTENED,
    Container.TORCH,
    Place(f"{_MODEL}_rank{{rank}}.bin"),
    Place(f"{_OPTIM}_0/", ("optimizer",), container=Container.DCP, layout=Layout.SHARDED),
)

ACCELERATE = Flavor(
    name="accelerate",
    title="accelerate's save_state",
    signs=(Sign((_STATE,)), Sign((_OPTIM_STATE, r"^random_states_\d+\.pkl$"))),
    forms=(_SHARDED, _FULL, _RANKS, _LOCAL),
    state=rf"^({_MODEL}|{_OPTIM})(_\d+)?(_rank\d+)?(\.bin)?$",
    rank_files=(RankFile("random_states_{rank}.pkl"),),
    side_files=rf"{_SCHEDULING}|^(sampler(_\d+)?|dl_state_dict(_\d+)?)\.bin$|^custom_checkpoint_\d+\.pkl$",
    model_files="",
    schedule=("scheduler",),
    training_files=(r"^scheduler(_\d+)?\.bin$", r"^random_states_\d+\.pkl$", r"^scaler\.pt$"),
)

TRAINER = replace(
    ACCELERATE,
    name="trainer",
    title="a checkpoint of the Trainer of transformers",
    signs=(Sign((_STATE, _TRAINED)), Sign((_OPTIM_STATE, _TRAINED)), Sign((_TRAINED, r"^zero_to_fp32\.py$"))),
    state=rf"{ACCELERATE.state}|^(latest|global_step\d+|zero_to_(fp32|torch)\.py)$",  # with DeepSpeed in FSDP's place
    rank_files=(RankFile("rng_state_{rank}.pth", single="rng_state.pth"),),
    side_files=rf"{_SCHEDULING}|^(trainer_state\.json|training_args\.bin)$",
    exports=(WEIGHTS,),
    training_files=(r"^scheduler\.pt$", r"^rng_state(_\d+)?\.pth$", r"^scaler\.pt$"),  # none with save_only_model
)


HUGGINGFACE = Flavor(
    name="huggingface",
    title="Hugging Face's weights",
    signs=(Sign((r"^model([-.].*)?\.safetensors(\.index\.json)?$", r"^config\.json$")),),
    forms=(Form(Layout.FULL, Container.SAFETENSORS, Place("model"), None, weights=True),),
    state=r"\.safetensors(\.index\.json)?$",
    model_files="",
)
