"""Lays out a DeepSpeed universal checkpoint: one torch file for each weight and each state, all of them whole.

``engine.load_checkpoint`` with ``"load_universal": true`` opens, in the step that ``latest_universal`` names,
``mp_rank_00_model_states.pt`` (ZeRO 3: ``zero_pp_rank_0_mp_rank_00_model_states.pt``), ``zero/optimizer_state.pt``, and
for every parameter that it trains ``zero/<parameter>/``: every file of it, ZeRO 3 those of Adam. Each rank cuts its
part from the whole tensor (``load_hp_checkpoint_state`` of ``deepspeed/checkpoint/universal_checkpoint.py`` and
``deepspeed/runtime/zero/stage3.py``). It takes neither buffers nor frozen parameters from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.counters import STEP
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.targets import Target, TargetData, TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Global, Key, Object, Value
from fsdpckpt.producers.recognition import flavor_named
from fsdpckpt.text import plural, some_of, truncate
from fsdpckpt.writers.protocol import WriteSpec
from fsdpckpt.writers.state_dicts import extras_of_one
from fsdpckpt.writers.torch_full import lay_out_file, memory_order_of, ties

_VERSION = "0.19.8"  # of the DeepSpeed whose files these are
_WEIGHT = "fp32"
_TENSOR = 2  # the column of an item that says which tensor it is
_STEPS = "global_steps"
_OPTIMIZER_FILE = "optimizer_state.pt"
_OPTIMIZER_KEYS = ("dynamic_loss_scale", "overflow", "clip_grad")  # what its loader takes from optimizer_state.pt, and:
_SCALER = "loss_scaler"
_ADAM = frozenset({STEP, "exp_avg", "exp_avg_sq"})  # the states that ZeRO 3 loads
_DEEPSPEED_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "mp_world_size",
})  # fmt: skip
_MAX_NAME_BYTES = 255
_MAX_STEP_BITS = 63
_LISTED = 4  # names in an error


def lay_out(checkpoint: Checkpoint, spec: WriteSpec) -> Target:
    """``global_step<N>_universal/`` and ``latest_universal``, where N is the extra ``global_steps``; for accelerate's
    checkpoints ``pytorch_model/``.

    Without an optimizer all of the model is written as weights. Raises SourceUnsupportedError for states that DeepSpeed
    cannot cut and names that cannot be file names, NeedsInformationError for parameters without states.
    """
    casts, notes = spec.dtypes.casts(checkpoint)
    extra, dropped = extras_of_one(checkpoint)
    groups = _groups(checkpoint)
    params = checkpoint.params
    weights = _weights(params, groups, checkpoint)
    source = flavor_named(checkpoint.flavor)
    of_flavor = source.universal_directory if source is not None else ""
    directory = of_flavor or _directory(extra.get(_STEPS), checkpoint)
    first_of_tie = ties([*weights.values(), *(leaf for leaf in params.values() if isinstance(leaf, Tensor))])
    name_of = {tensor: name for name, tensor in weights.items()}
    shared: dict[Key, Value] = {}
    for name, leaf in params.items():
        if name not in weights and isinstance(leaf, Tensor):
            first = first_of_tie.get(leaf, leaf)
            if first in name_of:
                shared[name] = name_of[first]
    files = _module_states(directory, params, weights, shared, groups, extra, casts)
    templates: dict[tuple[object, ...], TargetFile] = {}
    for name, tensor in weights.items():
        states = checkpoint.optim.state[name] if checkpoint.optim is not None else {}
        for state, leaf in {_WEIGHT: tensor, **states}.items():
            path = f"{directory}/zero/{name}/{state}.pt"
            if isinstance(leaf, Tensor):
                files.append(_file_of(leaf, state, TargetFile(path, files[0].data), casts, templates))
            else:
                _add(files, path, leaf if state == STEP else {"param": leaf, "cat_dim": 0}, casts)
    if checkpoint.optim is not None:
        _add(files, f"{directory}/zero/{_OPTIMIZER_FILE}", _optimizer_state(checkpoint.optim, groups, extra), casts)
        notes += _notes_on_groups(checkpoint.optim)
    latest = TargetFile("latest_universal")
    latest.add_literal(directory.encode())
    left_out = tuple(str(key) for key in extra if key in _DEEPSPEED_KEYS and key != "mp_world_size")
    if left_out:
        message = f"left out, because DeepSpeed keeps something else under that name: {', '.join(left_out)}"
        notes.append(Note("dropped", message, keys=left_out))
    return Target([*files, latest], [*notes, *dropped])


def _directory(step: Value, checkpoint: Checkpoint) -> str:
    number = step if isinstance(step, int) and type(step) is int else 0
    if number.bit_length() > _MAX_STEP_BITS:
        raise SourceUnsupportedError(
            f"{checkpoint.source} was saved at an impossible step",
            key=_STEPS,
            expected=f"a number below 2^{_MAX_STEP_BITS}",
            found=truncate(number),
            why=f"a universal checkpoint's directory is named global_step<N>_universal: N is the extra {_STEPS}, or "
            "without it the optimizer's step",
            next_step="see the steps with fsdpckpt inspect, and save the checkpoint again with the right one",
        )
    return f"global_step{number}_universal"


def _add(files: list[TargetFile], path: str, value: Value, casts: Mapping[Tensor, DType]) -> None:
    files.append(TargetFile(path, files[0].data))
    lay_out_file(files[-1], value, casts=casts)


def _file_of(
    tensor: Tensor,
    state: str,
    file: TargetFile,
    casts: Mapping[Tensor, DType],
    templates: dict[tuple[object, ...], TargetFile],
) -> TargetFile:
    """``file`` with one tensor in it. ``templates``: the first file of each kind, from which the others differ only in
    their tensor.
    """
    dtype, (order, stride) = casts.get(tensor, tensor.dtype), memory_order_of(tensor)
    key = (state, tensor.shape, dtype.name, stride)
    first = templates.setdefault(key, file)
    if first is file:
        lay_out_file(file, tensor if state == STEP else {"param": tensor, "cat_dim": 0}, casts=casts)
        return file
    items = first.item_columns[:]
    if items:
        items[_TENSOR] = file.data.add_tensor(tensor, dtype, order)
    return replace(first, path=file.path, item_columns=items)


def _groups(checkpoint: Checkpoint) -> list[list[str]]:
    """The trained parameters by param group; without an optimizer every tensor of the model, in one."""
    if checkpoint.optim is None:
        params = checkpoint.params
        leaves = {name: leaf for name, leaf in params.items() if isinstance(leaf, Tensor)}
        tied = ties(leaves.values())
        first_names: dict[Tensor, str] = {}
        for name, leaf in leaves.items():
            first_names.setdefault(tied.get(leaf, leaf), name)
        return [list(first_names.values())]
    groups = checkpoint.optim.groups
    if not groups or any(group.members is None for group in groups):
        raise NeedsInformationError(
            f"{checkpoint.source} does not say which parameters are in which param group",
            why="DeepSpeed restores a universal checkpoint group by group",
            next_step="convert a checkpoint whose optimizer has its param_groups",
        )
    return checkpoint.optim.names_in_groups()


def _weights(
    params: Mapping[str, Tensor | Value], groups: Sequence[Sequence[str]], checkpoint: Checkpoint
) -> dict[str, Tensor]:
    """The trained parameters by name. Raises NeedsInformationError and SourceUnsupportedError."""
    leaves = {name: params.get(name) for group in groups for name in group}
    weights = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    unlisted = [name for group in groups for name in group if name not in weights]
    if unlisted:
        raise NeedsInformationError(
            f"the model lacks {plural(len(unlisted), 'parameter')} of the optimizer: {some_of(unlisted, _LISTED)}",
            details=unlisted,
            why="DeepSpeed restores the weights of every parameter together with its states",
            next_step="convert the model and the optimizer together",
        )
    unfit = [name for name in weights if name == _OPTIMIZER_FILE or not _is_file_name(name)]
    if unfit:
        raise SourceUnsupportedError(
            f"{plural(len(unfit), 'parameter', 'have')} a name that no directory can have: {some_of(unfit, _LISTED)}",
            details=unfit,
            key=unfit[0],
            why="a universal checkpoint has a directory for each parameter",
            next_step=f"rename them with {flags.rename('OLD=NEW')}",
        )
    if checkpoint.optim is not None:
        _require_states(weights, checkpoint.optim.state)
    return weights


def _is_file_name(name: str) -> bool:
    try:
        nbytes = len(name.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False
    return nbytes <= _MAX_NAME_BYTES and "/" not in name and "\0" not in name and name not in ("", ".", "..")


def _require_states(weights: Mapping[str, Tensor], states: Mapping[int | str, Mapping[str, Tensor | Value]]) -> None:
    stateless = [name for name in weights if not states.get(name)]
    if stateless:
        raise NeedsInformationError(
            f"{plural(len(stateless), 'parameter', 'have')} no optimizer state: {some_of(stateless, _LISTED)}",
            details=stateless,
            why="DeepSpeed opens the states of every parameter that it trains",
            next_step=f"add {flags.missing_state('zeros')}",
        )
    apart = [str(key) for key in states if key not in weights]
    if apart:
        raise SourceUnsupportedError(
            f"the optimizer has states of {plural(len(apart), 'key')} in no param group: {some_of(apart, _LISTED)}",
            details=apart,
            key=apart[0],
            why="a universal checkpoint has states of its weights only",
            next_step=f"write a different {flags.flavor}, which keeps such entries",
        )
    unfit = [
        f"{name}.{state}"
        for name in weights
        for state in states[name]
        if state in ("", _WEIGHT) or not _is_file_name(f"{state}.pt")
    ]
    if unfit:
        raise SourceUnsupportedError(
            f"{plural(len(unfit), 'optimizer state', 'have')} an unusable name: {some_of(unfit, _LISTED)}",
            details=unfit,
            key=unfit[0],
            why=f"a universal checkpoint has a file named after each state, beside {_WEIGHT}.pt, the weight",
            next_step=f"write the weights alone with {flags.only('model')}, or a different {flags.flavor}",
        )
    uncut = [
        f"{name}.{state}"
        for name, weight in weights.items()
        for state, leaf in states[name].items()
        if state != STEP and not (isinstance(leaf, Tensor) and leaf.shape == weight.shape)
    ]
    if uncut:
        raise SourceUnsupportedError(
            f"{plural(len(uncut), 'optimizer state', 'do')} not have its parameter's shape: {some_of(uncut, _LISTED)}",
            details=uncut,
            key=uncut[0],
            why="DeepSpeed cuts every state but the step as it cuts the parameter",
            next_step=f"write the weights alone with {flags.only('model')}, or a different {flags.flavor}",
        )


def _module_states(
    directory: str,
    params: Mapping[str, Tensor | Value],
    weights: Mapping[str, Tensor],
    shared: dict[Key, Value],
    groups: Sequence[Sequence[str]],
    extra: Mapping[Key, Value],
    casts: Mapping[Tensor, DType],
) -> list[TargetFile]:
    """The file that ZeRO 1 and 2 open and the one that ZeRO 3 opens. Neither has the weights, but both have their
    names, in ZeRO 3's form. Buffers and frozen parameters are in the first.
    """
    module: dict[Key, Value] = OrderedDict()
    for name, leaf in params.items():
        if isinstance(leaf, Tensor) and (name in weights or name in shared):
            leaf = Tensor(leaf.dtype, (0,), Chunks.whole(file=0, offset=0, shape=(0,)))  # noqa: PLW2901  # a placeholder
        module[name] = leaf
    shapes: list[Value] = []
    for group in groups:
        shapes.append(OrderedDict((name, weights[name].shape) for name in group))
    elsewhere = {*_DEEPSPEED_KEYS, *_OPTIMIZER_KEYS}
    other_extras = {key: value for key, value in extra.items() if key not in elsewhere}
    if _scaler(extra) is not None:
        del other_extras[_SCALER]
    state: dict[Key, Value] = {
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "shared_params": shared,
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "skipped_steps": 0,
        _STEPS: 0,
        "dp_world_size": 1,
        **other_extras,
        "mp_world_size": 1,
    }
    data = TargetData()  # of all files, which are planned together
    names = (f"{directory}/{head}mp_rank_00_model_states.pt" for head in ("", "zero_pp_rank_0_"))
    file, zero3_file = (TargetFile(name, data) for name in names)
    may_share = [leaf for leaf in module.values() if isinstance(leaf, Tensor)]
    lay_out_file(file, {"module": module, **state}, casts=casts, may_share=may_share)
    lay_out_file(zero3_file, {"module": {}, **state}, casts=casts)
    return [file, zero3_file]


def _optimizer_state(optim: Optimizer, groups: Sequence[Sequence[str]], extra: Mapping[Key, Value]) -> dict[Key, Value]:
    """What all parameters share: the param groups, where ZeRO 1 and 2 and where ZeRO 3 look for them."""
    param_groups: list[Value] = []
    for number, group in enumerate(optim.param_groups or ()):
        param_groups.append({**group, "params": [number]})
    steps = [optim.state[group[0]].get(STEP) if group else None for group in groups]
    states: dict[Key, Value] = {number: {STEP: step} for number, step in enumerate(steps) if step is not None}
    version = extra.get("ds_version")
    root: dict[Key, Value] = {key: extra[key] for key in _OPTIMIZER_KEYS if key in extra}
    scaler = _scaler(extra)
    if scaler is not None:
        root[_SCALER] = scaler
    root["ds_version"] = version if isinstance(version, str) else _VERSION
    root["optimizer_state_dict"] = {"state": states, "param_groups": param_groups}
    root["param_groups"] = param_groups
    return {**optim.extra, **root}


def _scaler(extra: Mapping[Key, Value]) -> Object | None:
    """The loss scaler whose attributes the extras of a DeepSpeed checkpoint hold, as the object that
    DeepSpeed loads.
    """
    state = extra.get(_SCALER)
    if not isinstance(state, dict) or not {"cur_scale", "dynamic"} <= state.keys():
        return None
    name = "DynamicLossScaler" if state["dynamic"] is True else "LossScaler"
    return Object(Global("deepspeed.runtime.fp16.loss_scaler", name), new=True, state=state, has_state=True)


def _notes_on_groups(optim: Optimizer) -> list[Note]:
    """What ZeRO 3 silently does not restore."""
    settings = [group.settings for group in optim.groups or ()]
    states = {state for entry in optim.state.values() for state in entry}
    notes: list[Note] = []
    uneven: set[str] = set()
    for of_group in settings[1:]:
        uneven.update(str(key) for key, value in settings[0].items() if of_group.get(key) != value)
    if uneven:
        differing = ", ".join(sorted(uneven))
        message = (
            f"the param groups differ in {differing}: DeepSpeed's ZeRO 3 gives all of them the settings of the first "
            "when it loads a universal checkpoint, so set them again afterwards; ZeRO 1 and 2 restore each"
        )
        notes.append(Note("zero-3", message))
    if states - _ADAM:
        message = f"DeepSpeed's ZeRO 3 does not load {', '.join(sorted(states - _ADAM))}; ZeRO 1 and 2 do"
        notes.append(Note("zero-3", message))
    return notes
