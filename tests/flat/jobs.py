"""Jobs of real FSDP1, one rank after the other: models and optimizers that are trained, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpckpt
from tests.oracle.fake_group import as_rank

RANKS = 3
INIT_SHARDED = "torch.distributed.fsdp._state_dict_utils.init_from_local_shards"
Keys = tuple[str, ...]
Optimizers = dict[str, torch.optim.Optimizer]
Named = dict[str, nn.Parameter]
Values = dict[tuple[Keys, str, str], torch.Tensor]
"""By the keys of a section, the name of a parameter and that of a state, "" for the parameter itself."""

ODD, ALIKE = [(7, 5), (3, 7)], [(7, 5), (7, 5)]


class Block(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.lin = nn.Linear(columns, rows)
        self.norm = nn.LayerNorm(rows)


class Net(nn.Module):
    def __init__(self, shapes: Iterable[tuple[int, int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*shape) for shape in shapes)
        self.head = nn.Linear(3, 2)


def wrapped(model: nn.Module, *, use_orig_params: bool) -> FullyShardedDataParallel:
    policy, device = ModuleWrapPolicy({Block}), torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=device)


def named(model: nn.Module) -> Named:
    return {name.replace("_fsdp_wrapped_module.", ""): each for name, each in model.named_parameters()}


# Optimizers of a model whose parameters have these names


def matrices_and_rest(params: Named) -> Optimizers:
    matrices = [param for name, param in params.items() if "lin.weight" in name]
    rest = [param for name, param in params.items() if "lin.weight" not in name]
    return {"muon": torch.optim.SGD(matrices, lr=0.02, momentum=0.9), "adam": torch.optim.AdamW(rest, lr=0.003)}


def by_module(params: Named) -> Optimizers:
    """The second one lists the root's last, which the model has first."""
    first, second, root = (params[key] for key in ("blocks.0._flat_param", "blocks.1._flat_param", "_flat_param"))
    return {"first": torch.optim.Adam([first], lr=0.01), "second": torch.optim.Adam([second, root], lr=0.002)}


def under(*keys: str) -> Callable[[Callable[[Named], Optimizers]], Callable[[Named], dict[Keys, Any]]]:
    def of(optimizers: Callable[[Named], Optimizers]) -> Callable[[Named], dict[Keys, Any]]:
        return lambda params: {(*keys, key): each for key, each in optimizers(params).items()}

    return of


def train(optimizer: torch.optim.Optimizer, rank: int, *, padded: bool) -> None:
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.randn_like(param) if param.numel() else None
        if padded and param.grad is not None:  # padding has no gradient
            param.grad[max(0, sum(param._numels) - rank * param.numel()) :] = 0
    optimizer.step()


@dataclass(frozen=True)
class Job:
    """``models``: the layers of each, by its keys. ``optimizers``: of each model, with their keys."""

    models: Mapping[Keys, Sequence[tuple[int, int]]]
    optimizers: Mapping[Keys, Callable[[Named], dict[Keys, torch.optim.Optimizer]]]
    use_orig_params: bool
    frozen: tuple[str, ...] = ()

    def run(self, ranks: int, load: Path | None = None, save: Path | None = None, units: Path | None = None) -> Values:
        """The whole values of a job of ``ranks`` that has loaded or trained them, put together as torch's own metadata
        says. ``units``: where rank 0 saves the units: without an optimizer, with all, and with each.
        """
        held: list[Values] = []
        flats: dict[tuple[Keys, str], Any] = {}
        for rank in range(ranks):
            held.append({})
            for values, flat in self._values(rank, ranks, load, save, units):
                held[rank] |= values
                sections = {path for path, _, _ in values}
                flats |= {(path, name): each for path in sections for name, each in flat.items()}
        whole: Values = {}
        for path, name, state in dict.fromkeys(key for of_rank in held for key in of_rank):
            parts = [of_rank[path, name, state] for of_rank in held if (path, name, state) in of_rank]
            for fqn, value in _apart(name, parts, flats.get((path, name))).items():
                whole[path, fqn, state] = value
        return whole

    def _values(
        self, rank: int, ranks: int, load: Path | None, save: Path | None, units: Path | None
    ) -> Iterator[tuple[Values, Any]]:
        """What a rank holds of each model and its optimizers, and its flat parameters."""
        content: dict[str, Any] = {}
        with as_rank(rank, ranks):
            for path, layers in self.models.items():
                torch.manual_seed(5)
                net = Net(layers)
                for name, param in net.named_parameters():
                    param.requires_grad_(name not in self.frozen)
                model = wrapped(net, use_orig_params=self.use_orig_params)
                params = named(model)
                optimizers = self.optimizers[path]({name: each for name, each in params.items() if each.requires_grad})
                torch.manual_seed(100 * ranks + rank)
                for optimizer in optimizers.values():
                    train(optimizer, rank, padded=not self.use_orig_params)
                local = FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
                with mock.patch(INIT_SHARDED, partial(_sharded, ranks)), local:
                    if load is not None:
                        keys = model.load_state_dict(written(load, rank, ranks, path), strict=not self.use_orig_params)
                        assert not keys.missing_keys
                        assert all(key.endswith("_flat_param") for key in keys.unexpected_keys)
                    for key, optimizer in optimizers.items() if load is not None else ():
                        optimizer.load_state_dict(written(load, rank, ranks, key))
                    put(content, path, model.state_dict())
                for key, optimizer in optimizers.items():
                    put(content, key, optimizer.state_dict())
                if units is not None and rank == 0:
                    by_key = {key[-1]: optimizer for key, optimizer in optimizers.items()}
                    for name, of in {"units": None, "all": by_key, **by_key}.items():
                        fsdpckpt.save_units(model, of, units / f"{name}.json")
                values = {(path, name, ""): each.detach().clone() for name, each in params.items()}
                values |= {
                    (key, name, state): value
                    for key, optimizer in optimizers.items()
                    for name, each in params.items()
                    for state, value in optimizer.state.get(each, {}).items()
                }
                yield values, {} if self.use_orig_params else params
            if save is not None:
                torch.save(content, save / f"state_world_size_{ranks}_rank_{rank}.pt")


