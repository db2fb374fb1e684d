"""torch_checkpointing itself: ``torchrun -m tests.e2e.flavors.with_torch_checkpointing save|load DIR``.

Its ``CheckpointManager`` makes tensors on "cuda" whatever the devices are (0.1.1): here they are made on the CPU.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.e2e.flavors import small
from tests.e2e.flavors.jobs import work


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return make(*arguments, **options)

    return made


for name in ("tensor", "zeros", "empty", "full", "ones"):
    setattr(torch, name, _on_cpu(getattr(torch, name)))
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]

from torch_checkpointing import CheckpointManager, ItemSpec  # noqa: E402
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization  # noqa: E402
from torch_checkpointing.config import SyncCheckpointSaverConfig  # noqa: E402
from torch_checkpointing.default_resharder import DefaultResharder  # noqa: E402
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # noqa: E402

SAFETENSORS = LayoutInfo("rank_{rank}/weights.safetensors", SafetensorsSerialization())


class Training:
    """A sharded model and its optimizer, whose second group is that of the biases."""

    def __init__(self, seed: int, shape: tuple[int, ...]) -> None:
        names = ("replicate", "shard") if len(shape) > 1 else None
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.model = small.sharded(seed, mesh)
        biases, others = small.biases_and_others(self.model)
        self.optimizer = torch.optim.AdamW([{"params": others}, {"params": biases, "weight_decay": 0.0}], lr=0.02)

    def step(self, number: int) -> None:
        small.loss_of(self.model, number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def items(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def digests(self) -> list[str]:
        """Every value of the model and the optimizer, exactly."""
        found = []
        state = self.optimizer.state_dict()
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for key, states in state["state"].items():
            tensors |= {f"{key}.{name}": tensor for name, tensor in states.items()}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.append(f"{name} {hashlib.sha256(whole.contiguous().view(-1).numpy().tobytes()).hexdigest()[:16]}")
        return [*found, *(f"{group['weight_decay']} {group['params']}" for group in state["param_groups"])]


def _manager(form: str) -> CheckpointManager:
    layout = SAFETENSORS if form == "safetensors" else None
    items = {
        "model": ItemSpec(layout=layout, resharder=DefaultResharder()),
        "optimizer": ItemSpec(resharder=DefaultResharder()),
    }
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(
        CheckpointManager.Config(storage_config=storage, save=SyncCheckpointSaverConfig(), items=items)
    )


def save(directory: str) -> None:
    ranks = dist.get_world_size()
    for form, shape in {"torch": (ranks,), "safetensors": (ranks,), "replicas": (2, ranks // 2)}.items():
        training = Training(11, shape)
        for number in range(3):
            training.step(number)
        manager = _manager(form)
        progress = {"step": 3, "rank_of": [dist.get_rank()]}
        manager.save(os.path.join(directory, form), {**training.items(), **progress})
        dist.barrier()
        digests = training.digests()
        if dist.get_rank() == 0:
            with open(os.path.join(directory, f"{form}.digests"), "w", encoding="utf-8") as file:
                file.write("\n".join(digests))


def load(form: str, path: str) -> list[str]:
    """The digests of what it loads; the items beside the model and the optimizer."""
    ranks = dist.get_world_size()
    training = Training(12, (ranks,))
    training.step(0)  # the optimizer has states that are replaced
    items = training.items()
    loaded = _manager(form).load(path, into={**items, "step": None, "rank_of": None})
    training.model.load_state_dict(items["model"])
    training.optimizer.load_state_dict(items["optimizer"])
    return [*training.digests(), f"{loaded['step']} {loaded['rank_of']}"]


if __name__ == "__main__":
    work(save, load)
