"""Describes the checkpoints of a framework: where it puts each section, in which layout and container.

A ``Flavor`` is one framework (``--flavor``), a ``Form`` one way in which it saves. ``table`` has them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fsdpckpt.ir.checkpoint import Container, KeyType, Layout, Section

PLAIN = "plain"
EXTRA_STEM = "extra_state"  # the stem of files, verl's and this program's, that hold only extras
PathKey: TypeAlias = str | int  # a key of a dict, or an index of a list


@dataclass(frozen=True, slots=True)
class MeshForm:
    """The mesh that DTensors name: a live model loads them only if its own mesh is equal.

    ``device``: the device type, as ``init_device_mesh`` takes it. ``names``: ``mesh_dim_names``, None without any.
    ``hybrid``: those of its mesh of two dimensions, of which the first replicates and the second shards rows; None if
    it has no such mesh.
    """

    device: str = "cpu"
    names: tuple[str, ...] | None = None
    hybrid: tuple[str, str] | None = None


PLAIN_MESH = MeshForm()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one section goes: ``file`` below DST, and the keys ``at`` in it. Sections of one file share its dict.

    ``file``: "" is DST itself, a trailing ``/`` makes a DCP directory; ``{rank}`` and ``{world_size}`` are filled in.
    ``container``, ``layout``: if they differ from the form's.
    """

    file: str
    at: tuple[PathKey, ...] = ()
    container: Container | None = None
    layout: Layout | None = None


PLAIN_PLACES: Mapping[Section, Place] = {
    Section.MODEL: Place("model_world_size_{world_size}_rank_{rank}.pt", ("model",)),
    Section.OPTIM: Place("optim_world_size_{world_size}_rank_{rank}.pt", ("optimizer",)),
    Section.EXTRA: Place("extra_state_world_size_{world_size}_rank_{rank}.pt"),
}
"""Of plain targets: the keys of sections that share a file or DCP directory, the files of sections that do not."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which a framework saves. ``optim``, ``extra`` None: it has no place for that section.

    ``key_type``: what its loader takes, None where the form fixes the keys. ``flattened``: the optimizer's keys are
    ``state.<name>.<state>`` and ``param_groups.<name>.<setting>``, as
    ``StateDictOptions(flatten_optimizer_state_dict=True)`` makes them.
    ``mesh``: that of its DTensors. ``weights``: tensors only, tied ones once. ``small_files``: further files that it
    needs, (name, content with ``{world_size}``). ``defaults``: extras without which its loader stops; () is an empty
    list. ``loader_opens``: extras that its loader opens, with the keys that each must have: other frameworks' extras of
    that name are left out.
    ``schedule``: the extra that takes the state dict of another producer's LR scheduler, and the keys it must have.
    ``directory``: whether DST is one; ``suffix``: what a DST that is one file ends in, "" for no custom.
    ``counter``: the extra that counts the steps of the optimizer; without one the optimizer's own step goes there.
    ``by_parameter``: each weight and state has a file of its own.
    ``keeps_source_keys``: the keys of the sections are the user's, so that the source's are kept.
    """

    layout: Layout
    container: Container
    model: Place
    optim: Place | None
    extra: Place | None = None
    key_type: KeyType | None = None
    flattened: bool = False
    mesh: MeshForm = PLAIN_MESH
    weights: bool = False
    small_files: tuple[tuple[str, str], ...] = ()
    defaults: tuple[tuple[str, str | int | tuple[()] | None], ...] = ()
    loader_opens: tuple[tuple[str, frozenset[str]], ...] = ()
    schedule: tuple[str, frozenset[str]] | None = None
    directory: bool = True
    suffix: str = ""
    keeps_source_keys: bool = False
    counter: str = ""
    by_parameter: bool = False


@dataclass(frozen=True, slots=True)
class RankFileName:
    """A file that each rank has, named with ``{rank}``; ``single`` is its name in a world of one."""

    name: str
    single: str | None = None

    def of(self, rank: int, world_size: int) -> str:
        return self.single if self.single is not None and world_size == 1 else self.name.format(rank=rank)

    def rank_of(self, name: str) -> int | None:
        """The rank whose file ``name`` is, None if it is not such a file. ``single`` names no rank."""
        before, _, after = self.name.partition("{rank}")
        match = re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(after)}", name)
        return int(match[1]) if match is not None else None


@dataclass(frozen=True, slots=True)
class Signature:
    """How to recognise a framework: every pattern of ``files`` matches a name in the directory, and all ``keys`` are
    top-level keys beside model and optimizer.

    ``model``: the path of keys of a DCP checkpoint's model, None for any. ``flattened``: whether its optimizer's keys
    are (see ``Form``), None for any.
    """

    files: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    model: tuple[PathKey, ...] | None = None
    flattened: bool | None = None


@dataclass(frozen=True, slots=True)
class Flavor:
    """One framework. ``forms``: the first that fits the options is written; () means it is only read.

    ``signs``: any one is enough. ``state``: a pattern for the files and directories that hold what is converted; others
    are side files, copied unchanged. ``rank_files``: side files that each rank has; ``side_files``: a pattern for the
    others that it saves itself.
    ``exports``: patterns of files that hold a second copy of the model, ``export_directories``: directories that do.
    ``model_files``: where Hugging Face's configuration and tokenizer lie, None when the framework keeps none.
    ``schedules``: the paths at which the LR scheduler's state dict may be among its extras, the usual one first; ()
    when it keeps none in torch's form. ``counts_processes``: whether that counts one step for each process, as
    ``AcceleratedScheduler.step`` does unless it is told ``split_batches``; others count one.
    ``contained_in``: frameworks that keep its checkpoints among files of their own, which are then copied too.
    ``training_files``, ``training_keys``: patterns of files, and extras that are not empty, which it saves only with
    both the model and the optimizer; a save of the model alone has none of them.
    ``needed``: files that it saves with the optimizer, and what it does where one is absent.
    ``schedule_file``: the one with the LR scheduler's state dict.
    ``two_groups``: whether its optimizer has two param groups and loads no other, as the Trainer's has.
    ``groups_without_params``: whether its param groups list no parameters.
    ``universal_directory``: where it loads DeepSpeed's universal checkpoints from, "" where ``latest_universal`` says.
    """

    name: str
    title: str
    signs: tuple[Signature, ...]
    forms: tuple[Form, ...] = ()
    state: str = r"^(\.metadata|.*\.distcp)$"
    rank_files: tuple[RankFileName, ...] = ()
    side_files: str = r"^$"
    exports: tuple[str, ...] = ()
    export_directories: tuple[str, ...] = ()
    model_files: str | None = None
    schedules: tuple[tuple[PathKey, ...], ...] = ()
    counts_processes: bool = False
    contained_in: tuple[str, ...] = ()
    training_files: tuple[str, ...] = ()
    training_keys: tuple[str, ...] = ()
    needed: tuple[tuple[str, str], ...] = ()
    schedule_file: str = ""
    two_groups: bool = False
    universal_directory: str = ""
    groups_without_params: bool = False