def _apart(name: str, parts: list[torch.Tensor], flat: Any) -> dict[str, torch.Tensor]:
    """The parameter or state in ``parts``, one on each rank, cut as the metadata of its flat parameter says."""
    prefix = name.removesuffix("_flat_param")
    fqns = [name] if flat is None else [f"{prefix}{fqn}" for fqn in flat._fqns]
    if parts[0].ndim == 0:
        return {fqn: parts[0].reshape(-1) for fqn in fqns}
    whole = torch.cat(parts)
    if flat is None:
        return {name: whole}
    return dict(zip(fqns, whole[: sum(flat._numels)].split(list(flat._numels)), strict=True))


def _sharded(ranks: int, shards: list[Shard], total: int, **_: Any) -> ShardedTensor:
    """What ``init_from_local_shards`` makes, without asking the other ranks."""
    length = -(-total // ranks)
    metadata = [
        ShardMetadata([begin], [min(length, total - begin)], f"rank:{rank}/cpu")
        for rank, begin in enumerate(range(0, total, length))
    ]
    needs_grad = any(shard.tensor.requires_grad for shard in shards)
    properties = TensorProperties(dtype=torch.float32, requires_grad=needs_grad)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, ShardedTensorMetadata(metadata, torch.Size([total]), properties)
    )


def put(content: dict[str, Any], path: Keys, value: Any) -> None:
    for key in path[:-1]:
        content = content.setdefault(key, {})
    content[path[-1]] = value


def written(folder: Path, rank: int, ranks: int, path: Keys) -> Any:
    """The section at ``path`` in the plain files of ``rank``."""
    if not dist.is_initialized():
        with as_rank(rank, ranks):
            return written(folder, rank, ranks, path)
    name = f"{{}}_world_size_{ranks}_rank_{rank}.pt"
    if path == ("model",):
        return torch.load(folder / name.format("model"), weights_only=False)
    if path == ("optimizer",) and (folder / name.format("optim")).exists():
        return torch.load(folder / name.format("optim"), weights_only=False)
    value = torch.load(folder / name.format("extra_state"), weights_only=False)
    for key in path:
        value = value[key]
    return value


def save(
    folder: Path,
    shapes: Sequence[tuple[int, int]],
    optimizers_of: Callable[[Named], Optimizers],
    *,
    use_orig_params: bool,
    frozen: tuple[str, ...] = (),
) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """Save a job of one model in ``folder``, with its units, and units with each of its optimizers, and all, beside it.
    Returns all states: optimizer, parameter, state.
    """
    folder.mkdir()
    job = Job({("model",): shapes}, {("model",): under("optimizers")(optimizers_of)}, use_orig_params, frozen)
    values = job.run(RANKS, save=folder, units=folder.parent)
    (folder.parent / "units.json").rename(folder / "units.json")
    sizes = {name: param.shape for name, param in Net(shapes).named_parameters()}
    states: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for (keys, name, state), value in values.items():
        if state:
            shaped = value.view(sizes[name]) if state != "step" else value.view(())
            states.setdefault(keys[-1], {}).setdefault(name, {})[state] = shaped
    return states
