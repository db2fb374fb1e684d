"""Describes every framework, including those that can only be read. ``producers.recognition`` finds the one that saved.

Sources: ``accelerate/utils/fsdp_utils.py`` (``save_state``, which the Trainer of transformers calls);
``lightning/{fabric,pytorch}/strategies/fsdp.py``; torchtitan's ``CheckpointManager``, ``step-N`` directories of DCP in
two generations of keys; verl's ``FSDPCheckpointManager``, ``global_step_N/actor`` with three files for each rank.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.ir import Container, IdRule, Layout, Section
from fsdpckpt.producers.dcp_layouts import DCP_LAYOUTS
from fsdpckpt.producers.flavors import PLAIN, PLAIN_PATHS, Flavor, Form, MeshForm, RankFileName, SectionPath, Signature

# accelerate, the Trainer of transformers, Hugging Face

WEIGHTS = r"^(model|pytorch_model)([-.].*)?\.(safetensors|bin)(\.index\.json)?$"
"""The names of the files to which ``save_pretrained`` writes weights."""

ADAPTER = r"^adapter_model([-.].*)?\.(safetensors|bin)(\.index\.json)?$"
"""The names of the files to which PEFT's ``save_pretrained`` writes an adapter."""

_MODEL, _OPTIM = "pytorch_model_fsdp", "optimizer"
_STATE = rf"^{_MODEL}(_\d+)?(_rank\d+)?(\.bin)?$"
_OPTIM_STATE = rf"^{_OPTIM}(_\d+(_rank\d+\.bin)?|\.bin)$"
_TRAINER_FILE = r"^(trainer_state\.json|rng_state(_\d+)?\.pth)$"
_SCHEDULER_FILE = r"^(scheduler(_\d+)?|scaler)\.(bin|pt)$"

_FULL = Form(
    Layout.FULL,
    Container.TORCH,
    SectionPath(f"{_MODEL}.bin"),
    SectionPath(f"{_OPTIM}.bin"),
    key_type="name",
    several=True,
)
_SHARDED = Form(
    Layout.SHARDED,
    Container.DCP,
    SectionPath(f"{_MODEL}_0/", ("model",)),
    SectionPath(f"{_OPTIM}_0/", ("optimizer",)),
    key_type="name",
    several=True,
)
_RANKS = Form(  # use_dcp=False
    Layout.SHARDED,
    Container.TORCH,
    SectionPath(f"{_MODEL}_0_rank{{rank}}.bin"),
    SectionPath(f"{_OPTIM}_0_rank{{rank}}.bin"),
    key_type="name",
    mesh=MeshForm("cuda"),
    several=True,
)

_LOCAL = Form(  # the optimizer is saved by name and sharded all the same
    Layout.FLATTENED,
    Container.TORCH,
    SectionPath(f"{_MODEL}_rank{{rank}}.bin"),
    SectionPath(f"{_OPTIM}_0/", ("optimizer",), container=Container.DCP, layout=Layout.SHARDED),
    not_loaded="torch.load(weights_only=True) refuses their ShardedTensors",
)

_BY_DEEPSPEED = r"^latest(_universal)?$"  # DeepSpeed's state in place of FSDP's
_OF_DEEPSPEED = rf"{_BY_DEEPSPEED}|^zero_to_(fp32|torch)\.py$"
_STEP_DIRECTORY = r"^global_step\d+(_universal)?$"
_DEEPSPEED_SCHEDULE = ("lr_scheduler",)

ACCELERATE = Flavor(
    name="accelerate",
    title="accelerate's save_state",
    signs=(
        Signature((_STATE,)),
        Signature((_OPTIM_STATE, r"^random_states_\d+\.pkl$")),
        Signature((_BY_DEEPSPEED, r"^random_states_\d+\.pkl$")),
    ),
    forms=(_SHARDED, _FULL, _RANKS, _LOCAL),
    state=rf"^({_MODEL}|{_OPTIM})(_\d+)?(_rank\d+)?(\.bin)?$|{_OF_DEEPSPEED}|^pytorch_model$",
    rank_files=(RankFileName("random_states_{rank}.pkl"),),
    side_files=rf"{_SCHEDULER_FILE}|^(sampler(_\d+)?|dl_state_dict(_\d+)?)\.bin$|^custom_checkpoint_\d+\.pkl$",
    exports=(WEIGHTS, ADAPTER),
    exports_beside=rf"{_STATE}|{_BY_DEEPSPEED}",
    model_files="",
    schedules=(("scheduler",), _DEEPSPEED_SCHEDULE),
    counts_processes=True,
    training_files=(r"^scheduler(_\d+)?\.bin$", r"^random_states_\d+\.pkl$", r"^scaler\.pt$"),
    schedule_file="scheduler.bin",
    universal_directory="pytorch_model",
    loads='accelerator.load_state("{target}")',
    tested="accelerate 1.15",
)

