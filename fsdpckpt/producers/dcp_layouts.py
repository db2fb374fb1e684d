"""Describes the frameworks whose checkpoints are DCP directories, each with a nesting and companion files of its own.

Sources, as of August 2026: ``veomni/checkpoint/dcp_checkpointer.py``; ``olmo_core/train/checkpoint.py``;
``prime_rl/trainer/ckpt.py``; ``nemo_rl/utils/native_checkpoint.py``; ``nemo_automodel/components/checkpoint``;
``slime/backends/fsdp_utils/checkpoint.py`` (up to December 2025); ``llamafactory/v1/core/utils/checkpoint.py``;
``torchtune/training/checkpointing``;
``transformers/distributed/checkpoint.py``.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.ir import Container, Layout
from fsdpckpt.producers.flavors import Flavor, Form, RankFileName, SectionPath, Signature

_DCP = r"^\.metadata$"
_ANY_SCHEDULE = frozenset({"last_epoch", "_last_lr"})  # what every LR scheduler of torch has

# VeOmni

_VEOMNI_FORM = Form(
    Layout.SHARDED, Container.DCP, SectionPath("", ("model",)), SectionPath("", ("optimizer",)), key_type="name"
)

VEOMNI = Flavor(
    name="veomni",
    title="VeOmni's DistributedCheckpointer",
    signs=(Signature((_DCP, r"^extra_state$"), model=("model",), flattened=False),),
    forms=(_VEOMNI_FORM,),
    side_directories=("extra_state",),
    rank_files=(RankFileName("extra_state/extra_state_rank_{rank}.pt", needed=True),),
    export_directories=("hf_ckpt",),
    model_files="hf_ckpt/",
    schedules=(("lr_scheduler",),),
    training_files=(r"^extra_state(/|$)",),
    needed=(
        (
            "extra_state",
            "stops: each rank opens extra_state/extra_state_rank_N.pt (copy it from a run on as many ranks)",
        ),
    ),
    loads="train.checkpoint.load_path = {target}",
)

VEOMNI_EXPERTS = replace(  # MultiOptimizer: expert or embedding parallelism, Muon
    VEOMNI,
    name="veomni-experts",
    title="VeOmni with expert parallelism or Muon",
    signs=(Signature((_DCP, r"^extra_state$"), model=("model",), flattened=True),),
    forms=(replace(_VEOMNI_FORM, flattened=True),),
)

# OLMo-core

OLMO_CORE = Flavor(
    name="olmo-core",
    title="OLMo-core's Checkpointer",
    signs=(Signature((r"^model_and_optim$", r"^(train|\.metadata\.json)$")),),
    forms=(
        Form(
            Layout.SHARDED,
            Container.DCP,
            SectionPath("model_and_optim/", ("model",)),
            SectionPath("model_and_optim/", ("optim",)),
            key_type="name",
            flattened=True,
            small_files=((".metadata.json", '{"version": "3.0.0"}'),),
        ),
    ),
    state=r"^(model_and_optim|\.metadata\.json)$",
    side_directories=("train",),
    rank_files=(RankFileName("train/rank{rank}.pt"),),
    training_files=(r"^train(/|$)",),
    needed=(
        (
            "train",
            "does not take it for a checkpoint: name its model_and_optim as load_path, and it starts at step 0",
        ),
    ),
    loads="trainer.load_path = {target}",
)

# prime-rl

PRIME_RL = Flavor(
    name="prime-rl",
    title="prime-rl's trainer",
    signs=(Signature((_DCP,), ("app",), model=("app", "model"), optim=("app", "optimizers")),),
    forms=(
        Form(
            Layout.SHARDED,
            Container.DCP,
            SectionPath("", ("app", "model")),
            SectionPath("", ("app", "optimizers")),
            SectionPath(""),
            key_type="name",
            defaults=(("app.progress.total_tokens", 0), ("app.progress.total_samples", 0)),
            schedule=("app.scheduler", _ANY_SCHEDULE),
            counter="app.progress.step",
        ),
    ),
    side_directories=("dataloader",),
    rank_files=(RankFileName("dataloader/rank_{rank}.pt"),),
    schedules=(("app", "scheduler"),),
    training_keys=("app.scheduler",),
    needed_extras=(("app.scheduler", "stops, unless its configuration says ckpt.skip_scheduler"),),
    loads="resume, with {target} as the trainer/ of output_dir/checkpoints/step_N",
)

# NeMo-RL and NeMo Automodel

_SHARDS = "shard-00001-"
"""Precedes the names of safetensors files that DCP's own writer makes for the first rank."""

