"""Weights that are divided among numbered files are one model, with and without an index: torch.save, safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.files import paths_in
from tests.makers import Change, Make, cut, files, lose, put
from tests.oracle.compare import identical
from tests.readers.contents import opened, same_values
from tests.refusals import Refusal, corrupt, each_of, incomplete, several

STEMS = {"bin": "pytorch_model", "safetensors": "model"}
INDEX, INDEXES = "pytorch_model.bin.index.json", {kind: f"{stem}.{kind}.index.json" for kind, stem in STEMS.items()}
MODEL = {f"layers.{number}.weight": torch.randn(7, 5) for number in range(9)} | {"norm": torch.randn(3).half()}
OPTIM = {
    "state": {number: {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 5)} for number in range(4)},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1, 2, 3]}],
}


def shards(path: Path, kind: str = "bin") -> list[str]:
    """What ``save_pretrained`` writes, with and without ``safe_serialization``."""
    path.mkdir(exist_ok=True)
    save_torch_state_dict(MODEL, path, safe_serialization=kind == "safetensors", max_shard_size=300)
    return sorted(file.name for file in path.glob(f"*.{kind}"))


@pytest.mark.parametrize("kind", STEMS)
def test_shards_with_their_index_and_without_are_one_model(kind: str, tmp_path: Path) -> None:
    names = shards(source := tmp_path / "hf", kind)
    (source / "config.json").write_text("{}")
    assert len(names) == 5 and (source / INDEXES[kind]).exists()
    for given in (source, source / INDEXES[kind]):
        found = opened(given)
        same_values(found, model=MODEL)
        assert found.problems == () and found.layout == "full"
    account = opened(source).ledger.account
    assert [account.of(name).detail for name in (*names, INDEXES[kind])] == [*["model"] * 5, "metadata"]  # type: ignore[union-attr]
    fsdpckpt.convert(source, tmp_path / "full.pt", verify="full")
    assert identical(torch.load(tmp_path / "full.pt")["model"]["layers.8.weight"], MODEL["layers.8.weight"])
    fsdpckpt.convert(source, tmp_path / "out", flavor="huggingface")
    assert fsdpckpt.diff(source, tmp_path / "out").same and (tmp_path / "out" / "config.json").exists()
    (source / INDEXES[kind]).unlink()
    same_values(opened(source), model=MODEL)


def test_a_tensor_the_index_does_not_list_is_noted(tmp_path: Path) -> None:
    of_hugging_face(index(lambda where: where.pop("norm"), "safetensors"), kind="safetensors")(tmp_path)
    found = opened(tmp_path)
    same_values(found, model=MODEL)
    assert [note.key for note in found.notes if note.kind == "unlisted"] == ["norm"]


def test_a_shard_that_the_index_does_not_list_is_named(tmp_path: Path) -> None:
    shards(source := tmp_path / "hf")
    torch.save({"old": torch.ones(2)}, source / "pytorch_model-00001-of-00007.bin")
    found = opened(source)
    same_values(found, model=MODEL)
    assert [note.keys for note in found.notes if note.kind == "stray"] == [("pytorch_model-00001-of-00007.bin",)]
    fate = found.ledger.account.of("pytorch_model-00001-of-00007.bin")
    assert fate is not None and fate.fate == "left-out"


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
        assert identical(found[name]["exp_avg"], of_shape["state"][at]["exp_avg"])  # type: ignore[index]


def of_hugging_face(*changes: Change, given: str = "", kind: str = "bin") -> Make:
    """The shards of ``MODEL`` and their index, changed."""

    def make(directory: Path) -> Path:
        shards(directory, kind)
        for change in changes:
            change(directory)
        return directory / given

    return make


def index(change: Callable[[dict[str, str]], object], kind: str = "bin") -> Change:
    """The index says otherwise where a tensor is."""

    def made(directory: Path) -> None:
        document = json.loads((directory / INDEXES[kind]).read_text())
        change(document["weight_map"])
        (directory / INDEXES[kind]).write_text(json.dumps(document))

    return made


def elsewhere(kind: str) -> Callable[[dict[str, str]], object]:
    """A tensor that there is not, and one in another shard than its own."""
    return lambda where: where.update(gone=shard(kind, 1), norm=shard(kind, 2))


def shard(kind: str, number: int) -> str:
    return f"{STEMS[kind]}-{number:05d}-of-00005.{kind}"


def of_two(*numbers: int, name: str = "m-{:05d}-of-00002.pt", key: str = "{}.weight") -> Make:
    return files({name.format(number): {key.format(number): torch.randn(3)} for number in numbers})


SHARDS = [shard("bin", number) for number in range(1, 6)]
REFUSALS = (
    *(
        refusal
        for kind, file in INDEXES.items()
        for refusal in (
            incomplete(f"shards of {kind} are missing", of_hugging_face(lose(file, shard(kind, 1), shard(kind, 3)),
                       kind=kind), "2 shards are missing", f"\n  - {shard(kind, 1)}\n  - {shard(kind, 3)}\n"),
            incomplete(f"a shard of the index is missing ({kind})", of_hugging_face(lose(shard(kind, 2)), kind=kind),
                       "1 of them cannot be found", f"\n  - {shard(kind, 2)}\n"),
            incomplete(f"tensors are not in their shards ({kind})", of_hugging_face(index(elsewhere(kind), kind),
                       kind=kind), "2 tensors that their shard does not hold", "\n  - gone ", "\n  - norm "),
            corrupt(f"an index of {kind} that leads out", of_hugging_face(index(lambda where: where.update(
                    norm="../x"), kind), kind=kind), "outside its directory"),
            corrupt(f"half an index of {kind}", of_hugging_face(cut(file, by=100), kind=kind), "not an index"),
        )
    ),
    incomplete("one shard alone", of_hugging_face(given=SHARDS[1]), "is shard 2 of 5"),
    incomplete("the other shards are left out", of_hugging_face(), "4 shards are missing", omits=("--only model",),
               ignore_file=[*SHARDS[1:], INDEX]),
    corrupt("shards of the same names", of_two(1, 2, name="consolidated-{:05d}-of-00002.pth", key="w"),
            "w is in two shards"),
    *(
        corrupt(f"shard {number} of 2", of_two(1, 2, number), "1 shard has a number that the total",
                f"\n  - m-{number:05d}-of-00002.pt\n")
        for number in (0, 3)
    ),
    several("an export beside the shards", of_hugging_face(put("model.pt", MODEL)), "--ignore-file"),
)  # fmt: skip


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)
