"""The layouts of frameworks that cannot run here: ``torchrun -m tests.e2e.flavors.with_layouts save|load DIR``.

For each framework the calls of its own saving and loading code (``docs/frameworks.md`` has the commits), in its order,
with PyTorch's, transformers' and safetensors' functions. All save the same training, so all must continue alike.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from tests.e2e.flavors import small
from tests.e2e.flavors.jobs import step, work

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
STEPS = 3


@dataclass
class Progress:
    """What prime-rl counts."""

    step: int = 1
    total_tokens: int = 0
    total_samples: int = 0


class Training:
    """A sharded model, its optimizer with two groups, its schedule, and what the trainers count."""

    def __init__(self, seed: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        self.model = small.sharded(seed, mesh)
        biases, others = small.biases_and_others(self.model)
        groups = [{"params": others, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.85, 0.97), foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.75**step)
        self.progress = Progress()

    def step(self, number: int) -> str:
        self.progress.step += 1
        return step(small.loss_of(self.model, number), self.optimizer, self.scheduler)


class VeOmni:
    """``DistributedCheckpointer`` and ``CheckpointerCallback``."""

    def save(self, path: str, training: Training) -> None:
        os.makedirs(os.path.join(path, "extra_state"), exist_ok=True)
        extra = {
            "global_step": STEPS, "lr_scheduler": training.scheduler.state_dict(), "train_dataloader": {},
            "environ_meter": {}, "channel_loss_callback": {}, "torch_rng_state": torch.get_rng_state(),
        }  # fmt: skip
        torch.save(extra, self.extra_of(path))
        writer = dcp.FileSystemWriter(path, thread_count=2, single_file_per_rank=True, sync_files=False)
        state = {"model": get_model_state_dict(training.model), "optimizer": self.optimizer(training)}
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=False))

    def load(self, path: str, training: Training) -> None:
        state = {"model": get_model_state_dict(training.model), "optimizer": self.optimizer(training)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=DefaultLoadPlanner(allow_partial_load=True))
        set_model_state_dict(training.model, state["model"])
        self.set_optimizer(training, state["optimizer"])
        extra = torch.load(self.extra_of(path), weights_only=False)
        training.scheduler.load_state_dict(extra["lr_scheduler"])
        torch.set_rng_state(extra["torch_rng_state"])
        training.progress.step = extra["global_step"] + 1

    def extra_of(self, path: str) -> str:
        return os.path.join(path, "extra_state", f"extra_state_rank_{dist.get_rank()}.pt")

    def optimizer(self, training: Training) -> Any:
        return get_optimizer_state_dict(training.model, training.optimizer)

    def set_optimizer(self, training: Training, state: Any) -> None:
        set_optimizer_state_dict(training.model, training.optimizer, state, options=StateDictOptions(strict=False))


class VeOmniExperts(VeOmni):
    """With expert parallelism (``MultiOptimizer``): the optimizer's keys are flattened."""

    def optimizer(self, training: Training) -> Any:
        return get_optimizer_state_dict(training.model, training.optimizer, options=FLAT)

    def set_optimizer(self, training: Training, state: Any) -> None:
        set_optimizer_state_dict(training.model, training.optimizer, state, options=FLAT)


