"""Names the parameters in the layer files of DeepSpeed's PipelineModule.

A pipeline saves its module layer by layer, ``layer_<number>[-model_<tp rank>]-model_states.pt``, each with the names of
that layer alone, and leaves ``module`` empty in the file of module states (``deepspeed/runtime/pipe/module.py``,
``save_state_dict``; ``pipe/engine.py``, ``module_state_dict``). The module has layer ``5`` as ``5.<name>``, and a layer
that is tied to another as ``tied_modules.<key>.<name>``; the shapes of the optimizer's parameters have these names.
With one stage and no tensor parallelism that says everything.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import cast

from fsdpckpt.errors import SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.values import Value
from fsdpckpt.readers.deepspeed.module_states import ModuleStates
from fsdpckpt.readers.deepspeed.required_files import IN_ITS_JOB, unsupported
from fsdpckpt.readers.deepspeed.step import (
    StateDict,
    StepFile,
    as_mapping,
    contradiction,
    degrees_of,
    open_files,
    require_own_number,
)
from fsdpckpt.readers.model_shards import Shape
from fsdpckpt.readers.protocol import FileTable, file_name
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of

_LAYER = re.compile(r"^layer_(\d{1,6})(?:-model_\d{1,5})?-model_states$")
_TIED = "tied_modules"
_MAX_NAMES = 4


@dataclass(frozen=True, slots=True)
class _LayerFile:
    """The file of one layer. ``prefix``: what the module calls the layer, with which its entries' names begin."""

    file: StepFile
    prefix: str

    def named(self) -> StateDict:
        """Its entries under the module's names."""
        return {f"{self.prefix}.{key!s}": value for key, value in self.file.root.items()}

    def shapes(self) -> dict[str, Shape]:
        """The shapes of its tensors, by their names."""
        return {name: tensor.shape for name, tensor in self._tensors().items()}

    def crcs(self, names: Collection[str]) -> dict[str, int]:
        """The CRC-32 of those of ``names`` for which the file has one."""
        by_offset = {at: crc for (_, at), (_, crc) in self.file.archive.checksums.by_offset().items() if crc}
        offsets = {name: tensor.offset for name, tensor in self._tensors().items() if name in names}
        return {name: by_offset[offset] for name, offset in offsets.items() if offset in by_offset}

    def _tensors(self) -> dict[str, StoredTensor]:
        return {str(name): value for name, value in self.named().items() if isinstance(value, StoredTensor)}


def with_layers(
    states: ModuleStates, directory: str, layers: Mapping[int, str], table: FileTable, sources: Sources
) -> ModuleStates:
    """``states`` with the module of the files of a pipeline's ``layers``."""
    found = None
    if not all(file.of_pipeline for file in states.files):
        found = "the module in the file of module states, too"
    elif states.partitioned:
        found = "ZeRO 3, which DeepSpeed does not combine with a pipeline"
    for file in states.files:
        degrees = degrees_of(file)
        if degrees is not None and degrees[1] > 1:
            found = f"{plural(degrees[1], 'tensor-parallel rank')} in each stage"
    if found is not None:
        paths = [path for _, path in sorted(layers.items())]
        raise unsupported(directory, "pipeline stages", paths, "without tensor parallelism", found)
    shapes: dict[str, Shape | None] = {}
    for file in states.of_model_ranks:
        if states.recorded:  # the shapes are those of the layers
            shapes.update({name: None for group in states.recorded[file.model_rank] for name in group})
            continue
        for name, shape in ((name, shape) for group in states.groups(file) for name, shape in group.items()):
            if shapes.setdefault(name, shape) != shape:
                raise contradiction(file.path, f"{name} has another shape than in the first stage that has it")
    others = {*states.aliases(), *states.aliases().values()}
    for file in states.of_model_ranks:
        frozen = file.root.get("frozen_param_shapes")
        others.update(map(str, frozen) if isinstance(frozen, dict) else ())
    opened = _open_layers(states.first, layers, shapes, sorted(states.buffers()), others, table, sources)
    pairs = [(layer.file, layer.named()) for layer in opened]
    return replace(states, layers=pairs, pipeline=_module_of(opened))


def with_stages(states: ModuleStates, directory: str, experts: Sequence[str]) -> ModuleStates:
    """``states`` of a pipeline with MoE layers: each stage has its layers in its file of module states, as one module
    (``_save_moe_checkpoint`` of ``deepspeed/runtime/engine.py``). ``experts``: the files of experts.

    Raises SourceUnsupportedError unless the files record that the model-parallel ranks are stages alone.
    """
    for file in states.files:
        degrees = degrees_of(file)
        if degrees != (states.grid.model, 1) or states.partitioned:
            found = "other model-parallel ranks, too, which are not said to be pipeline stages alone"
            if degrees is not None and degrees[1] > 1:
                found = f"{plural(degrees[1], 'tensor-parallel rank')}, too"
            raise unsupported(directory, "experts", experts, "experts alone or in pipeline stages", found)
    stages: list[tuple[StepFile, StateDict]] = []
    left: list[StepFile] = []
    whole: StateDict = OrderedDict()
    for file in states.files:
        stages.append((replace(file, rank=0, model_rank=0), file.module))
        whole.update({name: value for name, value in file.module.items() if name not in whole})
        without = cast(Value, {**file.root, "module": None})
        left.append(replace(file, archive=replace(file.archive, root=without)))
    return replace(states, files=left, layers=stages, pipeline=whole)