_AUTOMODEL_SAFETENSORS = Form(
    Layout.SHARDED,
    Container.SAFETENSORS,
    SectionPath(f"model/{_SHARDS}", layout=Layout.FULL),
    SectionPath("optim/", ("optim",), container=Container.DCP),
    SectionPath("optim/", container=Container.DCP),
    key_type="name",
    flattened=True,
)
_AUTOMODEL_ADAPTER = replace(  # PEFT: one file of the adapter, which is opened by its name
    _AUTOMODEL_SAFETENSORS, model=SectionPath("model/adapter_model.safetensors", layout=Layout.FULL), adapter=True
)
_AUTOMODEL_ADAPTER_BY_ID = replace(  # with quantized weights below the adapter, or expert parallelism
    _AUTOMODEL_ADAPTER,
    key_type="id",
    flattened=False,
    optimizers=("optim", "optimizer_parts", "stage_{number}"),
)
_SCHEDULE_OF_ITS_OWN = (
    (
        "sched",
        "stops, unless lr_scheduler is removed from its recipe: no other framework's schedule fits its own",
    ),
)

AUTOMODEL = Flavor(
    name="automodel",
    title="NeMo Automodel's Checkpointer",
    signs=(Signature((r"^model$", r"^optim$", r"^(step_scheduler\.pt|losses\.json|rng)$")),),
    forms=(
        _AUTOMODEL_SAFETENSORS,
        replace(
            _AUTOMODEL_SAFETENSORS,
            container=Container.DCP,
            model=SectionPath("model/"),
        ),
        _AUTOMODEL_ADAPTER,
        _AUTOMODEL_ADAPTER_BY_ID,
    ),
    state=r"^(model|optim)$",
    side_directories=("rng", "dataloader", "model/.hf_metadata"),
    side_places=("model",),
    rank_files=(
        RankFileName("rng/rng_global_rank_{rank}.pt", needed=True),
        RankFileName("dataloader/dataloader_dp_rank_{rank}.pt", needed=True),
    ),
    side_files=r"^(\w+\.pt|losses\.json|config\.yaml)$|^(weights/)?model/[^/.]+\.(json|jinja|model|txt|py)$",
    export_directories=("consolidated",),
    model_files="model/.hf_metadata/",
    training_files=(r"^step_scheduler\.pt$", r"^(rng|dataloader)(/|$)"),
    needed=(
        ("step_scheduler.pt", "stops (copy the file from a run with the same recipe, and set step and epoch in it)"),
        ("rng", "stops: each rank opens rng/rng_global_rank_N.pt (copy the directory from a run on as many ranks)"),
        ("dataloader", "stops: each data-parallel rank opens dataloader/dataloader_dp_rank_N.pt (copy it, too)"),
    ),
    needed_extras=_SCHEDULE_OF_ITS_OWN,
    loads="checkpoint.restore_from = {target}",
)

NEMO_RL = Flavor(
    name="nemo-rl",
    title="NeMo-RL's DTensor policy",
    signs=(
        Signature((r"^weights$", r"^optimizer$"), ("sched",)),
        Signature((r"^weights$", r"^tokenizer$"), model=()),
    ),
    forms=tuple(
        replace(
            form,
            model=replace(form.model, file=f"weights/{form.model.file}"),
            optim=SectionPath("optimizer/optim/", ("optim",), container=Container.DCP),
            extra=SectionPath("optimizer/optim/", container=Container.DCP),
        )
        for form in AUTOMODEL.forms
    ),
    state=r"^(weights|optimizer)$",
    side_directories=("tokenizer", "weights/model/.hf_metadata"),
    side_places=("weights/model",),
    side_files=AUTOMODEL.side_files,
    export_directories=("consolidated",),
    model_files="tokenizer/",
    schedules=(("sched",),),
    training_keys=("sched",),
    needed_extras=(("sched", "stops, if it has a scheduler"),),
    loads="checkpointing.checkpoint_dir, with {target} as the policy/ of its step_N",
)

NEMO_RL_V1 = replace(
    NEMO_RL,
    name="nemo-rl-v1",
    title="NeMo-RL's DTensor policy before version 2",
    signs=(
        Signature((r"^weights$", r"^optimizer$"), model=("model",), optim=("optim", "optim")),
        Signature((r"^weights$", r"^tokenizer$"), model=("model",)),
    ),
    forms=(
        Form(
            Layout.SHARDED,
            Container.DCP,
            SectionPath("weights/", ("model",)),
            SectionPath("optimizer/", ("optim", "optim")),
            SectionPath("optimizer/"),
            key_type="name",
            schedule=("optim.sched", _ANY_SCHEDULE),
        ),
    ),
    side_directories=("tokenizer",),
    schedules=(("optim", "sched"),),
    training_keys=("optim.sched",),
    needed_extras=(("optim.sched", "stops, if it has a scheduler"),),
)

