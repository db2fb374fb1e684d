"""Weights that are divided among numbered torch.save files are one model, with and without an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceError, SourceIncompleteError
from fsdpckpt.ir.files import paths_in
from tests.readers.contents import held, opened, same_values

INDEX = "pytorch_model.bin.index.json"
MODEL = {f"layers.{number}.weight": torch.randn(7, 5) for number in range(9)} | {"norm": torch.randn(3).half()}
OPTIM = {
    "state": {number: {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 5)} for number in range(4)},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1, 2, 3]}],
}


def shards(path: Path) -> list[str]:
    """What ``save_pretrained(safe_serialization=False)`` writes."""
    path.mkdir(exist_ok=True)
    save_torch_state_dict(MODEL, path, safe_serialization=False, max_shard_size=300)
    return sorted(file.name for file in path.glob("*.bin"))


def test_shards_with_their_index_are_one_model(tmp_path: Path) -> None:
    names = shards(source := tmp_path / "hf")
    (source / "config.json").write_text("{}")
    assert len(names) == 5 and (source / INDEX).exists()
    for given in (source, source / INDEX):
        found = opened(given)
        assert found.model is not None and held(found.model.params, found.files) == held(MODEL, ())
        assert found.problems == () and found.layout == "full"
    account = opened(source).ledger.account
    assert [account.of(name).detail for name in (*names, INDEX)] == [*["model"] * 5, "metadata"]  # type: ignore[union-attr]
    fsdpckpt.convert(source, tmp_path / "full.pt", verify="full")
    assert torch.equal(torch.load(tmp_path / "full.pt")["model"]["layers.8.weight"], MODEL["layers.8.weight"])
    fsdpckpt.convert(source, tmp_path / "out", flavor="huggingface")
    assert fsdpckpt.diff(source, tmp_path / "out").same and (tmp_path / "out" / "config.json").exists()


def test_shards_without_an_index_are_one_model_too(tmp_path: Path) -> None:
    shards(source := tmp_path / "hf")
    (source / INDEX).unlink()
    same_values(opened(source), model=MODEL)
    (source / "pytorch_model-00003-of-00005.bin").unlink()
    with pytest.raises(SourceIncompleteError, match="1 shard is missing") as error:
        opened(source)
    assert error.value.details == ("pytorch_model-00003-of-00005.bin",)


def test_what_index_and_shards_contradict_each_other_in_is_an_error(tmp_path: Path) -> None:
    names = shards(source := tmp_path / "hf")
    whole = (source / INDEX).read_text()
    (source / names[1]).rename(tmp_path / "kept")
    with pytest.raises(SourceIncompleteError, match="1 of them cannot be found") as missing:
        opened(source)
    assert missing.value.details == (names[1],)
    (tmp_path / "kept").rename(source / names[1])
    document = json.loads(whole)
    document["weight_map"]["gone"] = names[0]
    (source / INDEX).write_text(json.dumps(document))
    with pytest.raises(SourceIncompleteError, match="1 tensor that their shard does not hold"):
        opened(source)
    document["weight_map"] = {"norm": "../x.bin"}
    (source / INDEX).write_text(json.dumps(document))
    with pytest.raises(SourceCorruptError, match="outside its directory"):
        opened(source)
    (source / INDEX).write_text(whole[:50])
    with pytest.raises(SourceCorruptError, match="not an index"):
        opened(source)


def test_a_shard_that_the_index_does_not_list_is_named(tmp_path: Path) -> None:
    shards(source := tmp_path / "hf")
    torch.save({"old": torch.ones(2)}, source / "pytorch_model-00001-of-00007.bin")
    found = opened(source)
    same_values(found, model=MODEL)
    assert [note.keys for note in found.notes if note.kind == "stray"] == [("pytorch_model-00001-of-00007.bin",)]
    fate = found.ledger.account.of("pytorch_model-00001-of-00007.bin")
    assert fate is not None and fate.fate == "left-out"


def test_one_shard_alone_is_never_a_model(tmp_path: Path) -> None:
    names = shards(source := tmp_path / "hf")
    with pytest.raises(SourceIncompleteError, match="is shard 2 of 5"):
        opened(source / names[1])
    with pytest.raises(SourceError) as error:
        fsdpckpt.convert(source, tmp_path / "x.pt", ignore_file=[*names[1:], INDEX])
    assert error.value.exit_code == 3 and not (tmp_path / "x.pt").exists()


def test_shards_that_hold_the_same_names_are_no_model(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save({"w": torch.randn(2, 3)}, tmp_path / f"consolidated-{number:05d}-of-00002.pth")
    with pytest.raises(SourceCorruptError, match="w is in two shards"):
        opened(tmp_path)


def test_an_optimizer_in_shards_by_id_has_its_groups_in_a_file_of_their_own(tmp_path: Path) -> None:
    """As ColossalAI's ``GeneralCheckpointIO.save_sharded_optimizer`` writes it."""
    weight_map: dict[int, str] = {}
    for number, ids in enumerate(((0, 1, 2), (3,)), 1):
        name = f"pytorch_optim-{number:05d}.bin"
        torch.save({key: OPTIM["state"][key] for key in ids}, tmp_path / name)  # type: ignore[index]
        weight_map |= dict.fromkeys(ids, name)
    torch.save(OPTIM["param_groups"], tmp_path / "pytorch_optim_group.bin")
    document: dict[str, Any] = {"metadata": {"param_groups": "pytorch_optim_group.bin"}, "weight_map": weight_map}
    (tmp_path / "pytorch_optim.bin.index.json").write_text(json.dumps(document))
    names = shards(tmp_path)
    found = opened(tmp_path)
    same_values(found, model=MODEL, optim=OPTIM)
    assert len(paths_in(found.files)) == len(names)


