"""``diff`` of flat shards and whole tensors: each side is help for the other, and a slice never "differs"."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceUnrecognisedError
from tests.oracle.compare import identical

RANKS = 2
FLAT = {"to": "flattened", "world_size": RANKS, "unit": ["layers.*"], "use_orig_params": False}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])
    model = nn.ModuleDict({"embed": nn.Embedding(9, 5), "layers": layers})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    path = tmp_path_factory.mktemp("job") / "full.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


@pytest.fixture
def flat(full: Path, tmp_path: Path) -> Path:
    """What FSDP1 leaves: no units file. The model's flat parameters name their modules."""
    fsdpckpt.convert(full, tmp_path / "flat", **FLAT)
    (tmp_path / "flat" / "fsdpckpt.json").unlink()
    return tmp_path / "flat"


@pytest.fixture
def verl(full: Path, tmp_path: Path) -> Path:
    """Model in DTensors, optimizer in slices, and no names in it: which modules were units is nowhere."""
    fsdpckpt.convert(
        full, tmp_path / "cut", to="sharded", container="torch", world_size=RANKS, only="model", buffers="none"
    )
    fsdpckpt.convert(full, tmp_path / "verl", **FLAT)
    (tmp_path / "verl" / "fsdpckpt.json").unlink()
    for path in (tmp_path / "cut").glob("model*.pt"):
        shutil.copy(path, tmp_path / "verl")
    return tmp_path / "verl"


def changed(full: Path, target: Path) -> Path:
    content = torch.load(full, weights_only=True)
    content["model"]["layers.1.bias"][3] += 1
    torch.save(content, target)
    return target


def sigils(found: Any) -> dict[str, str]:
    return {entry.key: entry.sigil for entry in found.entries if entry.sigil != "="}


def test_the_whole_side_names_the_slices_of_the_other(full: Path, flat: Path, tmp_path: Path) -> None:
    assert fsdpckpt.diff(flat, full).same
    assert fsdpckpt.diff(full, flat).same
    assert sigils(fsdpckpt.diff(flat, changed(full, tmp_path / "other.pt"))) == {"layers.1.bias": "*"}


def test_what_nothing_names_is_asked_for_and_the_option_that_is_named_settles_it(verl: Path, full: Path) -> None:
    """Also where the model section has the names, and only the wrapping is open."""
    with pytest.raises(NeedsInformationError) as error:
        fsdpckpt.diff(verl, full)
    assert "cannot be matched" in error.value.what and "--unit 'layers.*'" in str(error.value.next_step)
    assert fsdpckpt.diff(verl, full, unit=["layers.*"]).same
    assert fsdpckpt.diff(full, verl, unit=["layers.*"], use_orig_params=False).same


@pytest.mark.parametrize("in_slices", [False, True])
def test_slices_without_names_beside_another_model_do_not_differ_from_it(
    flat: Path, verl: Path, tmp_path: Path, in_slices: bool
) -> None:
    """``in_slices``: whose names come from the units beside them, and are no reference for others."""
    another = tmp_path / "another.pt"
    torch.save({"model": nn.Linear(3, 4).state_dict()}, another)
    if in_slices:
        fsdpckpt.convert(another, tmp_path / "another", **{**FLAT, "unit": "none", "buffers": "none"})
        another = tmp_path / "another"
    for slices in (flat, verl):
        for pair in ((slices, another), (another, slices)):
            with pytest.raises(NeedsInformationError, match="cannot be matched"):
                fsdpckpt.diff(*pair)


def test_units_that_the_other_side_records_are_used_and_their_file_is_a_units_file(verl: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(verl, tmp_path / "on3", to="flattened", world_size=3, unit=["layers.*"], use_orig_params=False)
    assert fsdpckpt.diff(verl, tmp_path / "on3").same
    recorded = tmp_path / "on3" / "fsdpckpt.json"
    assert fsdpckpt.verify(verl, units=recorded).whole
    fsdpckpt.convert(verl, tmp_path / "again.pt", to="full", units=recorded)
    assert fsdpckpt.diff(tmp_path / "again.pt", tmp_path / "on3").same


def test_a_manifest_without_units_is_no_units_file(full: Path, flat: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(full, tmp_path / "dcp", to="sharded", world_size=2)
    with pytest.raises(SourceUnrecognisedError, match="records no units"):
        fsdpckpt.inspect(flat, units=tmp_path / "dcp" / "fsdpckpt.json")


def test_every_command_that_reads_takes_what_convert_takes(flat: Path, full: Path, tmp_path: Path) -> None:
    names = {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "embed.weight"}
    for how in ({"reference": full}, {"reference": full, "use_orig_params": False, "strategy": "full-shard"}):
        assert {tensor.param for tensor in fsdpckpt.inspect(flat, section="model", **how).tensors} == names
        assert fsdpckpt.verify(flat, **how).whole
        with fsdpckpt.open(flat, **how) as opened:
            assert identical(opened["layers.1.bias"].torch(), torch.load(full)["model"]["layers.1.bias"])
    order = tmp_path / "order"
    order.write_text("\n".join(names))
    with pytest.raises(NeedsInformationError):  # names without shapes
        fsdpckpt.inspect(flat, parameters=order)
    document = json.loads(json.dumps(fsdpckpt.inspect(flat).to_json()))
    assert "unnamed" in json.dumps(document["problems"]) or document["layout"] == "flattened"


def test_ids_get_names_from_a_list_where_groups_do_not_match_in_order(full: Path, tmp_path: Path) -> None:
    content = torch.load(full, weights_only=True)
    by_name = tmp_path / "named.pt"
    fsdpckpt.convert(full, by_name, to="full", key_type="name")
    named = torch.load(by_name, weights_only=True)
    names = named["optimizer"]["param_groups"][0]["params"]
    states = content["optimizer"]["state"]
    reordered = {**content["optimizer"], "state": {number: states[4 - number] for number in range(5)}}
    torch.save({"model": content["model"], "optimizer": reordered}, tmp_path / "reversed.pt")
    (tmp_path / "order").write_text("\n".join(reversed(names)))
    found = fsdpckpt.diff(tmp_path / "reversed.pt", by_name, parameters=tmp_path / "order")
    assert not [entry.key for entry in found.entries if entry.sigil != "=" and "exp_avg" in entry.key]
