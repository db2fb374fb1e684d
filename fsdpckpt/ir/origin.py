"""Where a checkpoint comes from, and the form in which it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdpckpt.ir.terms import Layout, Section
from fsdpckpt.ir.values import Key


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """Length and CRC-32 of a whole file. ``crc`` is None for a file that was linked, not read.

    ``stored``: how many of its bytes belong to tensors of the checkpoint; None if that is not known.
    """

    nbytes: int
    crc: int | None
    stored: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of the ``fsdpckpt.json`` at ``path``: ``files`` in ``directory`` by name, and ``digests``.

    A digest is the SHA-256 of one tensor's row-major bytes, by ``<section> <key>``; most conversions record none.
    """

    path: str
    directory: str
    files: Mapping[str, ManifestFile]
    digests: Mapping[str, str]

    def path_of(self, name: str) -> str:
        """The path of one of ``files``."""
        return f"{self.directory}/{name}" if self.directory else name


@dataclass(frozen=True, slots=True)
class Origin:
    """``container``: one of ``Container``, or the name of a format that can only be read. ``directory``: where it was
    found, at ``source`` or below; "" for one file. ``manifest``: that of the directory, if this program wrote it.
    ``units_from``: the file that the units beside it come from. ``ignored``: the files and directories below
    ``source`` that the user asked to leave out, as relative paths.

    ``nesting``: the path of keys to each main section in its file or DCP directory. ``flattened_keys``: whether the
    optimizer's keys are ``state.<name>.<state>``. ``mesh_devices``: the device types of its DTensors' meshes.
    ``keys_in_order``: False if its keys are not in the order of the state dict that they were saved from.
    """

    source: str
    layout: Layout
    container: str
    flavor: str
    world_size: int
    directory: str = ""
    manifest: Manifest | None = None
    units_from: str = ""
    ignored: tuple[str, ...] = ()
    nesting: Mapping[Section, tuple[Key, ...]] = field(default_factory=dict)
    flattened_keys: bool = False
    mesh_devices: frozenset[str] = frozenset()
    keys_in_order: bool = True