TRAINER = replace(
    ACCELERATE,
    name="trainer",
    forms=tuple(replace(form, several=False) for form in ACCELERATE.forms),
    title="a checkpoint of the Trainer of transformers",
    signs=(
        Signature((_STATE, _TRAINER_FILE)),
        Signature((_OPTIM_STATE, _TRAINER_FILE)),
        Signature((_TRAINER_FILE, _BY_DEEPSPEED)),
    ),
    state=rf"{ACCELERATE.state}|{_STEP_DIRECTORY}",
    rank_files=(RankFileName("rng_state_{rank}.pth", single="rng_state.pth"),),
    side_files=rf"{_SCHEDULER_FILE}|^(trainer_state\.json|training_args\.bin)$",
    exports_beside="",  # its own state is never called so
    training_files=(r"^scheduler\.pt$", r"^rng_state(_\d+)?\.pth$", r"^scaler\.pt$"),  # none with save_only_model
    needed=(  # Trainer._load_optimizer_and_scheduler, Trainer.train
        ("scheduler.pt", "silently starts with a new optimizer"),
        (
            "trainer_state.json",
            "stops with FileNotFoundError (copy the file from a run with the same arguments, and set global_step in it "
            "to the optimizer's step)",
        ),
    ),
    counts_processes=False,
    schedule_file="scheduler.pt",
    two_groups=True,
    universal_directory="",
    loads='trainer.train(resume_from_checkpoint="{target}")',
    tested="transformers 5.24",
)

_BARE_STATE = rf"{WEIGHTS}|{ADAPTER}"

TRAINER_WITHOUT_FSDP = Flavor(  # DistributedDataParallel, or one process: the weights are those of ``save_pretrained``
    name="trainer-ddp",
    title="a checkpoint of the Trainer of transformers without FSDP",
    signs=(Signature((_BARE_STATE, rf"{_TRAINER_FILE}|^scheduler\.pt$")),),
    state=rf"{_BARE_STATE}|^optimizer\.pt$",
    rank_files=TRAINER.rank_files,
    side_files=TRAINER.side_files,
    contained_in=(TRAINER.name,),
    model_files="",
    schedules=(("scheduler",),),
    training_files=TRAINER.training_files,
    schedule_file=TRAINER.schedule_file,
)

HUGGINGFACE = Flavor(
    name="huggingface",
    title="Hugging Face weights",
    signs=(
        Signature((r"^model([-.].*)?\.safetensors(\.index\.json)?$", r"^config\.json$")),
        Signature((r"^pytorch_model([-.].*)?\.bin(\.index\.json)?$", r"^config\.json$")),
    ),
    forms=(Form(Layout.FULL, Container.SAFETENSORS, SectionPath(""), None, weights=True),),
    also_loads=(Form(Layout.FULL, Container.TORCH, SectionPath("pytorch_model.bin"), None, weights=True),),
    state=r"\.safetensors(\.index\.json)?$|^pytorch_model([-.].*)?\.bin(\.index\.json)?$",
    model_files="",
    loads='AutoModel.from_pretrained("{target}")',
    tested="transformers 5.24, safetensors 0.8",
)


# Lightning

_Defaults = tuple[tuple[str, str | int | tuple[()] | None], ...]
_META = SectionPath("meta.pt", container=Container.TORCH, layout=Layout.FULL)
_META_FILES = (r"^meta\.pt$", r"^\.metadata$")
_VERSION = "pytorch-lightning_version"
# The oldest version that saves this form: the Trainer upgrades older ones.
_DEFAULTS: _Defaults = ((_VERSION, "2.0.0"), ("epoch", 0), ("lr_schedulers", ()))
_COUNTER = "global_step"


