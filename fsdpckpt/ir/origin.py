"""Where a checkpoint comes from, and the form in which it was saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdpckpt.ir.account import Account, Fate, Rule
from fsdpckpt.ir.frame import Frame
from fsdpckpt.ir.ledger import Evidence, EvidenceKind, Note
from fsdpckpt.ir.terms import Layout, Section
from fsdpckpt.ir.values import Key
from fsdpckpt.text import names_text


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """Length and CRC-32 of a whole file. ``crc`` is None for a file that was linked, not read.

    ``tensor_bytes``: how many of its bytes belong to tensors of the checkpoint; None if that is not known.
    """

    nbytes: int
    crc: int | None
    tensor_bytes: int | None = None


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
class LeftOut:
    """Files and directories in ``directory`` that are no part of the checkpoint; ``names``: their names, if known.

    ``refused``: whether they may be a part of it that cannot be read.
    """

    directory: str
    message: str
    names: tuple[str, ...] = ()
    refused: bool = False

    @classmethod
    def not_copied(cls, directory: str, names: Sequence[str]) -> LeftOut:
        """Files beside what is read."""
        return cls(directory, f"not copied from {directory}: {names_text(names, 6)}", tuple(names))

    def except_for(self, copied: Collection[str]) -> LeftOut | None:
        """What of it is left out if the paths ``copied`` are in the target after all; None if nothing is."""
        above = {above for path in copied for above in _with_those_above(path)}
        names = [name for name in self.names if f"{self.directory}/{name}".rstrip("/") not in above]
        if len(names) == len(self.names):
            return self
        return LeftOut.not_copied(self.directory, names) if names else None

    @classmethod
    def unnamed(cls, directory: str, account: Account) -> tuple[LeftOut, ...]:
        """The data that nothing in the checkpoint names, if ``account`` has any. DCP directories list their own."""
        paths = account.paths(Fate.LEFT_OUT).get(Rule.UNNAMED, [])
        names = tuple(path for path in paths if not path.endswith(".distcp"))
        return (cls(directory, f"{Rule.UNNAMED}: {names_text(names, 6)}"),) if names else ()


def _with_those_above(path: str) -> Iterator[str]:
    """``path`` and the directories above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Origin:
    """``container``: one of ``Container``, or the name of a format that can only be read. ``directory``: where it was
    found, at ``source`` or below; "" for one file. ``manifest``: that of the directory, if this program wrote it.
    ``changed``: the small files that are not what the manifest records. ``units_from``: the file that the units beside
    it come from; ``units_refused``: why others beside it are not used. ``ignored``: the files and directories below
    ``source`` that the user asked to leave out, as relative paths.

    ``nesting``: the path of keys to each main section in its file or DCP directory. ``frame``: the containers that its
    sections were in (``ir.frame``); those of the named ones are written again. ``flattened_keys``: whether the
    optimizer's keys are ``state.<name>.<state>``. ``mesh_devices``: the device types of its DTensors' meshes.
    ``keys_in_order``: False if its keys are not in the order of the state dict that they were saved from.
    ``extra_files``: the files of each extra at the top that is in files of its own. ``section_files``: those that hold
    a model or an optimizer.

    ``has_masters``: whether it has master weights, which their values tie to parameters.

    ``steps``: the directories beside it with checkpoints of the run of which it is the final model.

    What a conversion may still change: ``left_out``, what lies beside the checkpoint; ``untied_masters``, the place of
    master weights among the extras if nothing says whose they are.
    """

    source: str
    layout: Layout
    container: str
    flavor: str
    world_size: int
    directory: str = ""
    manifest: Manifest | None = None
    changed: tuple[str, ...] = ()
    units_from: str = ""
    units_refused: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    nesting: Mapping[Section, tuple[Key, ...]] = field(default_factory=dict)
    frame: Frame = None
    flattened_keys: bool = False
    mesh_devices: frozenset[str] = frozenset()
    keys_in_order: bool = True
    extra_files: Mapping[Key, frozenset[str]] = field(default_factory=dict)
    section_files: frozenset[str] = frozenset()
    has_masters: bool = False
    left_out: tuple[LeftOut, ...] = ()
    steps: tuple[str, ...] = ()
    untied_masters: str = ""

    def evidence(self) -> tuple[Evidence, ...]:
        """Its facts that are shown among the evidence."""
        if self.keys_in_order:
            return ()
        return (Evidence(EvidenceKind.ORDER, "keys are not in the order of the state dict they were saved from"),)

    def open_notes(self) -> tuple[Note, ...]:
        """The notes on what a conversion may still change."""
        notes = [
            Note("not-carried", each.message, each.directory, each.names, for_verify=each.refused)
            for each in self.left_out
        ]
        if self.untied_masters:
            message = (
                f"{self.untied_masters} holds the optimizer's float32 weights, without the names of their parameters: "
                "they stay an extra, and the model has the copies that it computed with"
            )
            notes.append(Note("master-weights", message, self.untied_masters))
        return tuple(notes)