# slime's FSDP backend

SLIME = Flavor(
    name="slime",
    title="slime's FSDP backend",
    signs=(Signature((r"^model$",), model=("model_state", "model")),),
    forms=(
        Form(
            Layout.SHARDED,
            Container.DCP,
            SectionPath("model/", ("model_state", "model")),
            SectionPath("optimizer/", ("optim_state", "optim")),
            key_type="name",
        ),
    ),
    state=r"^(model|optimizer)$",
    side_directories=("lr_scheduler",),
    side_files=r"^(rng\.pt|meta\.json)$",
    schedules=(("lr_scheduler", "lr_scheduler_state", "lr_scheduler"),),
    training_files=(r"^lr_scheduler(/|$)", r"^rng\.pt$"),
    loads="--load DIR, with {target} as its iter_000000N and N in DIR/latest_checkpointed_iteration.txt",
)

# LLaMA-Factory's own trainer (v1); its other one is that of transformers

LLAMAFACTORY = Flavor(
    name="llamafactory",
    title="LLaMA-Factory v1 with FSDP2",
    signs=(Signature((r"^model$", r"^optimizer$", r"^(CHECKPOINT_COMPLETE|rng_state)$"), model=()),),
    forms=(
        Form(
            Layout.SHARDED,
            Container.DCP,
            SectionPath("model/"),
            SectionPath("optimizer/"),
            key_type="name",
            small_files=(("CHECKPOINT_COMPLETE", ""),),
        ),
    ),
    state=r"^(model|optimizer|CHECKPOINT_COMPLETE)$",
    side_directories=("dataloader", "rng_state"),
    rank_files=(RankFileName("dataloader/rank_{rank}.pt"), RankFileName("rng_state/rank_{rank}.pt")),
    side_files=r"^(metadata\.json|scheduler\.pt)$",
    export_directories=("hf_model",),
    model_files="hf_model/",
    schedules=(("scheduler",),),
    schedule_file="scheduler.pt",
    training_files=(r"^(scheduler\.pt|metadata\.json)$", r"^(dataloader|rng_state)(/|$)"),
    needed=(
        (
            "metadata.json",
            "stops (copy the file from a run with the same arguments, and set the step and the epoch in it)",
        ),
    ),
    loads="resume_from_checkpoint: {target}",
)

# torchtune's distributed recipes

TORCHTUNE = Flavor(
    name="torchtune",
    title="torchtune",
    signs=(
        Signature((r"^recipe_state\.pt$",)),
        Signature((_DCP, r"^\.\./(dist_)?epoch_\d+$")),
        Signature((_DCP,), ("epochs_run", "max_steps_per_epoch"), model=("model",)),
    ),
    forms=(
        Form(
            Layout.SHARDED,
            Container.DCP,
            SectionPath("", ("model",)),
            SectionPath("", ("optimizer",)),
            SectionPath(""),
            key_type="id",
        ),
    ),
    wanted_extras=(("epochs_run", "counts epochs and steps from 0: set epochs to those that are left"),),
    loads="resume_from_checkpoint=True enable_async_checkpointing=True, with {target} as the last epoch_N there",
)

# transformers without its Trainer

TRANSFORMERS_DISTRIBUTED = Flavor(
    name="transformers-distributed",
    title="save_pretrained(distributed_checkpoint=True)",
    signs=(Signature((r"^shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$", r"^config\.json$")),),
    forms=(
        replace(
            _AUTOMODEL_SAFETENSORS,
            model=SectionPath(_SHARDS, layout=Layout.FULL),
            optim=SectionPath("optimizer/", ("optimizer",), container=Container.DCP),
            extra=None,
        ),
    ),
    state=r"^shard-.*\.safetensors$|^optimizer$",
    model_files="",
    loads='AutoModel.from_pretrained("{target}", distributed_config=...), '
    'load_optimizer_distributed(model, optimizer, "{target}/optimizer")',
    tested="transformers 5.24",
)

DCP_LAYOUTS: tuple[Flavor, ...] = (
    VEOMNI, VEOMNI_EXPERTS, OLMO_CORE, PRIME_RL, AUTOMODEL, NEMO_RL, NEMO_RL_V1, SLIME, LLAMAFACTORY, TORCHTUNE,
    TRANSFORMERS_DISTRIBUTED,
)  # fmt: skip
"""In the order in which they are recognised."""