def _lightning_sharded(model: str, optim: str, defaults: _Defaults = ()) -> Form:
    places = (SectionPath("", (model,)), SectionPath("", (optim,)), _META)
    several = ("optimizer_{number}",) if defaults else ()  # Fabric keeps the names that its users choose
    return Form(
        Layout.SHARDED, Container.DCP, *places, key_type="name", defaults=defaults, optimizers=several,
        keeps_source_keys=not several, counter=_COUNTER if defaults else "",
    )  # fmt: skip


_FABRIC_FULL = Form(
    Layout.FULL,
    Container.TORCH,
    SectionPath("", ("model",)),
    SectionPath("", ("optimizer",)),
    SectionPath(""),
    key_type="name",
    directory=False,
    suffix=".ckpt",
    keeps_source_keys=True,
)
_LIGHTNING_FULL = replace(
    _FABRIC_FULL,
    model=SectionPath("", ("state_dict",)),
    optim=SectionPath("", ("optimizer_states", 0)),
    key_type="id",
    id_rule=IdRule.MODEL,  # FSDPStrategy and ModelParallelStrategy, optimizer_state and load_checkpoint
    defaults=_DEFAULTS,
    counter=_COUNTER,
    keeps_source_keys=False,
    optimizers=("optimizer_states", "{number}"),
)

LIGHTNING = Flavor(
    name="lightning",
    title="Lightning's Trainer",
    signs=(  # the version stays an extra in a file of other keys, which count ids otherwise
        Signature(keys=(_VERSION, "state_dict")),
        Signature(keys=(_VERSION, "optimizer_states")),
        Signature(_META_FILES, (_VERSION,)),
        Signature(_META_FILES, ("loops",)),
    ),
    forms=(_lightning_sharded("model", "optimizer_0", _DEFAULTS), _LIGHTNING_FULL),
    state=r"^(meta\.pt|\.metadata|.*\.distcp)$",
    schedules=(("lr_schedulers", 0),),
    loads='trainer.fit(model, ckpt_path="{target}")',
    tested="lightning 2.6",
    training_keys=("lr_schedulers",),  # absent with save_weights_only
    wanted_extras=(("loops", "counts epochs and steps from 0: set max_epochs or max_steps to what is left"),),
)

LIGHTNING_MODEL_PARALLEL = replace(  # ModelParallelStrategy: FSDP2
    LIGHTNING,
    name="lightning-model-parallel",
    title="Lightning's Trainer with ModelParallelStrategy",
    signs=(Signature(_META_FILES, ("loops",), model=("state_dict",)),),
    forms=(_lightning_sharded("state_dict", "optimizer_0", _DEFAULTS), _LIGHTNING_FULL),
)

FABRIC = Flavor(
    name="fabric",
    title="Lightning Fabric",
    signs=(Signature(_META_FILES),),
    state=LIGHTNING.state,
    forms=(_lightning_sharded("model", "optimizer"), _FABRIC_FULL),
    loads='fabric.load("{target}", state)',
    tested="lightning 2.6",
)


# torchtitan

_DCP = r"^\.metadata$"
_STEP = r"^\.\./step-\d+$"  # others may name a directory so: only with torchtitan's keys in it
_TORCHTITAN_FORM = Form(
    Layout.SHARDED,
    Container.DCP,
    SectionPath(""),
    SectionPath("", ("optimizer",)),
    SectionPath(""),
    key_type="name",
    flattened=True,
)

TORCHTITAN = Flavor(
    name="torchtitan",
    title="torchtitan, the model's names at the top",
    signs=(Signature((_DCP, _STEP), model=()), Signature((_DCP,), ("train_state",), model=())),
    forms=(_TORCHTITAN_FORM,),
    training_keys=("lr_scheduler", "train_state"),  # absent with last_save_model_only
    data_position="dataloader",
    needed_extras=(
        ("train_state", "stops, unless checkpoint.exclude_from_loading lists it; then it counts steps from 0"),
        ("lr_scheduler", "stops, unless checkpoint.exclude_from_loading lists it; then its schedule begins anew"),
    ),
    loads="checkpoint.initial_load_path = {target} (an absolute path), checkpoint.initial_load_model_only = False",
    tested="torchtitan 0.3",
)

