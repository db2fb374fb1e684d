"""Reads the weights of a DeepSpeed step with experts that was saved without ZeRO.

The module is in ``mp_rank_00_model_states.pt``, without its experts, and each expert in a file of its own, under the
name that it has in the model; those of AutoEP are parts of the weights of their layer. The optimizers of these ranks,
``expp_rank_<e>_mp_rank_00_optim_states.pt``, number their parameters, and each rank counts its own experts: nothing
names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind, Layout, Problem, Section
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.deepspeed.autoep import auto_experts
from fsdpckpt.readers.deepspeed.module_states import ModuleStates
from fsdpckpt.readers.deepspeed.partitions import is_count
from fsdpckpt.readers.deepspeed.required_files import ExpertFile
from fsdpckpt.readers.deepspeed.step import (
    StepFile,
    add_archives,
    add_extras,
    as_mapping,
    contradiction,
    open_files,
    section_of,
)
from fsdpckpt.readers.missing_ranks import ranks_missing
from fsdpckpt.readers.model_shards import RankGrid
from fsdpckpt.readers.protocol import FileTable, PartContents
from fsdpckpt.readers.side_files import has_zero_optimizer_elsewhere, zero_optimizer_missing
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural

_OPTIMIZER = "optimizer"
_MOST_EXPERTS = 1 << 12  # of a layer, in the names of missing files


def read_without_zero(
    directory: str, path: str, files: Sequence[ExpertFile], table: FileTable, sources: Sources
) -> PartContents:
    """The model and the extras of the step in ``directory``; a fatal problem stands for its optimizer.

    ``path``: the module states; ``files``: those of the experts. Raises SourceIncompleteError for experts without one.
    """
    (module,) = open_files({0: path}, table, sources)
    _require_all(directory, module, files)
    opened = [open_files({0: expert.path}, table, sources)[0] for expert in files]
    auto = auto_experts(directory, [module], ranks=0)
    states = ModuleStates([module], partitioned=False, grid=RankGrid(1))
    if auto is None:
        layers = [(file, as_mapping(file.root, file.path, "its content")) for file in opened]
        merged = replace(states, layers=layers).untrained(())
    else:
        parts = auto.joined(directory, list(zip(files, opened, strict=True)))
        merged = replace(states, experts=parts).untrained(())
    extra = section_of(merged, "extra")
    has_optimizer = extra.pop(_OPTIMIZER, None) is not None
    root: dict[Key, Value] = {"model": section_of(merged, "model")}
    tree = PartContents(root, Layout.FULL, "deepspeed", 1)
    add_extras(tree, [merged])
    add_archives(tree, [module.archive, *(file.archive for file in opened)])
    message = f"{directory} is a DeepSpeed checkpoint without ZeRO, with files of {plural(len(files), 'expert')}"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
    if has_zero_optimizer_elsewhere(module.root):
        tree.problems.append(zero_optimizer_missing(directory))
    if has_optimizer:
        message = (
            f"the optimizers of {directory} number their parameters, and each expert-parallel rank counts its own "
            "experts: it is not recorded which parameter a state belongs to. ZeRO 1 saves their names"
        )
        tree.problems.append(Problem("parameter-order", message, file=path, section=Section.OPTIM))
    return tree


def _require_all(directory: str, module: StepFile, files: Sequence[ExpertFile]) -> None:
    """Raises unless each layer has as many files as ``num_experts`` says: no fewer, and none of another save."""
    counts = module.root.get("num_experts")
    found = {(file.layer, file.expert) for file in files}
    wanted = list(counts) if isinstance(counts, (list, tuple)) and all(map(is_count, counts)) else []
    experts = {
        (layer, expert): f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
        for layer, count in enumerate(wanted)
        for expert in range(min(count, _MOST_EXPERTS))
    }
    missing = [name for expert, name in experts.items() if expert not in found]
    if missing:
        what = f"{directory}: the files of {plural(len(missing), 'expert')} are missing"
        raise ranks_missing(what, missing, file=f"{directory.rstrip('/')}/{missing[0]}")
    for file in files:
        if experts and (file.layer, file.expert) not in experts:
            raise contradiction(file.path, f"it is of an expert that is not in num_experts={wanted}")
