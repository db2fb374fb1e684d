"""One torch file, every tensor whole: ``{"model": ..., "optimizer": ..., <extras>}``, or one section's dict itself."""

from __future__ import annotations

import posixpath
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from fsdpckpt.formats.pickle.write import dumps
from fsdpckpt.formats.zip import TorchZip
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note, OptimState, stored_entry
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, leaf_tensors
from fsdpckpt.producers.forms import PLAIN_NESTING, Nesting, Step
from fsdpckpt.writers.dtype_rule import DtypeRule
from fsdpckpt.writers.extras import extras_of_one
from fsdpckpt.writers.storages import Storages, sharing

__all__ = ["lay_out", "lay_out_file", "model_dict", "optim_dict"]


def lay_out(
    checkpoint: Checkpoint, *, dtypes: DtypeRule, path: str = "", bare: bool = False, nesting: Nesting = PLAIN_NESTING
) -> Target:
    """One file at ``path`` (relative to the target; "" when the target itself is the file).

    With ``bare`` a checkpoint of one section and no extras becomes that section's dict itself. Tensors that share
    memory in the source's model section or extras share it in the target (see ``writers.storages``).
    """
    casts, notes = dtypes.casts(checkpoint)
    extra, dropped = extras_of_one(checkpoint)
    sections: list[tuple[tuple[Step, ...], Value]] = []
    if checkpoint.model is not None:
        sections.append((nesting.model, model_dict(checkpoint.model)))
    if checkpoint.optim is not None:
        sections.append((nesting.optim, optim_dict(checkpoint.optim)))
    if len(sections) == 1 and not extra and (bare or not sections[0][0]):
        value = sections[0][1]
    else:
        value = nested([*sections, ((), extra)])
    file = TargetFile(path)
    notes += dropped + lay_out_file(file, value, casts=casts, sharers=_sharers(checkpoint, extra))
    return Target([file], notes=notes)


def nested(sections: Sequence[tuple[tuple[Step, ...], Value]]) -> Value:
    """One dict of ``sections``, each below its path; a position in a path makes a list of the one section."""
    root: dict[Key, Value] = {}
    for path, section in sections:
        if not path:
            root.update(section if isinstance(section, dict) else {})
            continue
        value = section
        for step in reversed(path[1:]):
            value = {step: value} if isinstance(step, str) else [value]
        root[path[0]] = value
    return root


def model_dict(model: ModelState) -> dict[Key, Value]:
    """The state dict ``nn.Module.load_state_dict`` takes, ``_metadata`` attached when the source had it."""
    if model.metadata is None:
        return model.params  # type: ignore[return-value]  # a dict of str is one of Key
    params: OrderedDict[Key, Value] = OrderedDict(model.params)
    vars(params)["_metadata"] = model.metadata
    return params


def optim_dict(optim: OptimState) -> dict[Key, Value]:
    """The dict ``Optimizer.load_state_dict`` takes, and what users added to it."""
    state = {key: stored_entry(states) for key, states in optim.state.items()}
    root: dict[Key, Value] = {"state": state}  # type: ignore[dict-item]
    if optim.param_groups is not None:
        root["param_groups"] = optim.param_groups  # type: ignore[assignment]
    return {**root, **optim.extra}


def _sharers(checkpoint: Checkpoint, extra: dict[Key, Value]) -> list[Tensor]:
    tensors = [tensor for _, tensor in leaf_tensors(extra)]
    if checkpoint.model is not None:
        tensors += [tensor for tensor in checkpoint.model.params.values() if isinstance(tensor, Tensor)]
    return tensors


def lay_out_file(
    file: TargetFile, value: Value, *, casts: Mapping[Tensor, DType], sharers: list[Tensor], stem: str | None = None
) -> list[Note]:
    """Append one ``torch.save`` archive of ``value`` to ``file``; tensors among ``sharers`` may share records."""
    shared, notes = sharing(sharers, casts)
    storages = Storages(casts, shared)
    if stem is None:
        stem = posixpath.splitext(posixpath.basename(file.path))[0] or "archive"
    archive = TorchZip(file, stem=stem)
    archive.pickle(dumps(value, storages))
    storages.write(archive, file)
    archive.finish()
    return notes