TORCHTITAN_OLD = replace(
    TORCHTITAN,
    name="torchtitan-old",
    title="torchtitan, names below model",
    signs=(
        Signature((_DCP, _STEP), model=("model",), flattened=True),
        Signature((_DCP,), ("train_state",), model=("model",)),
    ),
    forms=(replace(_TORCHTITAN_FORM, model=SectionPath("", ("model",))),),
)


# verl

_SCHEDULE = "lr_scheduler"  # its loader always opens it, and "rng" if there is one
_CONFIG = '{{\n    "FSDP_version": {version},\n    "world_size": {{world_size}}\n}}'
_VERL_PLACES = {section: replace(place, keys=()) for section, place in PLAIN_PATHS.items()}
_VERL_SHARDED = Form(
    Layout.SHARDED,
    Container.TORCH,
    _VERL_PLACES[Section.MODEL],
    _VERL_PLACES[Section.OPTIM],
    _VERL_PLACES[Section.EXTRA],
    key_type="id",
    mesh=MeshForm("cuda", ("fsdp",), hybrid=("ddp", "fsdp")),
    small_files=(("fsdp_config.json", _CONFIG.format(version=2)),),
    defaults=((_SCHEDULE, None),),
    loader_opens=((_SCHEDULE, frozenset({"last_epoch", "_last_lr"})), ("rng", frozenset({"cpu", "numpy", "random"}))),
    schedule=(_SCHEDULE, frozenset({"last_epoch", "_last_lr", "lr_lambdas"})),  # all of verl's are LambdaLR
)
_VERL_FLATTENED = replace(  # FSDP1: DTensors in the model's files, flat parameters in the optimizer's
    _VERL_SHARDED,
    layout=Layout.FLATTENED,
    model=replace(_VERL_PLACES[Section.MODEL], layout=Layout.SHARDED),
    extra=replace(_VERL_PLACES[Section.EXTRA], layout=Layout.SHARDED),
    small_files=(("fsdp_config.json", _CONFIG.format(version=1)),),
)

VERL = Flavor(
    name="verl",
    title="verl's FSDP checkpoint manager",
    signs=(Signature((r"^(model|optim)_world_size_\d+_rank_\d+\.pt$", r"^(fsdp_config\.json|huggingface)$")),),
    forms=(_VERL_SHARDED, _VERL_FLATTENED),
    state=r"^((model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|fsdp_config\.json)$",
    rank_files=(RankFileName("data_{rank}.pt"),),  # the data loaders of its supervised training
    side_files=r"^data\.pt$|^lora_train_meta\.json$",
    export_directories=("huggingface", "lora_adapter"),  # what its merger writes, and what each save of an adapter does
    model_files="huggingface/",
    schedules=((_SCHEDULE,),),
    training_files=(r"^extra_state_world_size_\d+_rank_\d+\.pt$",),  # what save_contents calls "extra"
    loads="trainer.resume_mode=resume_path trainer.resume_from_path=DIR/global_step_N, with {target} as its actor/",
    tested="verl 0.9.1",
)


SKYRL = replace(  # the same files, with entries of its own
    VERL,
    name="skyrl",
    title="SkyRL's FSDPStrategy",
    signs=(Signature(VERL.signs[0].files, ("fsdp_strategy", "client_state")),),
    forms=(
        replace(
            _VERL_SHARDED,
            small_files=(("fsdp_config.json", '{\n    "fsdp_strategy": "fsdp2",\n    "world_size": {world_size}\n}'),),
            defaults=(),
            loader_opens=((_SCHEDULE, frozenset({"last_epoch", "_last_lr"})), ("rng", frozenset({"cpu"}))),
            rank_facts=(("rank", "rank"), ("world_size", "world_size")),
        ),
    ),
    rank_files=(),
    side_files=r"^$",
    needed_extras=((_SCHEDULE, "stops: its scheduler is given an empty state"),),
    loads="trainer.resume_path=DIR/global_step_N, with {target} as its policy/ beside trainer_state.pt",
    tested="",
)


# frameworks that can only be read

COMPOSER = Flavor(
    name="composer",
    title="Composer",
    signs=(Signature((r"^\.metadata$", r"^\.\./ep\d+-ba\d+$")), Signature(keys=("state", "rng"))),
)

