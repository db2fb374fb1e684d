"""Opens a source to be loaded from: recognised, by name, complete; nothing of its tensors is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.converters.transform import transform, units_request
from fsdpckpt.errors import NeedsInformationError, UsageError
from fsdpckpt.flat.name_slices import is_flattened
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, OptimState, Section, group_params
from fsdpckpt.ir.values import Value
from fsdpckpt.options import ConvertOptions, TensorForm
from fsdpckpt.readers.dcp.items import is_located
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.writers.dcp import flatten
from fsdpckpt.writers.state_dicts import extras_of_rank

__all__ = ["Entries", "Names", "entries_of", "open_to_load"]

# What a conversion to whole tensors makes of a source, up to the point where it would be laid out.
_SPEC = TargetSpec(Layout.FULL, Container.DCP, None, TensorForm.DTENSOR, directory=True)


def open_to_load(path: str, options: ConvertOptions, sources: Sources, *, locate: bool) -> Checkpoint:
    """The checkpoint at ``path`` as whole tensors, keyed and named as ``options`` say.

    ``locate=False``: the items of a DCP directory are not opened, unless flat parameters are in them. Raises what
    ``fsdpckpt convert`` raises for the source: SourceError, NeedsInformationError.
    """
    opened = open_checkpoint(path, sources=sources, locate=locate)
    if not locate and _is_flattened(opened, options, sources) and not _all_located(opened):
        opened = open_checkpoint(path, sources=sources, locate=True)
    try:
        return transform(opened, options, _SPEC, sources).checkpoint
    except NeedsInformationError as error:
        keyed = "; or key_type='id' for an optimizer.state_dict() that is keyed by id itself"
        error.alternative = (
            "in Python: StorageReader(path, reference=..., units=..., parameters=..., buffers=...)"
            f"{keyed if options.key_type == 'name' else ''}"
        )
        raise


def _is_flattened(checkpoint: Checkpoint, options: ConvertOptions, sources: Sources) -> bool:
    return is_flattened(checkpoint, sources, units_request(options))


def _all_located(checkpoint: Checkpoint) -> bool:
    return all(is_located(named.tensor) for named in checkpoint.tensors())


Path = tuple[str | int, ...]

_GROUPS = ("optimizer", "param_groups")


@dataclass(frozen=True, slots=True)
class Names:
    """Under which dotted keys the state dict to be filled has the model and the optimizer ("" is its top level).

    None: where the source has them when that is DCP, else ``model`` and ``optimizer``. ``flattened``: the optimizer is
    in the form of ``StateDictOptions(flatten_optimizer_state_dict=True)``.
    """

    model: str | None = None
    optimizer: str | None = None
    flattened: bool = False


@dataclass(frozen=True, slots=True)
class Entries:
    """``values`` and ``paths`` (how each is nested) by flat key."""

    values: Mapping[str, Value]
    paths: Mapping[str, Path]


def entries_of(checkpoint: Checkpoint, names: Names, rank: int) -> Entries:
    """What rank ``rank`` can load: what all ranks share, and the extras of source rank ``rank`` modulo their number.

    Raises UsageError when ``names`` give two entries one key, SourceUnsupportedError when the checkpoint itself does.
    """
    own = replace(checkpoint, extra=extras_of_rank(checkpoint, rank), rank_extra=())
    leaves, _ = flatten(own)
    told: Iterable[tuple[Path, Value]] = ((leaf.path, leaf.value) for leaf in leaves)
    if names.flattened and own.optim is not None:
        told = _by_parameter(own.optim, told)
    prefixes = _prefixes(own, names)
    values: dict[str, Value] = {}
    paths: dict[str, Path] = {}
    for path, value in told:
        prefix = prefixes.get(path[0])
        place = path if prefix is None else (*prefix, *path[1:])
        key = ".".join(map(str, place))
        if key in values:
            raise UsageError(
                f"two entries of {checkpoint.source} would both be loaded as {key}",
                key=key,
                next_step="give the sections other names: StorageReader(path, model=..., optimizer=...)",
            )
        values[key], paths[key] = value, place
    return Entries(values, paths)


def _prefixes(checkpoint: Checkpoint, names: Names) -> dict[str | int, Path]:
    """What stands for the first element of a path: an extra that is called as a section is keeps its name."""
    found: dict[str | int, Path] = {}
    for section, there, word, name in (
        (Section.MODEL, checkpoint.model is not None, "model", names.model),
        (Section.OPTIM, checkpoint.optim is not None, "optimizer", names.optimizer),
    ):
        if not there:
            continue
        if name is not None:
            found[word] = tuple(name.split(".")) if name else ()
        else:
            own = checkpoint.nesting.get(section, (word,))
            found[word] = tuple(key if isinstance(key, int) else str(key) for key in own)
    return found


def _by_parameter(optim: OptimState, leaves: Iterable[tuple[Path, Value]]) -> Iterator[tuple[Path, Value]]:
    """The optimizer as ``_flatten_optim_state_dict`` has it: one level of dotted keys, settings under parameters."""
    for path, value in leaves:
        if path[:2] == _GROUPS:
            continue
        flat = path[0] == "optimizer"
        yield ("optimizer", ".".join(map(str, path[1:]))) if flat else path, value
    for group in optim.param_groups or ():
        settings = {str(key): value for key, value in group.items() if key != "params"}
        for param in group_params(group) or ():
            for key, value in settings.items():
                yield ("optimizer", f"param_groups.{param}.{key}"), value
