"""Opens a source to be loaded from: recognised, by name, complete; nothing of its tensors is read."""

from __future__ import annotations

from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.converters.transform import transform, units_request
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.flat.name_slices import is_flattened
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout
from fsdpckpt.options import ConvertOptions, TensorForm
from fsdpckpt.readers.dcp.items import is_located
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources

__all__ = ["open_to_load"]

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
        error.next_step = (
            f"{error.next_step or ''} (in Python: StorageReader(path, reference=..., units=..., parameters=..., "
            f"buffers=...){keyed if options.key_type == 'name' else ''})"
        )
        raise


def _is_flattened(checkpoint: Checkpoint, options: ConvertOptions, sources: Sources) -> bool:
    return is_flattened(checkpoint, sources, units_request(options))


def _all_located(checkpoint: Checkpoint) -> bool:
    return all(is_located(named.tensor) for named in checkpoint.tensors())