DEEPSPEED = Flavor(
    tested="deepspeed 0.19",
    name="deepspeed",
    title="DeepSpeed's save_checkpoint",
    signs=(Signature((r"_optim_states\.pt$",)), Signature((r"^latest$", _STEP_DIRECTORY))),
    state=rf"_(optim|model)_states\.pt$|{_OF_DEEPSPEED}|{_STEP_DIRECTORY}",
    exports=(WEIGHTS,),  # what zero_to_fp32.py makes of a step
    exports_beside=_BY_DEEPSPEED,
    model_files="",
    schedules=(_DEEPSPEED_SCHEDULE,),
)

DEEPSPEED_UNIVERSAL = Flavor(
    name="deepspeed-universal",
    title="DeepSpeed's universal checkpoint",
    signs=(Signature((r"^latest_universal$",)), Signature((r"mp_rank_\d+_model_states\.pt$", r"^zero$"))),
    forms=(
        Form(
            Layout.FULL,
            Container.TORCH,
            SectionPath("", ("module",)),
            SectionPath("", ("optimizer",)),
            SectionPath(""),
            key_type="name",
            defaults=(("lr_scheduler", None), ("skipped_steps", 0), ("dp_world_size", 1)),
            schedule=("lr_scheduler", frozenset({"last_epoch", "_last_lr"})),
            counter="global_steps",
            by_parameter=True,
        ),
    ),
    state=rf"{DEEPSPEED.state}|^zero$",
    contained_in=("trainer", "accelerate"),
    model_files="",
    loads='engine.load_checkpoint("{target}"), with "checkpoint": {{"load_universal": true}} in its configuration',
    tested="deepspeed 0.19",
    schedules=(_DEEPSPEED_SCHEDULE,),
)

MEGATRON = Flavor(
    tested="megatron-core 0.12, 0.15, 0.16",
    name="megatron",
    title="Megatron-core's distributed checkpoints",
    signs=(Signature((r"^common\.pt$", r"^\.metadata$")),),
    state=r"^(metadata\.json|common\.pt|\.metadata|.*\.distcp|latest_checkpointed_iteration\.txt)$",
    groups_without_params=True,
)

MEGATRON_TORCH = Flavor(
    name="megatron-torch",
    title="Megatron-LM's --ckpt-format torch, of one or several tensor-parallel ranks",
    signs=(Signature((r"^model_optim_rng\.pt$",)),),
    state=r"^(model_optim_rng|distrib_optim)\.pt$",
    groups_without_params=True,  # with the distributed optimizer
)

NANOTRON = Flavor(
    name="nanotron",
    title="nanotron's checkpoints",
    signs=(),  # its reader knows it by checkpoint_metadata.json and model/
    state=r"^(checkpoint_metadata\.json|model|optimizer)$",
    side_files=r"^(config\.yaml|model_config\.json)$",
    schedules=(),
)

TORCH_CHECKPOINTING = Flavor(
    name="torch_checkpointing",
    title="torch_checkpointing's CheckpointManager",
    signs=(),  # its reader knows it by the content of metadata.pkl
    forms=(
        Form(
            Layout.SHARDED,
            Container.TORCH,
            SectionPath("{rank}", ("model",)),
            SectionPath("{rank}", ("optimizer",)),
            SectionPath("{rank}"),
            by_item=True,
            any_key_type=True,
            keeps_source_keys=True,
        ),
    ),
    state=r"^metadata\.pkl$|_\d+\.(pt|safetensors)$",
    loads='manager.load("{target}", into={{"model": ..., "optimizer": ...}})',
    tested="torch_checkpointing 0.1.1",
)

FLAVORS: tuple[Flavor, ...] = (  # the first with a sign that matches wins
    TRAINER, ACCELERATE, SKYRL, VERL, LIGHTNING_MODEL_PARALLEL, LIGHTNING, FABRIC, COMPOSER, *DCP_LAYOUTS, TORCHTITAN,
    TORCHTITAN_OLD, DEEPSPEED, DEEPSPEED_UNIVERSAL, MEGATRON, TRAINER_WITHOUT_FSDP,
    TORCH_CHECKPOINTING, NANOTRON, MEGATRON_TORCH,
    HUGGINGFACE,
)  # fmt: skip

WRITABLE = (PLAIN, *sorted(flavor.name for flavor in FLAVORS if flavor.forms))

EXPORT_DIRECTORIES = frozenset(name for flavor in FLAVORS for name in flavor.export_directories)
