"""Refuses the shards of torch_xla's and fairscale's FSDP, which version 0.1 reads and later ones do not.

Both libraries are no longer developed. Their shards show by their keys, and by the metadata that the libraries save
beside them under any key: ``XlaFullyShardedDataParallel.get_shard_metadata`` and, in fairscale,
``FullyShardedDataParallel.local_metadata_dict``.
"""

from __future__ import annotations

import re

from fsdpckpt.errors import SourceUnsupportedError, to_copy
from fsdpckpt.ir.values import Value
from fsdpckpt.readers.optimizer_forms import containers

_TORCH_XLA, _FAIRSCALE = "torch_xla", "fairscale"
_KEYS = {  # of a shard in a state dict
    _TORCH_XLA: re.compile(r"(?:^|\.)_fsdp_shard[^.]*"),
    _FAIRSCALE: re.compile(r"(?:^|\.)flat_param_\d+$"),
}
_METADATA = {  # what the metadata of one rank has
    _TORCH_XLA: {"shard_info", "flatten_info", "world_size", "rank"},
    _FAIRSCALE: {"param_metadata", "buffer_names"},
}


def refuse_discontinued(root: Value, file: str) -> None:
    """Raises SourceUnsupportedError if ``root``, what ``file`` holds, has shards of one of the libraries."""
    for _, mapping in containers(root):
        for library, names in _METADATA.items():
            if mapping.keys() >= names:
                raise _discontinued_error(library, file, None)
        for library, form in _KEYS.items():
            for key in mapping:
                if isinstance(key, str) and form.search(key):
                    raise _discontinued_error(library, file, key)


def _discontinued_error(library: str, file: str, key: str | None) -> SourceUnsupportedError:
    return SourceUnsupportedError(
        f"{file} contains shards of {library}'s FSDP, which this version does not read",
        file=file,
        key=key,
        why=f"{library} is no longer developed, and version 0.1 of fsdpckpt was the last to read its shards",
        next_step=to_copy(
            "convert it with that version, and what it wrote with this one", 'pip install "fsdpckpt==0.1.*"'
        ),
    )