def _open_layers(
    module: StepFile,
    layers: Mapping[int, str],
    shapes: Mapping[str, Shape | None],
    buffers: Collection[str],
    others: Collection[str],
    table: FileTable,
    sources: Sources,
) -> list[_LayerFile]:
    """Open the files ``layers`` (by number) of the step whose module states are in ``module``.

    ``shapes``: the optimizer's parameters, with None for a shape that is not recorded. ``others``: frozen and shared
    parameters, as far as they are known.
    Raises SourceUnsupportedError for a layer of which no name is known, SourceIncompleteError for entries that no
    layer has, SourceCorruptError for shapes that are not theirs.
    """
    known = {*shapes, *buffers, *others}
    opened = []
    for number, path in sorted(layers.items()):
        require_own_number(path, _LAYER, sources)
        (file,) = open_files({0: path}, table, sources)
        keys = [str(key) for key in as_mapping(file.root, path, "its content")]
        opened.append(_LayerFile(file, _prefix(number, keys, known, path)))
    _require_tied_alike(opened, shapes, known)
    found = {name: value for layer in opened for name, value in layer.named().items()}
    missing = [name for name in dict.fromkeys([*shapes, *buffers]) if name not in found]
    if missing:
        raise SourceIncompleteError(
            f"{module.path} names {plural(len(missing), 'entry')} that no file of a layer contains",
            details=missing,
            most_shown=_MAX_NAMES,
            file=module.path,
            key=missing[0],
            why="the files of some layers were not copied, or other pipeline stages have them",
            next_step="copy the files of all layers into one directory",
        )
    for name, shape in shapes.items():
        leaf = found[name]
        if not isinstance(leaf, StoredTensor) or shape not in (None, leaf.shape):
            raise contradiction(module.path, f"{name} has another shape in the file of its layer than in param_shapes")
    return opened


def _require_tied_alike(layers: Sequence[_LayerFile], trained: Collection[str], known: Set[str]) -> None:
    """Raises SourceUnsupportedError unless the files of each tied layer can be those of one layer.

    A pipeline does not record its frozen parameters, and a frozen layer may call them as a tied one does: it would be
    taken for that, and its own weights would be lost. What ties layers has the same values in each of their files.
    ``known``: the names of what is recorded; ``trained``: of the optimizer's parameters.
    """
    firsts: dict[str, _LayerFile] = {}
    for layer in layers:
        first = firsts.setdefault(layer.prefix, layer)
        if layer is first:
            continue
        shapes, found = first.shapes(), layer.shapes()
        common = shapes.keys() & found.keys()
        tied = common.intersection(trained)
        crcs, other_crcs = first.crcs(tied), layer.crcs(tied)
        compared = crcs.keys() & other_crcs.keys()
        alike = shapes.keys() - known == found.keys() - known and all(shapes[name] == found[name] for name in common)
        if not alike or (compared and all(crcs[name] != other_crcs[name] for name in compared)):
            expected = f"what {file_name(first.file.path)} has of {layer.prefix}"
            raise _unknown_layer(layer.file.path, (), expected, "other entries, shapes or values with the same names")


def _module_of(layers: Collection[_LayerFile]) -> StateDict:
    """The module's state dict, layer after layer. A tied layer that was saved twice counts where it is first."""
    module: StateDict = OrderedDict()
    for layer in layers:
        for name, value in layer.named().items():
            module.setdefault(name, value)
    return module


def _prefix(number: int, keys: Collection[str], known: Set[str], path: str) -> str:
    """What the module calls the layer ``number``, which has the entries ``keys``.

    It has every layer either by its number or as a tied one (``_build`` of ``deepspeed/runtime/pipe/module.py``), and a
    tied embedding calls its weight like any other layer.
    """

    def has_keys(prefix: str) -> bool:
        return any(f"{prefix}.{key}" in known for key in keys)

    own = str(number)
    if not keys or has_keys(own):
        return own
    tied = {name.split(".")[1] for name in known if name.startswith(f"{_TIED}.")}
    prefixes = [f"{_TIED}.{key}" for key in sorted(tied)]
    fitting = list(filter(has_keys, prefixes))
    if len(fitting) != 1:
        expected = f"its parameters among those of the optimizer, as {number}.<name> or {_TIED}.<key>.<name>"
        raise _unknown_layer(path, fitting, expected, some_of(list(keys), _MAX_NAMES))
    return fitting[0]


def _unknown_layer(path: str, fitting: Sequence[str], expected: str, found: str) -> SourceUnsupportedError:
    return SourceUnsupportedError(
        f"{file_name(path)}: cannot tell what the module calls this pipeline layer",
        details=fitting,
        file=path,
        expected=expected,
        found=found,
        why="the layer is frozen, several tied layers have the same names, or files of two saves are mixed",
        next_step=IN_ITS_JOB,
    )