class OlmoCore:
    """``Checkpointer`` and ``TransformerTrainModule``."""

    def save(self, path: str, training: Training) -> None:
        os.makedirs(os.path.join(path, "train"), exist_ok=True)
        state = {
            "global_step": STEPS, "global_train_tokens_seen": 71, "global_train_petaflops": 0.0, "max_steps": 9,
            "data_loader": {"epoch": 1}, "epoch": 1, "world_size": dist.get_world_size(),
            "rng": {"cpu": torch.get_rng_state()}, "callbacks": {},
        }  # fmt: skip
        torch.save(state, os.path.join(path, "train", f"rank{dist.get_rank()}.pt"))
        content = self.content(training)
        writer = dcp.FileSystemWriter(os.path.join(path, "model_and_optim"), thread_count=2, single_file_per_rank=False)
        dcp.save(content, storage_writer=writer, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
        if dist.get_rank() == 0:
            with open(os.path.join(path, ".metadata.json"), "w") as file:
                json.dump({"ephemeral": False, "version": "3.0.0"}, file)

    def load(self, path: str, training: Training) -> None:
        for name in ("train/rank0.pt", "model_and_optim/.metadata", ".metadata.json"):  # dir_is_checkpoint
            if not os.path.isfile(os.path.join(path, name)):
                raise FileNotFoundError(name)
        for rank in (dist.get_rank(), 0):
            if os.path.exists(file := os.path.join(path, "train", f"rank{rank}.pt")):
                state = torch.load(file, weights_only=False)
                break
        content = self.content(training)
        dcp.load(content, checkpoint_id=os.path.join(path, "model_and_optim"))
        set_model_state_dict(training.model, content["model"])
        set_optimizer_state_dict(training.model, training.optimizer, content["optim"], options=FLAT)
        training.progress.step = state["global_step"] + 1
        resume(training)  # its schedules are functions of the step

    def content(self, training: Training) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
        model = get_model_state_dict(training.model, options=options)
        return {"model": model, "optim": get_optimizer_state_dict(training.model, training.optimizer, options=options)}


class PrimeRl:
    """``CheckpointManager`` and ``AppState``."""

    def save(self, path: str, training: Training) -> None:
        os.makedirs(os.path.join(path, "dataloader"), exist_ok=True)
        torch.save({"rank": dist.get_rank()}, os.path.join(path, "dataloader", f"rank_{dist.get_rank()}.pt"))
        dcp.save(self.content(training), checkpoint_id=path)

    def load(self, path: str, training: Training) -> None:
        content = self.content(training)
        dcp.load(content, checkpoint_id=path)
        app = content["app"]
        set_state_dict(
            training.model, [training.optimizer], model_state_dict=app["model"], optim_state_dict=app["optimizers"]
        )
        training.scheduler.load_state_dict(app["scheduler"])
        for key, value in app["progress"].items():
            setattr(training.progress, key, value)
        if os.path.isdir(os.path.join(path, "dataloader")):  # of supervised training
            torch.load(os.path.join(path, "dataloader", f"rank_{dist.get_rank()}.pt"))

    def content(self, training: Training) -> dict[str, Any]:
        model, optimizers = get_state_dict(training.model, [training.optimizer])
        own = {"scheduler": training.scheduler.state_dict(), "progress": asdict(training.progress)}
        return {"app": {"model": model, "optimizers": optimizers, **own}}


class SkyRl:
    """``FSDPStrategy.save_checkpoint`` of the policy."""

    def save(self, path: str, training: Training) -> None:
        os.makedirs(os.path.join(path, "huggingface"), exist_ok=True)
        model, optim, extra = self.files(path)
        torch.save(training.model.state_dict(), model)
        torch.save(training.optimizer.state_dict(), optim)
        content = {
            "lr_scheduler": training.scheduler.state_dict(), "client_state": {}, "tag": None, "fsdp_strategy": "fsdp2",
            "world_size": dist.get_world_size(), "rank": dist.get_rank(), "rng": {"cpu": torch.get_rng_state()},
        }  # fmt: skip
        torch.save(content, extra)
        if dist.get_rank() == 0:
            with open(os.path.join(path, "fsdp_config.json"), "w") as file:
                json.dump({"fsdp_strategy": "fsdp2", "world_size": dist.get_world_size()}, file, indent=4)
            torch.save({"global_step": STEPS, "config": {}}, os.path.join(os.path.dirname(path), "trainer_state.pt"))
            torch.save({"samples": 5}, os.path.join(os.path.dirname(path), "data.pt"))

    def load(self, path: str, training: Training) -> None:
        model, optim, extra = self.files(path)
        training.model.load_state_dict(torch.load(model, map_location="cpu", weights_only=False), strict=True)
        content = torch.load(extra, map_location="cpu", weights_only=False)
        training.optimizer.load_state_dict(torch.load(optim, map_location="cpu", weights_only=False))
        training.scheduler.load_state_dict(content["lr_scheduler"])
        training.progress.step = STEPS + 1  # that of the directory's name

    def files(self, path: str) -> list[str]:
        end = f"_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
        return [os.path.join(path, stem + end) for stem in ("model", "optim", "extra_state")]


class NemoRl:
    """``native_checkpoint.save_checkpoint``: policy/weights and policy/optimizer."""

    def save(self, path: str, training: Training) -> None:
        dcp.save({"model": self.model(training)}, checkpoint_id=os.path.join(path, "weights"))
        dcp.save({"optim": self.optimizer(training)}, checkpoint_id=os.path.join(path, "optimizer"))

    def load(self, path: str, training: Training) -> None:
        weights, states = {"model": self.model(training)}, {"optim": self.optimizer(training)}
        dcp.load(weights, checkpoint_id=os.path.join(path, "weights"))
        dcp.load(states, checkpoint_id=os.path.join(path, "optimizer"))
        set_model_state_dict(training.model, weights["model"])
        set_optimizer_state_dict(training.model, training.optimizer, states["optim"]["optim"])
        training.scheduler.load_state_dict(states["optim"]["sched"])
        training.progress.step = STEPS + 1  # that of training_info.json

    def model(self, training: Training) -> Any:
        return get_model_state_dict(training.model, options=StateDictOptions(cpu_offload=True))

    def optimizer(self, training: Training) -> dict[str, Any]:
        options = StateDictOptions(cpu_offload=True)
        optim = get_optimizer_state_dict(training.model, training.optimizer, options=options)
        return {"optim": optim, "sched": training.scheduler.state_dict()}


class Automodel:
    """``Checkpointer`` and ``BaseRecipe.save_checkpoint``: model/ and optim/. The writer is a copy of PyTorch's."""

    def save(self, path: str, training: Training) -> None:
        rank = dist.get_rank()
        for folder in ("model/.hf_metadata", "rng", "dataloader"):
            os.makedirs(os.path.join(path, folder), exist_ok=True)
        torch.save({"torch": torch.get_rng_state()}, os.path.join(path, "rng", f"rng_global_rank_{rank}.pt"))
        torch.save({"dp_rank": rank}, os.path.join(path, "dataloader", f"dataloader_dp_rank_{rank}.pt"))
        if rank == 0:
            torch.save({"step": STEPS, "epoch": 0}, os.path.join(path, "step_scheduler.pt"))
            for name in ("config.yaml", "losses.json", "model/.hf_metadata/config.json"):
                with open(os.path.join(path, name), "w") as file:
                    file.write("{}")
        self.save_model(os.path.join(path, "model"), training)
        dcp.save(self.states(training), checkpoint_id=os.path.join(path, "optim"))

    def load(self, path: str, training: Training) -> None:
        self.load_model(os.path.join(path, "model"), training)
        states = self.states(training)
        dcp.load(states, checkpoint_id=os.path.join(path, "optim"))
        set_optimizer_state_dict(training.model, training.optimizer, states["optim"], options=FLAT)
        training.scheduler.load_state_dict(states["sched"])
        rank = dist.get_rank()
        torch.load(os.path.join(path, "rng", f"rng_global_rank_{rank}.pt"))
        torch.load(os.path.join(path, "dataloader", f"dataloader_dp_rank_{rank}.pt"))
        training.progress.step = torch.load(os.path.join(path, "step_scheduler.pt"))["step"] + 1

    def states(self, training: Training) -> dict[str, Any]:
        optim = get_optimizer_state_dict(training.model, training.optimizer, options=FLAT)
        return {"optim": optim, "sched": training.scheduler.state_dict()}

    def save_model(self, path: str, training: Training) -> None:
        writer = HuggingFaceStorageWriter(path=path, save_distributed=True)
        dcp.save(get_model_state_dict(training.model), storage_writer=writer)

    def load_model(self, path: str, training: Training) -> None:
        weights = get_model_state_dict(training.model)
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(path))
        set_model_state_dict(training.model, weights)


