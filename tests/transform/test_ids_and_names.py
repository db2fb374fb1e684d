"""Ids become names and names become ids in the one way that fits, or the command says what is missing.

A row is one conversion. A letter is a parameter, whose tensors have values of their own; ``"eac bnh"`` are the
parameters of two groups. Ids count in that order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import fsdpckpt
from tests.oracle.compare import identical
from tests.refusals import Refused

pytestmark = pytest.mark.filterwarnings("ignore::fsdpckpt.FsdpckptWarning")

SHAPES: dict[str, tuple[int, ...]] = {
    "e": (17, 9), "a": (28, 9), "b": (28,), "c": (9, 28), "n": (9,), "h": (9,), "s": (), "x": (3,),
    "u": (9,), "v": (9,), "w": (9,), "j": (4,),
}  # fmt: skip
IN_ORDER = "eabcnh"
"""Of the model, unless a row says otherwise. A capital is a second name of a parameter with equal bytes, ``k`` a tensor
of integers, ``j`` one of complex numbers, ``i`` a number."""


@dataclass(frozen=True)
class File:
    """A checkpoint. ``optim``: the parameters of its optimizer, group by group, "" without one; ``model``: those of the
    model, "" without one; ``keys``: of the optimizer.

    ``bare``: the parameters that have no states; ``words``: the ``param_names`` of each group; ``numbers``: ids that do
    not count group by group; ``lead`` and ``model_lead``: before the names of the optimizer and of the model; ``more``:
    further entries of the state; ``form``: "torch", "safetensors", "tied" (``E`` has the memory of ``e``), "no groups".
    """

    optim: str = ""
    model: str = ""
    keys: str = "id"
    bare: str = ""
    words: Sequence[Any] = ()
    numbers: Sequence[int] = ()
    lead: str = ""
    model_lead: str = ""
    more: Mapping[Any, Any] = field(default_factory=dict)
    form: str = "torch"


def weight(name: str) -> Any:
    if name == "i":
        return 7
    if name == "k":
        return torch.arange(9)
    return torch.full(SHAPES[name.lower()], ord(name.lower()), dtype=torch.complex64 if name == "j" else torch.float32)


def content(file: File) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if file.model:
        found["model"] = {file.model_lead + name: weight(name) for name in file.model}
        if file.form == "tied":
            found["model"]["E"] = found["model"]["e"]
    if file.optim:
        numbers = iter(file.numbers or count())
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for number, names in enumerate(file.optim.split(" ")):
            keys = {name: next(numbers) if file.keys == "id" else file.lead + name for name in names}
            groups.append({"lr": 0.5 * number, "params": list(keys.values())})
            if number < len(file.words):
                words = file.words[number]
                groups[-1]["param_names"] = list(words) if isinstance(words, str) else words
            for name, key in keys.items():
                if name not in file.bare:
                    state[key] = {"step": torch.tensor(3.0), "exp_avg": -weight(name), "exp_avg_sq": weight(name) / 2}
        found["optimizer"] = {"state": {**state, **file.more}}
        if file.form != "no groups":
            found["optimizer"]["param_groups"] = groups
    return found


def saved(file: File, path: Path) -> Path:
    if file.form == "safetensors":
        path = path.with_suffix(".safetensors")
        save_file(content(file)["model"], path)
    else:
        torch.save(content(file), path)
    return path


def units(parameters: str = IN_ORDER, groups: str = "", frozen: str = "", **shapes: tuple[int, ...]) -> dict[str, Any]:
    """The units file of a job whose model has these ``parameters``, all of them in the root unit."""
    listed = [{"name": name, "shape": {**SHAPES, **shapes}[name], "dtype": "float32"} for name in parameters]
    params = [{**each, "requires_grad": False} if each["name"] in frozen else each for each in listed]
    unit = {"prefix": "", "strategy": "full-shard", "param_dtype": None, "params": params}
    return {
        "format": "fsdpckpt-units", "version": 1, "use_orig_params": True, "world_size": None, "shard_size": None,
        "units": [unit], "unmanaged": [], "shared": [], "parameters": list(parameters),
        "groups": [list(group) for group in groups.split(" ")] if groups else None,
    }  # fmt: skip


@dataclass(frozen=True)
class Row:
    """``source`` converted to the other kind of keys. ``found``: its parameters in the order of the new groups, if that
    is another one, or how it is refused. ``said``: words of the notes; ``words``: the new
    ``param_names``.

    ``names``: the lines of ``--parameters``, group by group if there are blanks, each with ``lead``; ``reference``,
    ``units``: the content of these files.
    """

    source: File
    found: str | Refused = ""
    names: str = ""
    lead: str = ""
    reference: File | None = None
    units: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    said: Sequence[str] = ()
    words: Sequence[Any] = ()


def convert(row: Row, folder: Path) -> Any:
    options = dict(row.options)
    if row.names:
        groups = ["\n".join(row.lead + name for name in group) for group in row.names.split(" ")]
        (folder / "names.txt").write_text("\n\n".join(groups))
        options["parameters"] = folder / "names.txt"
    if row.units is not None:
        (folder / "told.json").write_text(json.dumps(row.units))
        options["units"] = folder / "told.json"
    if row.reference is not None:
        options["reference"] = saved(row.reference, folder / "ref.pt")
    source = saved(row.source, folder / "source.pt")
    other = "name" if row.source.keys == "id" else "id"
    return fsdpckpt.convert(source, folder / "out.pt", key_type=other, **options)


def ids(optim: str, model: str = IN_ORDER, **more: Any) -> File:
    return File(optim, model, **more)


def named(optim: str, model: str = IN_ORDER, **more: Any) -> File:
    return File(optim, model, keys="name", **more)


OWN_MODEL = "the checkpoint's own model section"
ALIKE = ids("eabn ch")  # n and h have one shape, and are in two groups
UNDECIDED = ["id 3 may be n or h", "id 5 may be h or n"]

# fmt: off
NAMES: dict[str, Row] = {
    "one group": Row(
        ids(IN_ORDER), said=[f"6 optimizer ids became 6 names, from {OWN_MODEL}", "states of 6 parameters"]),
    "parameters without states count": Row(ids(IN_ORDER, bare="ac"), said=["states of 4 parameters"]),
    "the number of parameters is a proof": Row(ids(IN_ORDER, bare=IN_ORDER), said=["states of 0 parameters"]),
    "ids that a trimmed optimizer kept": Row(ids("e b", numbers=[9, 4])),

    # Several groups
    "groups that shapes tell apart": Row(ids("eac bnh")),
    "groups that look alike": Row(ALIKE, Refused(
        4, ["which group has which", "a blank line between groups", "--reference", "--units"], UNDECIDED,
        silent=["--buffers"])),
    "blank lines divide a list into groups": Row(
        ALIKE, names="eabn ch", said=["from --parameters, in the optimizer's order"]),
    "blank lines that divide it otherwise": Row(ALIKE, Refused(3, "does not fit --parameters"), names="eab nch"),
    "a list that is sorted by name is nobody's": Row(ids("nw uv", "wuvn"), Refused(4), names="nuvw"),
    "a list in another order than the model's is the optimizer's": Row(ALIKE, names="eabnch"),
    "a list in the model's order does not say the groups": Row(ALIKE, Refused(4, details=UNDECIDED), names=IN_ORDER),
    "units say the groups": Row(ALIKE, units=units(groups="eabn ch"), said=["from the units"]),
    "units without groups do not": Row(ALIKE, Refused(4, details=UNDECIDED), units=units()),
    "units with groups of other sizes": Row(
        ALIKE, Refused(3, "does not fit the units", [
            "groups of 4, 2 ids in the optimizer", "groups of 3, 3 parameters in the units"]),
        units=units(groups="eab cnh")),
    "units with groups of other shapes": Row(
        ids("eabc", "eabc"), Refused(3, "does not fit the units", [
            "id 0 has states of shape [17, 9], a is [28, 9]", "id 1 has states of shape [28, 9], e is [17, 9]"]),
        units=units("eabc", "aebc")),
    "param_names say the groups": Row(
        ids("eabn ch", words=["eabn", "ch"]), said=["from param_names in the groups"]),
    "a reference by name says the groups": Row(
        ALIKE, reference=named("eabn ch"), said=["from the param groups of"]),
    "a reference of another job does not": Row(
        ALIKE, Refused(4, details=UNDECIDED), reference=named("eab cnh")),
    "the same in DistributedDataParallel": Row(
        ids("en ha", "hean", model_lead="module."), reference=named("en ah", "")),
    "a sorted reference with a name that the model lacks": Row(
        ids("en ah", "enah"), Refused(3, "h is not in the param groups of"), reference=named("en ax", "")),
    "a sorted reference says them in the order of the model": Row(
        ids("en ha", "hean"), reference=named("en ah", ""),
        said=[f"in the order of {OWN_MODEL}", "sorted by name", "--parameters FILE"]),

    # Shapes
    "another order, and shapes do not decide": Row(ids(IN_ORDER, "ecbanh"), Refused(
        4, [f"in another order than {OWN_MODEL}", "--parameters", "--units"],
        ["id 4 may be n, h", "id 5 may be n, h"])),
    "another order, and a list says it": Row(ids(IN_ORDER, "ecbanh"), names=IN_ORDER),
    "another order that shapes decide": Row(ids("cba", "eabc"), said=["has its parameters in another order"]),
    "no order fits": Row(ids("nhb", "nbe"), Refused(3, "does not fit", [
        "id 1 has states of shape [9], b is [28]", "id 2 has states of shape [28], e is [17, 9]"])),
    "fewer parameters than ids": Row(
        ids(IN_ORDER, "eabcn"), Refused(3, f"the optimizer has 6 ids, {OWN_MODEL} 5 parameters")),
    "fewer parameters, and states that fit none of them": Row(
        ids("ea n", ""), Refused(3, details=[
            "the optimizer has 3 ids, the units 2 parameters", "id 1 has states of shape [28, 9], b is [28]",
            "id 1 has states of shape [28, 9], which no parameter of the units has",
            "id 2 has states of shape [9], which no parameter of the units has"]),
        units=units("eb")),
    "groups in another order": Row(ids("ae b", "eab"), said=["has its parameters in another order"]),
    "groups in another order, of fewer parameters": Row(ids("ae b", "eabn"), said=["in another order"]),

    # What is no parameter of the optimizer
    "a frozen parameter that shapes tell": Row(ids("ebcnh")),
    "a frozen parameter that may be another one": Row(ids("eabcn"), Refused(
        4, ["do not decide which of them it has", "--parameters", "--buffers"], ["id 4 may be n or h"])),
    "a list says which is frozen": Row(ids("eabch"), names="eabch"),
    "units say which is frozen": Row(ids("eabch"), units=units(frozen="n")),
    "units say what may be frozen, and has states": Row(ids(IN_ORDER), units=units(frozen="n")),
    "what may be frozen is left out of two groups": Row(ids("eac bh"), units=units(frozen="n")),
    "what may be frozen has a shape that others need": Row(
        ids("eh", ""), Refused(4, details=["id 1 may be h or n"]), units=units("eahn", frozen="n")),
    "what may be frozen does not fit in any order": Row(
        ids("ae b", ""), Refused(3, details=[
            "the optimizer has 3 ids, the units 4 parameters", "id 0 has states of shape [28, 9], e is [17, 9]",
            "id 1 has states of shape [17, 9], a is [28, 9]"]),
        units=units("neab", frozen="n")),
    "globs name buffers": Row(ids("eabch"), options={"buffers": ["n"]}),
    "integers, numbers and 0-dim tensors are no parameters": Row(ids("eb", "ekibs")),
    "complex numbers are": Row(ids("ej", "ejb")),
    "globs that name everything": Row(ids("ea"), Refused(4, "maps optimizer ids"), options={"buffers": ["*"]}),
    "a 0-dim tensor is one where a state has no dimensions": Row(ids("es", "esa")),
    "tied weights are one parameter": Row(ids("ea", "ea", form="tied")),
    "a copy of a matrix may be one or a second name": Row(
        ids("ec", "ecC"), Refused(4, "C may be another name", ["id 1 may be c or C"])),
    "a copy of a vector may be one, too": Row(ids("en", "enN"), Refused(4, details=["id 1 may be n or N"])),

    # Names in no order, ids without groups
    "sorted names of other shapes": Row(ids("eabcn", ""), reference=File(model="eabcn", form="safetensors")),
    "sorted names of one shape": Row(
        ids(IN_ORDER, ""),
        Refused(4, ["the order of the parameters is not recorded in the reference", "--reference",
                    "--parameters FILE with the names of the optimizer's parameters"],
                ["id 4 may be h, n", "id 5 may be h, n"]),
        reference=File(model=IN_ORDER, form="safetensors")),
    "five candidates": Row(
        ids("hnuvw", ""), Refused(4, details=[f"id {at} may be h, n, u, v and 1 more" for at in range(5)]),
        reference=File(model="nhuvw", form="safetensors")),
    "sorted names of shapes that no state has": Row(
        ids("en", ""), Refused(3, "id 1 has states of shape [9], which no parameter of the reference"),
        reference=File(model="ea", form="safetensors")),
    "ids without groups need a list": Row(
        ids(IN_ORDER, form="no groups"),
        Refused(4, "the groups that they are in are not recorded", silent=["--reference"])),
    "ids without groups are places in a list": Row(ids("ebn", numbers=[0, 2, 4], form="no groups"), names=IN_ORDER),
    "ids without groups are places in groups": Row(
        ids("be", "", numbers=[0, 2], form="no groups"), units=units("ebc", groups="bc e")),
    "ids without groups beyond the list": Row(
        ids("eb", numbers=[0, 6], form="no groups"),
        Refused(3, details=["id 6 is beyond the 6 parameters of --parameters"]), names=IN_ORDER),
    "ids without groups of other shapes": Row(
        ids("eb", numbers=[0, 4], form="no groups"), Refused(3, details=["id 4 has states of shape [28], n is [9]"]),
        names=IN_ORDER),

    # Several sources
    "nothing states an order": Row(ids("eab", ""), Refused(
        4, ["maps optimizer ids to parameters", "--reference", "--parameters", "--units"])),
    "a list that is too short": Row(
        ids("eab", ""), Refused(3, details=["the optimizer has 3 ids, --parameters 2 parameters"]), names="ea"),
    "a list that the model's shapes contradict": Row(ids("ea"), Refused(3, "does not fit --parameters"), names="ae"),
    "a list that is the model's": Row(ids(IN_ORDER), names=IN_ORDER, said=["from --parameters;"]),
    "a reference": Row(ids("eab", ""), reference=File(model="eab"), said=["from the reference"]),
    "a reference of another model": Row(
        ids("eab", ""), Refused(3, "does not fit the reference"), reference=File(model="cab")),
    "a reference that keeps no order comes after the model": Row(
        ids(IN_ORDER), reference=File(model=IN_ORDER, form="safetensors"), said=[f"from {OWN_MODEL}"]),
    "units come first": Row(
        ids("ea", words=["ea"]), names="ea", reference=File(model="ea"), units=units("ea"), said=["from the units"]),
    "param_names come second": Row(
        ids("ea", "ea", words=["ea"]), names="ea", reference=File(model="ea"), said=["from param_names"]),
    "a list comes third": Row(ids("ea", "ea"), names="ea", reference=File(model="ea"), said=["from --parameters"]),
    "a reference comes fourth": Row(ids("ea", "ea"), reference=File(model="ea"), said=["from the reference"]),
    "units in another order than the model": Row(
        ids(IN_ORDER, "eabchn"), Refused(3, ["contradict each other", "one has n where the other has h"]),
        units=units()),
    "units with another parameter than the model": Row(
        ids("eb", "ebn"), Refused(3, f"n of {OWN_MODEL} is not in the units"), options={"buffers": ["none"]},
        units=units("eb")),
    "units in other shapes than the reference": Row(
        ids("ea", "", bare="a"), Refused(3, "a has shape [9, 28] in the units, [28, 9] in the reference"),
        units=units("ea", a=(9, 28)), reference=File(model="ea")),
    "units with other groups than param_names": Row(
        ids("ab", "", bare="ab", words=["ab"]),
        Refused(3, "group 0: the units and param_names in the groups list different"), units=units("ab", "ba")),
    "units with another number of groups than param_names": Row(
        ids("ab", "", bare="ab", words=["ab"]), Refused(3, "groups of 1, 1 parameters in the units"),
        units=units("ab", "a b")),
    "param_names in another order than the units": Row(
        ids("nh", "", words=["hn"]), Refused(3, ["the param_names of", "contradict the units"], [
            "id 0 is h in param_names, n in the units", "id 1 is n in param_names, h in the units"]),
        units=units("nh")),

    # Names in other words
    "param_names of a compiled model": Row(ids("ea b", words=[["_orig_mod.e", "_orig_mod.a"], ["_orig_mod.b"]])),
    "param_names of DistributedDataParallel": Row(ids("ea", words=[["module.e", "module.a"]])),
    "param_names that are too few": Row(ids("eab", words=["a"]), said=[f"from {OWN_MODEL}"]),
    "param_names that are no list": Row(ids("eab", words=[5]), said=[f"from {OWN_MODEL}"]),
    "param_names that are no text": Row(ids("ea", words=[["e", 7]]), said=[f"from {OWN_MODEL}"]),
    "param_names with a name twice": Row(
        ids("ea b", "eab", bare="b", words=["ea", "a"]), Refused(3, details=[
            f"id 2 is a in param_names, b in {OWN_MODEL}"])),
    "param_names of one group": Row(ids("ea b", words=["ea"]), said=[f"from {OWN_MODEL}"]),
    "param_names of flat parameters": Row(
        ids("ea", words=[["l._flat_param", "_flat_param"]]), said=[f"from {OWN_MODEL}"]),
    "a model in DistributedDataParallel": Row(ids("eab", "eab", model_lead="module.")),
    "a list of DistributedDataParallel": Row(ids("eab", "eab"), names="eab", lead="module."),
    "a list for a model in DistributedDataParallel": Row(ids("eab", "eab", model_lead="module."), names="eab"),
    "a reference in DistributedDataParallel": Row(ids("eab", "eab"), reference=File(model="eab", model_lead="module.")),
    "a compiled reference": Row(ids("eab", ""), reference=File(model="eab", model_lead="_orig_mod.")),

    # Entries
    "an entry of the user": Row(ids("ea", more={"mine": {"seen": 5}})),
    "an entry of the user under the name of a parameter": Row(
        ids("nh", more={"h": {"exp_avg": weight("h")}}), Refused(3, "states under both kinds of key", ["h"])),
    "the same, where the parameter has no states": Row(
        ids("nh", bare="h", more={"h": {"exp_avg": weight("h")}}), Refused(3, "states under both kinds of key", ["h"])),
    "an id that groups list twice": Row(ids("ea b", numbers=[0, 1, 1]), Refused(3, details=["id 1 is listed 2 times"])),
}

SORTED, OWN_LIST = named("bhn ace"), named("hbn cea")
CUSTOM = {7: {"seen": 5}}

IDS: dict[str, Row] = {
    "the order of the model": Row(
        named(IN_ORDER), said=[f"6 optimizer keys became 6 ids, in the order of {OWN_MODEL}"]),
    "the job's own order": Row(
        OWN_LIST, said=[f"in the order of the optimizer's own groups, which is not that of {OWN_MODEL}"]),
    "sorted lists have the order of the model": Row(
        SORTED, "bnh eac", said=[f"in the order of {OWN_MODEL}", "sorted by name", "--parameters"]),
    "one list that is not sorted shows that none was": Row(named("abe hcn"), said=["the optimizer's own groups"]),
    "sorted lists in the order that the user lists": Row(SORTED, "hbn cea", names="hbn cea"),
    "sorted lists in the order of a reference that is not": Row(SORTED, "hbn cea", reference=OWN_LIST),
    "sorted lists in the order of units": Row(SORTED, "hbn cea", units=units(groups="hbn cea")),
    "a parameter without states has an id": Row(named(IN_ORDER, bare="eb")),
    "names of a compiled model": Row(named("ean", lead="_orig_mod.")),
    "names of a compiled model, sorted": Row(named("aen", "ean", lead="_orig_mod."), "ean"),

    # Without an order of the model
    "the job's own order without a model": Row(named("hbn cea", "")),
    "sorted lists without a model": Row(named("aen", ""), Refused(
        4, ["in which order its optimizer has its parameters", "--parameters", "--units", "--reference"])),
    "sorted lists beside sorted names": Row(
        named("ae", ""), Refused(4, "cannot get ids in the order of the reference"),
        reference=File(model="ea", form="safetensors")),
    "the job's own order beside sorted names": Row(named("ea", ""), reference=File(model="ea", form="safetensors")),
    "groups of one parameter have one order": Row(named("e a", ""), reference=File(model="ea", form="safetensors")),
    "a sorted reference for sorted lists": Row(
        named("aen", ""), Refused(4, "cannot get ids"), reference=named("aen", "")),

    # Contradictions
    "a name that units lack": Row(
        named("exb", ""), Refused(3, "does not fit the units", [
            "x is not in the units", "e has states of shape [17, 9], and is [9, 17] in the units"]),
        units=units("eb", e=(9, 17))),
    "states that no group lists": Row(
        named("e", "ea", more={"a": {"exp_avg": weight("a")}}),
        Refused(3, details=["a has states, and no group lists it"])),
    "a name that groups list twice": Row(named("ea e"), Refused(3, details=["e is listed 2 times"])),
    "a name twice, and no order of the model": Row(named("ea e", ""), Refused(3, details=["e is listed 2 times"])),
    "another order in the groups of units": Row(named("ae n"), "ea n", units=units("ean", "ea n")),
    "another group in units": Row(
        named("e na", "ean"), Refused(3, details=["a is not in group 1 of the units"]), units=units("ean", "ea n")),
    "units in other shapes than the model": Row(
        named("ea", "ea", bare="a"), Refused(3, "a has shape [9, 28] in the units, [28, 9] in"),
        units=units("ea", a=(9, 28))),
    "fewer groups in units": Row(
        named("ea n", "ean"), Refused(3, details=["n is not in group 1 of the units"]), units=units("ean", "ean")),
    "a list in another order than units is the optimizer's": Row(named("hn", ""), names="hn", units=units("nh")),
    "the job's own order against that of a reference": Row(
        named("hbn", "nbh"), Refused(3, "contradict each other"), reference=named("bnh", "nbh")),
    "the same without models": Row(named("nbh", ""), Refused(3, "contradict each other"), reference=named("hnb", "")),
    "a sorted reference proves nothing against it": Row(named("hnb", "nbh"), reference=named("bhn", "")),

    # Without groups
    "no groups": Row(named("a", form="no groups"), Refused(4, ["no param_groups", "--parameters", "--units"])),
    "no groups, and a list": Row(named("ah", form="no groups"), "eabcnh", names=IN_ORDER),
    "no groups, and those of units": Row(named("ehn", form="no groups"), "ch eabn", units=units(groups="ch eabn")),
    "no groups, and a list that lacks a name": Row(
        named("ab", "", form="no groups"), Refused(3, details=["b is not in --parameters"]), names="ea"),

    # Words and entries
    "param_names of keys that were sorted": Row(named("hn", "nh", words=["hn"]), words=["hn"]),
    "param_names of other words": Row(
        named("hn", "nh", words=[["_orig_mod.h", "_orig_mod.n"]]), words=[["_orig_mod.h", "_orig_mod.n"]]),
    "param_names that keep the job's order": Row(named("hn", "nh", words=["nh"]), "nh", words=["nh"]),
    "param_names that are too few stay": Row(named("hn", "nh", words=["h"]), "nh", words=["h"]),
    "an entry of the user": Row(named("ea", more=CUSTOM), Refused(3, "states under both kinds of key", ["7"])),
    "an entry of the user under a name": Row(named("ea", more={"mine": {"seen": 5}})),
    "an entry of the user under a new id": Row(
        named("ean", more={1: {"seen": 5}}), Refused(3, "states under both kinds of key", ["1"])),
}
# fmt: on


def letters(names: Sequence[Any], row: Row) -> str:
    return "".join(str(name).removeprefix(row.source.model_lead).removeprefix(row.source.lead) for name in names)


def converted(row: Row, folder: Path) -> Any:
    """The optimizer that was written, with the notes that ``row`` says; None if it is refused as ``row`` says."""
    if isinstance(row.found, Refused):
        row.found.by(lambda: convert(row, folder))
        assert not (folder / "out.pt").exists()
        return None
    report = convert(row, folder)
    said = [note.message for note in report.notes]
    assert all(any(words in message for message in said) for words in row.said), said
    return torch.load(folder / "out.pt")["optimizer"]


@pytest.mark.parametrize("name", NAMES)
def test_ids_get_the_only_names_that_fit(name: str, tmp_path: Path) -> None:
    row = NAMES[name]
    written = converted(row, tmp_path)
    if written is None:
        return
    if row.source.form != "no groups":
        assert [letters(group["params"], row) for group in written["param_groups"]] == row.source.optim.split(" ")
    states = {letters([key], row): states for key, states in written["state"].items()}
    assert "".join(states) == row.source.optim.translate({ord(each): None for each in f" {row.source.bare}"}) + "".join(
        map(str, row.source.more)
    )
    for key in states.keys() - row.source.more.keys():
        assert identical(states[key]["exp_avg"], -weight(key))


@pytest.mark.parametrize("name", IDS)
def test_names_get_the_ids_of_the_jobs_own_optimizer(name: str, tmp_path: Path) -> None:
    row = IDS[name]
    written = converted(row, tmp_path)
    if written is None:
        return
    in_order = (row.found or row.source.optim).replace(" ", "")
    if row.source.form != "no groups":
        groups = written["param_groups"]
        assert list(chain(*(group["params"] for group in groups))) == list(range(len(in_order)))
        assert [len(group["params"]) for group in groups] == [*map(len, row.source.optim.split(" "))]
        assert [group.get("param_names") for group in groups][: len(row.words)] == [*map(list, row.words)]
    has_states = set(row.source.optim) - set(f" {row.source.bare}")
    assert {letter for number, letter in enumerate(in_order) if number in written["state"]} == has_states
    for number in written["state"].keys() - row.source.more.keys():
        assert identical(written["state"][number]["exp_avg"], -weight(in_order[number]))
    assert all(written["state"][key] == entry for key, entry in row.source.more.items())


def test_sorted_groups_of_sorted_keys_say_who_is_in_each_and_shapes_the_rest(tmp_path: Path) -> None:
    """The reference has neither order: a tool wrote its keys by name, as FSDP lists those of groups."""
    shapes = {"weight": (3, 2), "bias": (5,)}
    names = [f"{layer}.{part}" for layer in "01" for part in ("weight", "bias")]
    states = [{"exp_avg": torch.randn(shapes[name[2:]])} for name in names]
    groups = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2, 3]}]
    torch.save({"state": dict(enumerate(states)), "param_groups": groups}, tmp_path / "optim.pt")
    by_name = {"state": dict(zip(names, states, strict=True))}
    by_name["param_groups"] = [
        {**group, "params": sorted(names[at : at + 2])} for group, at in zip(groups, (0, 2), strict=True)
    ]
    model = {name: torch.randn(shapes[name[2:]]) for name in sorted(names)}
    torch.save({"model": model, "optimizer": by_name}, tmp_path / "ref.pt")
    fsdpckpt.convert(tmp_path / "optim.pt", tmp_path / "o.pt", key_type="name", reference=tmp_path / "ref.pt")
    written = torch.load(tmp_path / "o.pt")
    written = written.get("optimizer", written)
    assert [group["params"] for group in written["param_groups"]] == [names[:2], names[2:]]


def test_units_beside_the_source_count_and_are_called_by_their_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "units.json").write_text(json.dumps(units(groups=ALIKE.optim)))
    torch.save(content(ALIKE), tmp_path / "run" / "full.pt")
    report = fsdpckpt.convert(tmp_path / "run", tmp_path / "out.pt", key_type="name")
    assert any(f"from the units of {tmp_path / 'run' / 'units.json'}" in note.message for note in report.notes)


def test_more_ways_than_can_be_tried_are_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpckpt.transform.assignment._MAX_STEPS", -(10**6))
    Refused(4, "there are more ways to name them than can be tried", ()).by(lambda: convert(Row(ids("e a")), tmp_path))


@pytest.mark.parametrize("model", ["ea", "ae"])
def test_groups_that_were_lost_give_ids_only_where_they_would_not_matter(model: str, tmp_path: Path) -> None:
    """A flattened optimizer has settings by parameter: groups are put together of those that are equal."""
    flat: dict[str, Any] = {f"state.{name}.exp_avg": -weight(name) for name in "ea"}
    flat |= {f"param_groups.{name}.lr": 0.5 for name in "ea"}
    content = {"model": {name: weight(name) for name in model}, "optimizer": flat}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    command = partial(fsdpckpt.convert, tmp_path / "dcp", tmp_path / "out.pt", to="full", key_type="id")
    if model == "ae":
        Refused(4, [f"in a different order than {OWN_MODEL}", "--units"]).by(command)
        return
    command()
    states = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert [identical(states[at]["exp_avg"], -weight(name)) for at, name in enumerate("ea")] == [True, True]


@pytest.mark.parametrize("by", ["units", "parameters"])
@pytest.mark.parametrize("rates", [(0.1, 0.2, 0.1), (0.1, 0.1, 0.1), (0.1, 0.2, 0.3)])
def test_groups_that_were_lost_are_divided_as_the_units_record(
    rates: tuple[float, ...], by: str, tmp_path: Path
) -> None:
    """PyTorch's flattened form records no groups: the first and the last have equal settings, and become one."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    groups = [{"params": list(each.parameters()), "lr": rate} for each, rate in zip(model, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    fsdpckpt.save_parameter_order(model, optimizer, tmp_path / "units.json")
    (tmp_path / "names.txt").write_text("0.weight\n0.bias\n\n1.weight\n1.bias\n\n2.weight\n2.bias\n")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, flat = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": flat}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    listed: dict[str, Any] = {by: tmp_path / {"units": "units.json", "parameters": "names.txt"}[by]}
    fsdpckpt.convert(tmp_path / "dcp", tmp_path / "out.pt", to="full", key_type="id", **listed)
    found, expected = torch.load(tmp_path / "out.pt")["optimizer"], optimizer.state_dict()
    settings = [(group["params"], group["lr"]) for group in found["param_groups"]]
    assert settings == [(group["params"], group["lr"]) for group in expected["param_groups"]]
    for at, states in expected["state"].items():
        assert all(identical(found["state"][at][name], value) for name, value in states.items())
    optimizer.load_state_dict(found)


@pytest.mark.parametrize("file", [ids("ea n"), named("ea n"), File(model="ea")])
def test_keys_that_are_right_already_stay(file: File, tmp_path: Path) -> None:
    source = saved(file, tmp_path / "a.pt")
    if file.optim:
        report = fsdpckpt.convert(source, tmp_path / "b.pt", key_type=file.keys)
        assert not [note for note in report.notes if note.kind == "rekeyed"]
        assert fsdpckpt.diff(source, tmp_path / "b.pt").same
        return
    Refused(2, "has no optimizer").by(lambda: fsdpckpt.convert(source, tmp_path / "b.pt", key_type="id"))


def test_a_group_without_parameters_stays_as_it_is(tmp_path: Path) -> None:
    saved_content = content(ids("nh"))
    saved_content["optimizer"]["param_groups"].append({"lr": 7, "param_names": ["x"]})
    torch.save(saved_content, tmp_path / "a.pt")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", key_type="name")
    assert torch.load(tmp_path / "b.pt")["optimizer"]["param_groups"][1] == {"lr": 7, "param_names": ["x"]}
