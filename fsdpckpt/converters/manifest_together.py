"""``fsdpckpt.json`` where workers write: at every place, with the same bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import cast

from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.convert import Prepared
from fsdpckpt.converters.manifest import put_manifest, write_manifest
from fsdpckpt.execute.output import target_differs
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.staging import Staging

__all__ = ["manifest_together"]


def manifest_together(
    group: Group,
    prepared: Prepared | None,
    target: str,
    staging: Staging | None,
    *,
    crcs: Mapping[str, int],
    digests: Mapping[str, str],
) -> None:
    """Rank 0, which has ``prepared``, writes it, the other leaders the same. All ranks.

    ``staging``: a leader's; None where DST is there already, and for all others. ``crcs``, ``digests``: as for
    ``write_manifest``.
    """
    data = b""
    with group.step("write fsdpckpt.json"):
        if prepared is not None:
            data = _write(prepared, target, staging, crcs, digests)
    data = cast("bytes", group.broadcast_object(data, name="fsdpckpt.json"))
    with group.step("copy fsdpckpt.json"):
        if prepared is None and staging is not None:
            put_manifest(staging, data)


def _write(
    prepared: Prepared, target: str, staging: Staging | None, crcs: Mapping[str, int], digests: Mapping[str, str]
) -> bytes:
    if staging is not None:
        return write_manifest(staging, prepared.output, prepared.transformed, prepared.spec, crcs=crcs, digests=digests)
    at = os.path.join(os.path.realpath(target), MANIFEST)  # where DST is there already
    if not os.path.isfile(at):
        raise target_differs(target)
    with open(at, "rb") as file:
        return file.read()