class AutomodelTorch(Automodel):
    """``model_save_format: torch_save``: the model in a DCP directory, its names at the top."""

    def save_model(self, path: str, training: Training) -> None:
        dcp.save(get_model_state_dict(training.model), checkpoint_id=path)

    def load_model(self, path: str, training: Training) -> None:
        weights = get_model_state_dict(training.model)
        dcp.load(weights, checkpoint_id=path)
        set_model_state_dict(training.model, weights)


class NemoRlV2:
    """``AutomodelCheckpointManager``: Automodel's files in policy/weights and policy/optimizer."""

    def __init__(self) -> None:
        self.automodel = Automodel()

    def save(self, path: str, training: Training) -> None:
        os.makedirs(os.path.join(path, "tokenizer"), exist_ok=True)
        os.makedirs(os.path.join(path, "weights", "model", ".hf_metadata"), exist_ok=True)
        if dist.get_rank() == 0:
            for name in ("tokenizer/tokenizer_config.json", "weights/model/.hf_metadata/config.json"):
                with open(os.path.join(path, name), "w") as file:
                    file.write("{}")
        self.automodel.save_model(os.path.join(path, "weights", "model"), training)
        states = self.automodel.states(training)
        dcp.save(states, checkpoint_id=os.path.join(path, "optimizer", "optim"))

    def load(self, path: str, training: Training) -> None:
        self.automodel.load_model(os.path.join(path, "weights", "model"), training)
        states = self.automodel.states(training)
        dcp.load(states, checkpoint_id=os.path.join(path, "optimizer", "optim"))
        set_optimizer_state_dict(training.model, training.optimizer, states["optim"], options=FLAT)
        training.scheduler.load_state_dict(states["sched"])
        training.progress.step = STEPS + 1  # that of training_info.json


