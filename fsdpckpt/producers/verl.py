"""Describes verl's ``FSDPCheckpointManager``: ``global_step_N/actor`` with three files a rank."""

from __future__ import annotations

from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.producers.forms import Flavor, Form, MeshForm, Place, RankFile, Sign

_MODEL, _OPTIM, _EXTRA = (
    f"{section}_world_size_{{world_size}}_rank_{{rank}}.pt" for section in ("model", "optim", "extra_state")
)
_MESH = MeshForm("cuda", ("fsdp",), hybrid=("ddp", "fsdp"))
_SCHEDULE = "lr_scheduler"  # its loader opens it in any case, and "rng" where it is
_OPENED = ((_SCHEDULE, frozenset({"last_epoch", "_last_lr"})), ("rng", frozenset({"cpu", "numpy", "random"})))
_LAMBDAS = (_SCHEDULE, frozenset({"last_epoch", "_last_lr", "lr_lambdas"}))  # all of verl's schedules are LambdaLR
_CONFIG = '{{\n    "FSDP_version": {version},\n    "world_size": {{world_size}}\n}}'

VERL = Flavor(
    name="verl",
    title="verl's FSDP checkpoint manager",
    signs=(Sign((r"^(model|optim)_world_size_\d+_rank_\d+\.pt$", r"^(fsdp_config\.json|huggingface)$")),),
    forms=(
        Form(
            Layout.SHARDED,
            Container.TORCH,
            Place(_MODEL),
            Place(_OPTIM),
            Place(_EXTRA),
            key_type="id",
            mesh=_MESH,
            texts=(("fsdp_config.json", _CONFIG.format(version=2)),),
            defaults=((_SCHEDULE, None),),
            opened=_OPENED,
            schedule=_LAMBDAS,
        ),
        Form(  # FSDP1: DTensors in the model's files, flat parameters in the optimizer's
            Layout.FLATTENED,
            Container.TORCH,
            Place(_MODEL, layout=Layout.SHARDED),
            Place(_OPTIM),
            Place(_EXTRA, layout=Layout.SHARDED),
            key_type="id",
            mesh=_MESH,
            texts=(("fsdp_config.json", _CONFIG.format(version=1)),),
            defaults=((_SCHEDULE, None),),
            opened=_OPENED,
            schedule=_LAMBDAS,
        ),
    ),
    state=r"^((model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|fsdp_config\.json)$",
    rank_files=(RankFile("data_{rank}.pt"),),  # its supervised training's data loaders
    side_files=r"^data\.pt$|^lora_(train_meta\.json|adapter/adapter_(config\.json|model\.safetensors))$",
    export_directories=("huggingface",),
    model_files="huggingface/",
    schedule=(_SCHEDULE,),
    training_files=(r"^extra_state_world_size_\d+_rank_\d+\.pt$",),  # what save_contents calls "extra"
)
