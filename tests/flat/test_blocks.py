"""bitsandbytes' states in slices of flat parameters, in the library's form: 32 bits for few elements, else 8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, UsageError
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units_json import encode, render
from tests.flat.flat_checkpoints import unit, units_of
from tests.oracle.compare import identical, require_identical, require_parts

WRAPPER = "__bnb_optimizer_quant_state__"
SHAPES = {"w": (24, 64), "v": (6, 256), "b.weight": (7, 3)}  # 6 blocks, 6 blocks; one parameter of 32 bits
MAP = torch.linspace(-1, 1, 256)


def moments() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: {state: torch.randn(shape, generator=generator).flatten() for state in ("state1", "state2")}
        for name, shape in SHAPES.items()
    }


def quantized(values: torch.Tensor, number: str) -> dict[str, torch.Tensor]:
    """Codes and scales of a vector as a rank keeps it: in blocks of 256 from its first element."""
    blocks = values.split(256)
    codes = [((block / block.abs().max() + 1) * 127.5).round().to(torch.uint8) for block in blocks]
    scales = torch.stack([block.abs().max() for block in blocks])
    return {f"state{number}": torch.cat(codes), f"qmap{number}": MAP.clone(), f"absmax{number}": scales}


def held(world_size: int, rank: int, *, orig: bool) -> dict[int, dict[str, Any]]:
    """The states of ``rank`` by id, without the dict that hides them."""
    whole = moments()
    units = [["w", "v"], ["b.weight"]]
    found: dict[int, dict[str, Any]] = {}
    for names in units:
        numels = [whole[name]["state1"].numel() for name in names]
        step = -(-sum(numels) // world_size)
        low, high, at = rank * step, (rank + 1) * step, 0
        ranges = []
        for name, numel in zip(names, numels, strict=True):
            begin, end = max(low - at, 0), min(high - at, numel)
            ranges.append((name, begin, end))
            at += numel
        parts = [[one] for one in ranges if one[1] < one[2]] if orig else [ranges]
        for part in parts:
            number = list(SHAPES).index(part[0][0]) if orig else units.index(names)
            entry: dict[str, Any] = {"step": 2}
            for state in ("state1", "state2"):
                pieces = [whole[name][state][begin:end] for name, begin, end in part if begin < end]
                vector = torch.cat([*pieces, torch.zeros(0 if orig else step - sum(map(len, pieces)))])
                shape = SHAPES[part[0][0]] if orig and world_size == 1 else (-1,)  # one rank cuts nothing
                entry.update({state: vector} if names == units[1] else quantized(vector, state[-1]))
                entry[state] = entry[state].reshape(shape)
            found[number] = entry
    return found


def hidden(entry: dict[str, Any]) -> dict[str, Any]:
    return {"step": entry["step"], WRAPPER: {name: item for name, item in entry.items() if name != "step"}}


def save(directory: Path, world_size: int, *, orig: bool) -> Path:
    directory.mkdir()
    groups = [{"lr": 0.1, "params": list(range(3 if orig else 2))}]
    for rank in range(world_size):
        state = {number: hidden(entry) for number, entry in held(world_size, rank, orig=orig).items()}
        path = directory / f"optim_world_size_{world_size}_rank_{rank}.pt"
        torch.save({"state": state, "param_groups": groups}, path)
    units = units_of(
        unit("", {name: SHAPES[name] for name in ("w", "v")}),
        unit("b", {"weight": SHAPES["b.weight"]}),
        use_orig_params=orig,
    )
    (directory / "units.json").write_text(render(encode(units)))
    return directory


def assert_held(directory: Path, world_size: int, *, orig: bool) -> None:
    for rank in range(world_size):
        loaded = torch.load(directory / f"optim_world_size_{world_size}_rank_{rank}.pt", weights_only=True)["state"]
        expected = held(world_size, rank, orig=orig)
        require_identical(loaded, expected, f"rank {rank}")


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("ranks", [(2, 3), (4, 6), (6, 1)])
def test_ranks_whose_slices_are_whole_blocks_get_the_librarys_own(
    orig: bool, ranks: tuple[int, int], tmp_path: Path
) -> None:
    source = save(tmp_path / "source", ranks[0], orig=orig)
    fsdpckpt.convert(source, tmp_path / "target", to="flattened", world_size=ranks[1], verify="full")
    assert_held(tmp_path / "target", ranks[1], orig=orig)
    assert not fsdpckpt.verify(source).problems


@pytest.mark.parametrize("orig", [False, True])
def test_a_full_checkpoint_has_the_form_of_one_process_and_comes_back(orig: bool, tmp_path: Path) -> None:
    source = save(tmp_path / "source", 2, orig=orig)
    fsdpckpt.convert(source, tmp_path / "full.pt", to="full", key_type="name")
    saved = torch.load(tmp_path / "full.pt", weights_only=True)
    full = saved["optimizer"]
    for name, shape in SHAPES.items():
        entry, whole = full["state"][name], moments()[name]
        for state in ("state1", "state2") if name != "b.weight" else ():
            for part, tensor in quantized(whole[state], state[-1]).items():
                assert identical(entry[part].flatten(), tensor)
        assert entry["state1"].shape == shape
    full["state"] = {name: hidden(entry) for name, entry in full["state"].items()}
    torch.save(saved, tmp_path / "hidden.pt")
    units = source / "units.json"
    fsdpckpt.convert(
        tmp_path / "hidden.pt", tmp_path / "ranks", to="flattened", world_size=4, units=units, key_type="id"
    )
    assert_held(tmp_path / "ranks", 4, orig=orig)


@pytest.mark.parametrize("orig", [False, True])
def test_slices_that_cut_blocks_are_refused_with_the_numbers_of_ranks_that_work(orig: bool, tmp_path: Path) -> None:
    source = save(tmp_path / "source", 2, orig=orig)
    with pytest.raises(NeedsInformationError, match="would cut blocks of bitsandbytes' 8-bit states") as raised:
        fsdpckpt.convert(source, tmp_path / "five", to="flattened", world_size=5)
    assert "w: the slice of rank 1 begins at element 615, no multiple of 256" in raised.value.details
    assert raised.value.next_step == "--world-size with a number that works for all states: 1, 2, 3, 4, 6, 12"
    cut = save(tmp_path / "cut", 5, orig=orig)
    with pytest.raises(SourceUnsupportedError, match="begin inside blocks of bitsandbytes' 8-bit states"):
        fsdpckpt.convert(cut, tmp_path / "two", to="flattened", world_size=2)
    notes = [note.message for note in fsdpckpt.inspect(cut).checkpoint.notes]
    assert any("keyed by id: slices begin inside blocks of bitsandbytes' 8-bit states" in note for note in notes)


@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_shards_would_part_codes_from_their_scales(container: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", 2, orig=True)
    fsdpckpt.convert(source, tmp_path / "full.pt", to="full", key_type="name")
    one = torch.load(tmp_path / "full.pt", weights_only=True)["optimizer"]["state"]["w"]
    by_id = {"state": {0: one}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": {"w": torch.ones(SHAPES["w"])}, "optimizer": by_id}, tmp_path / "by_id.pt")
    by_id["state"] = {0: hidden(one)}
    torch.save({"model": {"w": torch.ones(SHAPES["w"])}, "optimizer": by_id}, tmp_path / "hidden.pt")
    for name, key in (("source", "0"), ("full.pt", "w"), ("by_id.pt", "0"), ("hidden.pt", "0")):
        sharded: dict[str, Any] = {"to": "sharded", "container": container}
        with pytest.raises(SourceUnsupportedError, match="would not hold whole blocks") as raised:
            fsdpckpt.convert(tmp_path / name, tmp_path / "two", **sharded, world_size=2)
        assert raised.value.key == f"{key}.state1"
        fsdpckpt.convert(tmp_path / name, tmp_path / f"one-{key}-{Path(name).stem}", **sharded, world_size=1)


@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_hidden_states_of_32_bits_are_cut_like_their_parameter(container: str, tmp_path: Path) -> None:
    entry = {"step": 2, **{state: torch.randn(7, 3) for state in ("state1", "state2")}}
    optimizer = {"state": {"w": hidden(entry)}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    torch.save({"model": {"w": torch.ones(7, 3)}, "optimizer": optimizer}, tmp_path / "full.pt")
    target = tmp_path / "target"
    fsdpckpt.convert(tmp_path / "full.pt", target, to="sharded", container=container, world_size=2)
    optim = fsdpckpt.inspect(target).checkpoint.optim
    assert optim is not None
    written = optim.state["w"]["state1"]
    assert isinstance(written, Tensor)
    assert written.chunks.size.tolist() == [[4, 3], [3, 3]]
    fsdpckpt.convert(target, tmp_path / "back.pt", to="full")
    back = torch.load(tmp_path / "back.pt", weights_only=True)["optimizer"]["state"]["w"]
    require_parts(back, {state: entry[state] for state in ("state1", "state2")})


def test_scales_are_not_cast(tmp_path: Path) -> None:
    source = save(tmp_path / "source", 2, orig=False)
    with pytest.raises(UsageError, match=r"cannot cast 0\.absmax1: it scales bitsandbytes' 8-bit states"):
        fsdpckpt.convert(source, tmp_path / "three", to="flattened", world_size=3, optim_dtype="bfloat16")


def test_ranks_that_differ_in_their_bits_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "source", 2, orig=True)
    path = source / "optim_world_size_2_rank_1.pt"
    saved = torch.load(path, weights_only=True)
    saved["state"][2] = hidden({"step": 2, **quantized(torch.ones(10), "1"), **quantized(torch.ones(10), "2")})
    torch.save(saved, path)
    with pytest.raises(SourceUnsupportedError, match=r"state1 of bitsandbytes is float32, and uint8 on rank 1"):
        fsdpckpt.convert(source, tmp_path / "three", to="flattened", world_size=3)


def test_what_each_rank_keeps_for_itself_is_refused_by_the_optimizers_name(tmp_path: Path) -> None:
    def source(name: str, group: dict[str, Any], *, rms: bool = False) -> Path:
        (tmp_path / name).mkdir()
        for rank in range(2):
            entry = {"exp_avg": torch.full((4 - rank,), 1.0), **({"RMS": torch.tensor(rank + 0.5)} if rms else {})}
            groups = [{"params": [0], **{key: value[rank] for key, value in group.items()}}]
            saved = {"state": {0: entry}, "param_groups": groups}
            torch.save(saved, tmp_path / name / f"optim_world_size_2_rank_{rank}.pt")
        units = units_of(unit("", {"w": (7,)}), use_orig_params=True)
        (tmp_path / name / "units.json").write_text(render(encode(units)))
        return tmp_path / name

    for path, words in (
        (source("prodigy", {"d_numerator": (0.1, 0.2)}), "Prodigy .prodigyopt. without fsdp_in_use=True"),
        (source("sampled", {"d_numerator": (0.1, 0.1), "slice_p": (11, 11)}), "every 11th element of its own slice"),
        (source("came", {}, rms=True), "CAME keeps the root mean square of a rank's own slice"),
    ):
        with pytest.raises(SourceUnsupportedError, match=f"(?s){words}.*only='model' converts the model alone"):
            fsdpckpt.convert(path, tmp_path / "target", to="flattened", world_size=3)
