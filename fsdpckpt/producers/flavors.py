"""Defines how a framework's checkpoints are described: where it puts each section, in which layout and container.

A ``Flavor`` is one framework (``--flavor``), a ``Form`` one way in which it saves. ``table`` lists them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from fsdpckpt.ir import Container, IdRule, KeyType, Layout, Section

PLAIN = "plain"
EXTRA_STEM = "extra_state"  # begins the names of verl's and fsdpckpt's files that hold only extras
PathKey: TypeAlias = str | int  # a key of a dict, or an index of a list


@dataclass(frozen=True, slots=True)
class MeshForm:
    """The mesh that DTensors name: a live model loads them only if its own mesh is equal.

    ``device``: the device type, as ``init_device_mesh`` takes it. ``names``: ``mesh_dim_names``, None without any.
    ``hybrid``: the names of the framework's mesh for hybrid sharding, whose first dimension replicates and whose second
    shards rows; None if it has none.
    """

    device: str = "cpu"
    names: tuple[str, ...] | None = None
    hybrid: tuple[str, str] | None = None


PLAIN_MESH = MeshForm()


@dataclass(frozen=True, slots=True)
class SectionPath:
    """Where one section is: ``file`` below DST, and the path of ``keys`` in it. Sections of one file share its dict.

    ``file``: "" is DST itself, a trailing ``/`` makes a DCP directory; ``{rank}`` and ``{world_size}`` are filled in.
    Of a model in safetensors files: what precedes their names, "" for those of Hugging Face; or the one file, if it has
    their suffix.
    ``container``, ``layout``: if they differ from the form's.
    """

    file: str
    keys: tuple[PathKey, ...] = ()
    container: Container | None = None
    layout: Layout | None = None


PLAIN_PATHS: Mapping[Section, SectionPath] = {
    Section.MODEL: SectionPath("model_world_size_{world_size}_rank_{rank}.pt", ("model",)),
    Section.OPTIM: SectionPath("optim_world_size_{world_size}_rank_{rank}.pt", ("optimizer",)),
    Section.EXTRA: SectionPath("extra_state_world_size_{world_size}_rank_{rank}.pt"),
}
"""Of plain targets. The keys count for sections that share a file or DCP directory, the files for those that do not."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which a framework saves. ``optim``, ``extra`` None: it does not save that section.

    ``key_type``: the one that its loader takes, None where the form fixes the keys. ``id_rule``: how it counts ids.
    ``flattened``: the optimizer's keys
    are ``state.<name>.<state>`` and ``param_groups.<name>.<setting>``, as
    ``StateDictOptions(flatten_optimizer_state_dict=True)`` makes them.
    ``mesh``: that of its DTensors. ``weights``: tensors only, tied ones once. ``small_files``: further files that it
    needs, (name, content with ``{world_size}``). ``defaults``: extras without which its loader fails; () is an empty
    list. ``loader_opens``: extras that its loader opens, with the keys that each must have; those of other frameworks
    that lack a key are left out.
    ``schedule``: the extra that takes the state dict of another producer's LR scheduler, and the keys it must have.
    An extra is named by its keys, with dots between them.
    ``rank_facts``: the extras that say of which rank a file is ("rank"), and of how many ("world_size").
    ``directory``: whether DST is one; ``suffix``: the usual end of the name of a DST that is one file, "" if none.
    ``counter``: the extra that counts the optimizer's steps; if the source has none, it is the step in the states.
    ``by_parameter``: each weight and state has its own file.
    ``by_item``: every top-level key has files of its own, and one file says how tensors are cut.
    ``any_key_type``: its loader takes the key type that the job gave it, so that of the source stays.
    ``keeps_source_keys``: users choose the keys of the sections, so those of the source stay.
    ``optimizers``: the keys of each of several optimizers, with ``{number}`` for its number or its position in a list;
    () if the framework saves one. ``not_loaded``: why its own loader refuses what it saves so, "" if it does not.
    ``several``: whether each of several models and optimizers has files of its own, with
    a number.
    ``adapter``: whether the model is an adapter alone, under the names that PEFT saves it with. A framework with such a
    form saves nothing else in it, and no adapter in its other forms.
    """

    layout: Layout
    container: Container
    model: SectionPath
    optim: SectionPath | None
    extra: SectionPath | None = None
    key_type: KeyType | None = None
    id_rule: IdRule = IdRule.GROUPS
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
    by_item: bool = False
    rank_facts: tuple[tuple[str, Literal["rank", "world_size"]], ...] = ()
    any_key_type: bool = False
    optimizers: tuple[str, ...] = ()
    not_loaded: str = ""
    adapter: bool = False
    several: bool = field(default=False, compare=False)  # frameworks that save one have the same form

    def numbered(self, section: Section, number: int) -> SectionPath | None:
        """The place of model or optimizer ``number`` of several, as accelerate calls it."""
        place = self.model if section is Section.MODEL else self.optim
        if place is None:
            return None
        stem, dot, suffix = place.file.partition(".")
        if "_0" in stem:
            return replace(place, file=stem.replace("_0", f"_{number}") + dot + suffix)
        return replace(place, file=f"{stem}_{number}{dot}{suffix}" if number else place.file)

    def number_key(self, section: Section, number: int) -> str:
        """What model or optimizer ``number`` of several is called, with a number also where the first has none."""
        place = self.numbered(section, number)
        stem = re.sub(r"(_rank\{rank\})?(/|\.bin)?$", "", place.file if place is not None else "")
        return stem if stem.endswith(f"_{number}") else f"{stem}_{number}"

    def optimizer_keys(self, number: int) -> tuple[PathKey, ...]:
        """The keys of optimizer ``number`` of several."""
        return tuple(number if key == "{number}" else key.format(number=number) for key in self.optimizers)


def extra_keys(name: str) -> tuple[str, ...]:
    """The keys of an extra by its name in the table of producers: ``app.scheduler`` is in the dict ``app``."""
    return tuple(name.split("."))


@dataclass(frozen=True, slots=True)
class RankFileName:
    """A file that each rank has, named with ``{rank}``; ``single``: its name in a run of one rank.

    ``needed``: whether a rank without one stops.
    """

    name: str
    single: str | None = None
    needed: bool = False

    def of(self, rank: int, world_size: int) -> str:
        return self.single if self.single is not None and world_size == 1 else self.name.format(rank=rank)

    def rank_of(self, name: str) -> int | None:
        """The rank whose file ``name`` is, None if it is not such a file. ``single`` names no rank."""
        before, _, after = self.name.partition("{rank}")
        match = re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(after)}", name)
        return int(match[1]) if match is not None else None


@dataclass(frozen=True, slots=True)
class Signature:
    """How to recognise a framework: each pattern of ``files`` matches a name in the directory, and all ``keys`` are
    top-level keys, those of model and optimizer included.

    ``model``, ``optim``: the path of keys of a DCP checkpoint's model and optimizer, None for any. ``flattened``:
    whether its optimizer's keys are (see ``Form``), None for any.
    """

    files: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    model: tuple[PathKey, ...] | None = None
    optim: tuple[PathKey, ...] | None = None
    flattened: bool | None = None


@dataclass(frozen=True, slots=True)
class Flavor:
    """One framework. ``forms``: the first that fits the options is written; () means it is only read.

    ``signs``: one match is enough. ``state``: a pattern for the files and directories that are converted; others are
    side files, which are copied. ``rank_files``: side files that each rank has; ``side_files``: a pattern for the other
    side files of the framework.
    ``exports``: patterns of files that hold a second copy of the model or of an adapter, provided that a name beside
    them matches ``exports_beside``; ``export_directories``: directories that do.
    ``also_loads``: further forms that its loader takes.
    ``model_files``: the directory of Hugging Face's configuration and tokenizer, None if the framework saves neither.
    ``schedules``: the paths in its extras at which the LR scheduler's state dict may be, the usual one first; () if it
    saves none in torch's form. ``counts_processes``: whether that scheduler counts one step for each process, as
    ``AcceleratedScheduler.step`` does without ``split_batches``; others count one.
    ``contained_in``: frameworks that save its checkpoints among their own files, which are then copied too.
    ``side_directories``: the paths of directories whose files are all side files, those of ``rank_files`` among them.
    ``side_places``: the paths of directories with parts of the state, beside which are some of its ``side_files``.
    ``training_files``, ``training_keys``: patterns of files, and extras that are not empty, which it saves only with
    both the model and the optimizer; a save of the model alone has none of them.
    ``needed``: files that it saves with the optimizer, and what its loader does without one; ``needed_extras``: the
    same of extras; ``wanted_extras``: those without which it goes on, but otherwise.
    ``schedule_file``: the file with the LR scheduler's state dict.
    ``data_position``: the extra with the position of each data-parallel rank in the data, in torchtitan's form; "" if
    it saves none.
    ``two_groups``: whether its optimizer always has two param groups, as the Trainer's has.
    ``groups_without_params``: whether its param groups list no parameters.
    ``tested``: the versions whose own code saved or loaded the checkpoints of the tests, "" if none did.
    ``loads``: how its user loads a checkpoint at ``{target}``, in the framework's own words.
    ``universal_directory``: where it loads DeepSpeed's universal checkpoints from, "" if ``latest_universal`` says.
    """

    name: str
    title: str
    signs: tuple[Signature, ...]
    forms: tuple[Form, ...] = ()
    also_loads: tuple[Form, ...] = ()
    state: str = r"^(\.metadata|.*\.distcp)$"
    rank_files: tuple[RankFileName, ...] = ()
    side_files: str = r"^$"
    exports: tuple[str, ...] = ()
    exports_beside: str = ""
    export_directories: tuple[str, ...] = ()
    side_directories: tuple[str, ...] = ()
    side_places: tuple[str, ...] = ()
    model_files: str | None = None
    schedules: tuple[tuple[PathKey, ...], ...] = ()
    counts_processes: bool = False
    contained_in: tuple[str, ...] = ()
    training_files: tuple[str, ...] = ()
    training_keys: tuple[str, ...] = ()
    needed: tuple[tuple[str, str], ...] = ()
    needed_extras: tuple[tuple[str, str], ...] = ()
    wanted_extras: tuple[tuple[str, str], ...] = ()
    schedule_file: str = ""
    data_position: str = ""
    two_groups: bool = False
    universal_directory: str = ""
    groups_without_params: bool = False
    loads: str = ""
    tested: str = ""