def test_an_export_beside_the_shards_is_a_candidate_and_all_shards_are_left_out_together(tmp_path: Path) -> None:
    shards(tmp_path)
    torch.save(MODEL, tmp_path / "model.pt")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert "--ignore-file" in str(error.value.next_step)
    globs = [word for word in str(error.value.next_step).replace("'", "").split() if ".bin" in word or ".pt" in word]
    assert globs


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_do_not_keep_the_order_of_the_model(indexed: bool, tmp_path: Path) -> None:
    """``split_torch_state_dict_into_shards`` puts a tensor that is larger than a shard into the first file."""
    source = tmp_path / "hf"
    source.mkdir()
    weights = {"z.weight": torch.randn(8, 8), "emb.weight": torch.randn(64, 8), "a.weight": torch.randn(8, 8)}
    save_torch_state_dict(weights, source, safe_serialization=False, max_shard_size=800)
    if not indexed:
        (source / INDEX).unlink()
    of_shape = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    of_shape["state"] = {at: {"exp_avg": torch.randn_like(leaf)} for at, leaf in enumerate(weights.values())}  # type: ignore[assignment]
    torch.save(of_shape, source / "optimizer.bin")
    with pytest.raises(NeedsInformationError, match="for certain"):
        fsdpckpt.convert(source, tmp_path / "full.pt", key_type="name")
    (tmp_path / "names.txt").write_text("\n".join(weights))
    fsdpckpt.convert(source, tmp_path / "full.pt", key_type="name", parameters=tmp_path / "names.txt")
    found = torch.load(tmp_path / "full.pt")["optimizer"]["state"]
    for at, name in enumerate(weights):
        assert torch.equal(found[name]["exp_avg"], of_shape["state"][at]["exp_avg"])  # type: ignore[index]


@pytest.mark.parametrize("number", [0, 3])
def test_a_number_outside_of_the_total_is_an_error(number: int, tmp_path: Path) -> None:
    for each in (1, 2, number):
        torch.save({f"{each}.weight": torch.randn(3)}, tmp_path / f"m-{each:05d}-of-00002.pt")
    with pytest.raises(SourceCorruptError, match="1 shard has a number that the total") as error:
        opened(tmp_path)
    assert error.value.details == (f"m-{number:05d}-of-00002.pt",) and error.value.exit_code == 3