class Torchtune:
    """``CheckpointClient`` and ``DistributedCheckpointer``: the optimizer by id."""

    def save(self, path: str, training: Training) -> None:
        own = self.own(training)
        content = {**own, "model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        writer = dcp.FileSystemWriter(path, thread_count=2, single_file_per_rank=False, sync_files=False)
        dcp.save(content, storage_writer=writer)
        torch.save(own, os.path.join(path, "recipe_state.pt"))

    def load(self, path: str, training: Training) -> None:
        _init_optim_state(training.optimizer)
        model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
        content = {"model": model, "optimizer": optimizer, "seed": 0, "epochs_run": 0, "steps_run": 0}
        reader, planner = dcp.FileSystemReader(path), DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(content, storage_reader=reader, planner=planner)
        training.model.load_state_dict(content["model"])
        training.optimizer.load_state_dict(content["optimizer"])
        training.progress.step = content["steps_run"] + 1
        training.scheduler.last_epoch = STEPS

    def own(self, training: Training) -> dict[str, Any]:
        return {
            "seed": 5, "epochs_run": 1, "total_epochs": 3, "max_steps_per_epoch": -1, "steps_run": STEPS,
            "total_training_steps": 9, "dataloader": {"rank": 0}, "val_dataloader": None,
        }  # fmt: skip


class Slime:
    """``fsdp_utils.checkpoint``, a directory for each of model, optimizer and schedule."""

    def save(self, path: str, training: Training) -> None:
        model, optim, schedule = self.content(training)
        dcp.save(model, checkpoint_id=os.path.join(path, "model"))
        dcp.save(optim, checkpoint_id=os.path.join(path, "optimizer"))
        dcp.save(schedule, checkpoint_id=os.path.join(path, "lr_scheduler"))
        if dist.get_rank() == 0:
            torch.save({"torch": torch.get_rng_state()}, os.path.join(path, "rng.pt"))
            with open(os.path.join(path, "meta.json"), "w") as file:
                json.dump({"iteration": STEPS, "global_step": STEPS, "world_size": dist.get_world_size()}, file)

    def load(self, path: str, training: Training) -> None:
        model, optim, schedule = self.content(training)
        dcp.load(model, checkpoint_id=os.path.join(path, "model"))
        dcp.load(optim, checkpoint_id=os.path.join(path, "optimizer"))
        dcp.load(schedule, checkpoint_id=os.path.join(path, "lr_scheduler"))
        set_model_state_dict(training.model, model["model_state"]["model"])
        set_optimizer_state_dict(training.model, training.optimizer, optim["optim_state"]["optim"])
        training.scheduler.load_state_dict(schedule["lr_scheduler_state"]["lr_scheduler"])
        with open(os.path.join(path, "meta.json")) as file:
            training.progress.step = json.load(file)["global_step"] + 1

    def content(self, training: Training) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        model, optimizer = get_state_dict(training.model, training.optimizer)
        schedule = {"lr_scheduler_state": {"lr_scheduler": training.scheduler.state_dict()}}
        return {"model_state": {"model": model}}, {"optim_state": {"optim": optimizer}}, schedule


class LlamaFactory:
    """``TrainingCheckpointCoordinator`` with FSDP2: the sections at the top of a directory each."""

    def save(self, path: str, training: Training) -> None:
        rank = dist.get_rank()
        for folder in ("dataloader", "rng_state"):
            os.makedirs(os.path.join(path, folder), exist_ok=True)
        model, optimizer = self.content(training)
        dcp.save(model, checkpoint_id=os.path.join(path, "model"))
        dcp.save(optimizer, checkpoint_id=os.path.join(path, "optimizer"))
        torch.save({"rank": rank}, os.path.join(path, "dataloader", f"rank_{rank}.pt"))
        torch.save({"torch": torch.random.get_rng_state()}, os.path.join(path, "rng_state", f"rank_{rank}.pt"))
        if rank == 0:
            torch.save(training.scheduler.state_dict(), os.path.join(path, "scheduler.pt"))
            with open(os.path.join(path, "metadata.json"), "w") as file:
                json.dump({"global_step": STEPS, "epoch": 0, "num_training_steps": 9}, file)
            with open(os.path.join(path, "CHECKPOINT_COMPLETE"), "w"):
                pass

    def load(self, path: str, training: Training) -> None:
        if not os.path.exists(os.path.join(path, "CHECKPOINT_COMPLETE")):  # find_latest_checkpoint
            raise FileNotFoundError(path)
        with open(os.path.join(path, "metadata.json")) as file:
            training.progress.step = json.load(file)["global_step"] + 1
        model, optimizer = self.content(training)
        dcp.load(model, checkpoint_id=os.path.join(path, "model"))
        set_model_state_dict(training.model, model)
        dcp.load(optimizer, checkpoint_id=os.path.join(path, "optimizer"))
        set_optimizer_state_dict(training.model, training.optimizer, optimizer)
        training.scheduler.load_state_dict(torch.load(os.path.join(path, "scheduler.pt"), weights_only=True))
        for folder in ("dataloader", "rng_state"):
            torch.load(os.path.join(path, folder, f"rank_{dist.get_rank()}.pt"), weights_only=False)

    def content(self, training: Training) -> tuple[Any, Any]:
        options = StateDictOptions(full_state_dict=False, cpu_offload=True)
        model = get_model_state_dict(training.model, options=options)
        return model, get_optimizer_state_dict(training.model, training.optimizer, options=options)


class Transformers:
    """``transformers.distributed``: safetensors of each rank, and the optimizer's DCP directory beside them."""

    def save(self, path: str, training: Training) -> None:
        from transformers.distributed.checkpoint import _save_model_checkpoint_distributed, save_optimizer_distributed

        os.makedirs(path, exist_ok=True)
        _save_model_checkpoint_distributed(training.model, path)
        save_optimizer_distributed(training.model, training.optimizer, os.path.join(path, "optimizer"))
        if dist.get_rank() == 0:
            with open(os.path.join(path, "config.json"), "w") as file:
                json.dump({"model_type": "small"}, file)

    def load(self, path: str, training: Training) -> None:
        from transformers.distributed.checkpoint import (
            _load_model_checkpoint_distributed,
            is_sharded_checkpoint,
            load_optimizer_distributed,
        )

        if not is_sharded_checkpoint(path):
            raise FileNotFoundError("shards")
        _load_model_checkpoint_distributed(training.model, path)
        load_optimizer_distributed(training.model, training.optimizer, os.path.join(path, "optimizer"))
        training.progress.step = STEPS + 1
        training.scheduler.last_epoch = STEPS


FRAMEWORKS: dict[str, Any] = {
    "transformers": Transformers(), "veomni": VeOmni(), "veomni-experts": VeOmniExperts(), "olmo-core": OlmoCore(),
    "prime-rl": PrimeRl(), "skyrl": SkyRl(), "nemo-rl": NemoRl(), "nemo-rl-v2": NemoRlV2(), "automodel": Automodel(),
    "automodel-torch": AutomodelTorch(), "torchtune": Torchtune(), "slime": Slime(), "llamafactory": LlamaFactory(),
}  # fmt: skip
PLACES = {
    "transformers": "step3", "veomni": "global_step_3", "veomni-experts": "global_step_3", "olmo-core": "step3",
    "prime-rl": "step_3/trainer", "skyrl": "global_step_3/policy", "nemo-rl": "step_3/policy",
    "nemo-rl-v2": "step_3/policy",
    "automodel": "epoch_0_step_3", "automodel-torch": "epoch_0_step_3", "torchtune": "epoch_1", "slime": "iter_0000003",
    "llamafactory": "checkpoint-3",
}  # fmt: skip


def resume(training: Training) -> None:
    training.scheduler.last_epoch = STEPS
    for group in training.optimizer.param_groups:
        group["lr"] = 0.02 * 0.75**STEPS


def save(directory: str) -> None:
    training = Training(seed=3)
    for number in range(STEPS):
        training.step(number)
    for name, framework in FRAMEWORKS.items():
        path = os.path.join(directory, name, PLACES[name])
        os.makedirs(path, exist_ok=True)
        dist.barrier()
        framework.save(path, training)
        dist.barrier()


def losses(form: str, path: str) -> list[str]:
    """Load ``path`` over other weights; the losses of the next two steps, the rate, and the step."""
    training = Training(seed=99)
    training.step(50)
    FRAMEWORKS[form].load(path, training)
    rate, step = training.optimizer.param_groups[0]["lr"].hex(), str(training.progress.step)
    return [training.step(60), training.step(61), rate, step]


if __name__ == "__main__":
    work(save, losses)
