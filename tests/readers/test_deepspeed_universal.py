"""DeepSpeed's universal checkpoints: those that ``ds_to_universal.py`` made, and files that contradict each other.

Their archives with the pickle of one that was parsed are read as if they had been parsed.
"""

from __future__ import annotations

import json
import random
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, SourceIncompleteError
from fsdpckpt.formats.torch import TorchArchive, read_archive
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Object
from fsdpckpt.readers.deepspeed import DeepSpeedReader
from fsdpckpt.readers.deepspeed.universal import ArchiveCache
from fsdpckpt.storage.local import LocalFile
from fsdpckpt.testing.reader_contract import WEIGHTS, ReaderContract
from tests.cli.conftest import Run, run  # noqa: F401
from tests.golden.deepspeed.make import Net
from tests.makers import Change, Make, lose, packed, put, swap
from tests.oracle.compare import identical
from tests.readers.contents import opened
from tests.readers.junk import save
from tests.readers.test_deepspeed import GOLDEN, require_gathered, truth
from tests.refusals import Refusal, corrupt, each_of, incomplete, unrecognised

NAMES = ["zero1-bf16", "zero3-bf16"]
each = pytest.mark.parametrize("name", NAMES)
STEP = "global_step3_universal"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory of each name, as ds_to_universal.py left it."""
    top = tmp_path_factory.mktemp("universal")
    for name in NAMES:
        with tarfile.open(GOLDEN / f"{name}-universal.tar.xz") as archive:
            archive.extractall(top / name, filter="data")
    return top


def step(runs: Path, name: str, tmp_path: Path) -> Path:
    """One step's directory, to be changed."""
    return shutil.copytree(runs / name / STEP, tmp_path / STEP)


@each
def test_every_value_is_what_deepspeed_gathers_and_what_the_step_has(name: str, runs: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(str(runs / name), str(tmp_path / "full.pt"))
    state = torch.load(tmp_path / "full.pt")
    require_gathered(state, name)
    found = opened(runs / name)
    assert set(found.checksums.file.tolist()) == set(range(len(found.files)))
    assert {float(states["step"]) for states in state["optimizer"]["state"].values()} == {3}
    assert list(state["model"]) == list(Net().state_dict())
    # What it was made of has the same frozen parameters, buffers, param groups and extras.
    compared = fsdpckpt.diff(str(runs / name), str(GOLDEN / name / "global_step3"), strict=True)
    assert compared.same, compared


def test_inspect_says_what_it_is(runs: Path, run: Run) -> None:  # noqa: F811
    document = json.loads(run("inspect", runs / "zero1-bf16", "--json").out)
    assert (document["layout"], document["container"], document["flavor"]) == ("full", "torch", "deepspeed-universal")
    assert [group["weight_decay"] for group in document["param_groups"]] == [0.1, 0.01]
    notes = [note["message"] for note in document["notes"] if note["kind"] == "master-weights"]
    assert len(notes) == 1 and "not the bfloat16 copies" in notes[0]


def test_dcp_loads_it_where_it_lies(runs: Path) -> None:
    import torch.distributed.checkpoint as dcp

    weight = torch.zeros(13, 7)
    dcp.load({"model": {"embed.weight": weight}}, storage_reader=fsdpckpt.StorageReader(str(runs / "zero1-bf16")))
    assert identical(weight.flatten(), truth("zero1-bf16")["params"]["embed.weight"]["weight"])


def test_latest_is_read_before_latest_universal(runs: Path, tmp_path: Path) -> None:
    """Both are there where ds_to_universal.py ran beside the step; the universal one is named as left alone."""
    top = shutil.copytree(GOLDEN / "zero1-bf16", tmp_path / "run")
    (top / "truth.pt").unlink()
    shutil.copytree(runs / "zero1-bf16", top, dirs_exist_ok=True)
    checkpoint = opened(top)
    assert (checkpoint.flavor, checkpoint.world_size) == ("deepspeed", 3)
    assert any(STEP in note.message for note in checkpoint.notes)
    assert opened(top / STEP).flavor == "deepspeed-universal"
    shutil.rmtree(top / "global_step3")
    assert opened(top).world_size == 1


def of_step(name: str, *changes: Change, given: str = "") -> Make:
    """A maker of the directory of a step, changed."""
    return packed(GOLDEN / f"{name}-universal.tar.xz", STEP, *changes, given=given)


def elsewhere(directory: Path) -> Path:
    """A run whose pointer leads out of it."""
    packed(GOLDEN / "zero1-bf16-universal.tar.xz")(directory)
    put("run/latest_universal", f"../{STEP}")(directory)
    return directory / "run"


MODEL_1, WEIGHT = "zero_pp_rank_1_mp_rank_00_model_states.pt", "zero/embed.weight"
SWAPPED = swap(f"{WEIGHT}/exp_avg.pt", f"{WEIGHT}/exp_avg_sq.pt")  # both have the same shape
WIDER = put(f"{WEIGHT}/fp32.pt", {"param": torch.zeros(13, 8), "cat_dim": 0})
REFUSALS = (
    incomplete("a weight is missing", of_step("zero1-bf16", lose(WEIGHT)), f"{WEIGHT}/fp32.pt"),
    incomplete("a state is missing", of_step("zero1-bf16", lose(f"{WEIGHT}/exp_avg.pt")), f"{WEIGHT}/exp_avg.pt"),
    # It has parts of the frozen parameters.
    incomplete("a rank of ZeRO 3 is missing", of_step("zero3-bf16", lose(MODEL_1)), MODEL_1),
    incomplete(
        "the weights alone", of_step("zero1-bf16", given="zero"), "only the weights and states", "next: give DIR"
    ),
    corrupt("states swapped", of_step("zero1-bf16", SWAPPED), f"{WEIGHT}/exp_avg.pt", "it was saved as exp_avg_sq.pt"),
    corrupt("a weight of another shape", of_step("zero1-bf16", WIDER), "embed"),
    unrecognised("a pointer that leads out of the run", elsewhere),
)


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


def test_weights_alone_need_no_file_of_the_optimizer_and_states_do(tmp_path: Path) -> None:
    files = _files()
    del files["zero/optimizer_state.pt"]
    save(files, tmp_path)
    for state in ("step", "exp_avg"):
        with pytest.raises(SourceIncompleteError, match=r"1 file of .* is missing\n  - .*zero/optimizer_state\.pt"):
            opened(tmp_path)
        (tmp_path / "zero" / "w" / f"{state}.pt").unlink()
    found = opened(tmp_path)
    assert found.optim is None and found.model is not None and list(found.model.params) == ["w", "mask"]


def test_a_parameter_that_never_had_a_gradient_has_its_weight_alone(runs: Path, tmp_path: Path) -> None:
    """ZeRO makes no states for it, and ds_to_universal.py writes its weight (0.19)."""
    directory = step(runs, "zero1-bf16", tmp_path)
    for state in ("exp_avg", "exp_avg_sq", "step"):
        (directory / "zero" / "embed.weight" / f"{state}.pt").unlink()
    checkpoint = opened(directory)
    assert checkpoint.optim is not None and "embed.weight" not in checkpoint.optim.state
    assert [problem.key for problem in checkpoint.problems] == ["embed.weight"]


def test_the_padding_of_a_vocabulary_that_was_taken_off_is_no_contradiction(runs: Path, tmp_path: Path) -> None:
    directory = step(runs, "zero1-bf16", tmp_path)
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        content = {"param": torch.zeros(11, 7), "cat_dim": 0, "vocab_tensor": True}
        torch.save(content, directory / "zero" / "embed.weight" / f"{state}.pt")
    model = opened(directory).model
    assert model is not None
    leaf = model.params["embed.weight"]
    assert isinstance(leaf, Tensor) and leaf.shape == (11, 7)


def test_parameters_of_tensor_parallel_ranks_are_whole(tmp_path: Path) -> None:
    """Each rank's module states know its slices; ``zero/`` has whole tensors, and those of every pipeline stage."""
    files = _files()
    second = {"module": {}, "param_shapes": [{"w": [3, 5], "later": [4]}], "mp_world_size": 2}
    files |= {"mp_rank_01_model_states.pt": second, "zero/later/fp32.pt": {"param": torch.ones(4)}}
    files |= {f"zero/w/{state}.pt": {"param": torch.ones(6, 5), "cat_dim": 0} for state in ("fp32", "exp_avg")}
    save(files, tmp_path)
    model = opened(tmp_path).model
    assert model is not None
    assert {name: leaf.shape for name, leaf in model.params.items() if isinstance(leaf, Tensor)} == {
        "mask": (8,), "w": (6, 5), "later": (4,)
    }  # fmt: skip


def test_files_of_two_tensors_are_each_read_where_they_lie(tmp_path: Path) -> None:
    """Their pickles are equal, and the second tensor is not at the same distance from the first in each."""
    files = _files()
    names = [f"w{count}" for count in range(1, 17)]
    files["mp_rank_00_model_states.pt"] |= {"module": {}, "param_shapes": [{name: [3] for name in names}]}
    files["zero/optimizer_state.pt"]["param_groups"] = [{"lr": 0.1, "params": [0]}]
    weights, moments = ({name: torch.randn(3) for name in names} for _ in range(2))
    for count, name in enumerate(names, 1):
        for state, values in (("fp32", weights), ("exp_avg_sq", moments)):
            files[f"zero/{name}/{state}.pt"] = {"before": torch.ones(count), "param": values[name]}
    save({name: content for name, content in files.items() if "/w/" not in name}, tmp_path / "step")
    fsdpckpt.convert(tmp_path / "step", tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt")
    for name in names:
        assert identical(full["model"][name], weights[name])
        assert identical(full["optimizer"]["state"][name]["exp_avg_sq"], moments[name])


def test_what_a_user_keeps_under_names_of_sections_is_kept_and_named(tmp_path: Path) -> None:
    files = _files()
    files["mp_rank_00_model_states.pt"] |= {"optimizer": "mine", "optimizer_": "taken", "model": 5}
    save(files, tmp_path)
    checkpoint = opened(tmp_path)
    kept = {key: checkpoint.extra[key] for key in ("optimizer__", "optimizer_", "model_")}
    assert kept == {"optimizer__": "mine", "optimizer_": "taken", "model_": 5}
    assert len([note for note in checkpoint.notes if note.kind == "renamed"]) == 2


def test_a_step_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    save(_files() | {"zero/w/step.pt": np.float32(3.0)}, tmp_path)
    optim = opened(tmp_path).optim
    assert optim is not None
    found = optim.state["w"]["step"]
    assert isinstance(found, Object) and found.number == 3


def test_the_numbers_that_zero_3_keeps_for_all_parameters_are_states_of_each(tmp_path: Path) -> None:
    files = _files(flat=True)
    of_groups = {0: {"step": 7, "beta": 0.5, "name": "x"}, 1: {"step": 8}, -1: {"step": 9}}  # there is one group
    files["zero/optimizer_state.pt"]["optimizer_state_dict"]["state"] = of_groups
    save(files, tmp_path)
    optim = opened(tmp_path).optim
    assert optim is not None
    assert {key: value for key, value in optim.state["w"].items() if key != "exp_avg"} == {"step": 7, "beta": 0.5}


def _files(*, flat: bool = False) -> dict[str, Any]:
    """The files of a checkpoint with one weight, as plain values; ``flat``: as from ZeRO 3."""
    weight = torch.arange(15.0)
    group = {"lr": 0.1, "params": [0]}
    states: dict[str, Any] = {"ds_version": "0.19.8", "clip_grad": 1.0, "param_groups": [group]}
    if flat:
        states["optimizer_state_dict"] = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [group]}
    whole: Any = weight if flat else {"param": weight.reshape(3, 5), "cat_dim": 0}
    module = {"module": {"w": weight[:0], "mask": weight[:8] + 1}, "param_shapes": [{"w": [3, 5]}], "epoch": 3}
    files = {
        f"{'zero_pp_rank_0_' if flat else ''}mp_rank_00_model_states.pt": module,
        "zero/optimizer_state.pt": states,
        "zero/w/fp32.pt": whole,
        "zero/w/exp_avg.pt": whole,
    }
    return files if flat else {**files, "zero/w/step.pt": torch.tensor(3.0)}


class TestUniversal(ReaderContract):
    """What every reader promises."""

    reader = DeepSpeedReader()

    def save(self, directory: Path) -> Path:
        model = {name: torch.from_numpy(weight) for name, weight in WEIGHTS.items()}
        shapes = {name: tuple(weight.shape) for name, weight in model.items()}
        files: dict[str, Any] = {
            "mp_rank_00_model_states.pt": {"module": {}, "param_shapes": [shapes]},
            "zero/optimizer_state.pt": {"param_groups": [{"params": [0]}]},
        }
        for state in ("fp32", "exp_avg"):
            files |= {f"zero/{name}/{state}.pt": {"param": weight, "cat_dim": 0} for name, weight in model.items()}
        files |= {f"zero/{name}/step.pt": torch.tensor(3.0) for name in model}
        save(files, directory)
        return directory


def saved_at(path: Path, value: Any) -> LocalFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return LocalFile(str(path))


def plain(value: Any) -> object:
    if isinstance(value, StoredTensor):
        return tuple(getattr(value, name) for name in value.__slots__)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def contents(archive: TorchArchive) -> object:
    sums = archive.checksums
    columns = [column.tolist() for column in (sums.file, sums.offset, sums.nbytes, sums.crc)]
    rest = tuple(getattr(archive, name) for name in archive.__slots__ if name not in ("root", "checksums"))
    return plain(archive.root), columns, rest


def same(cache: ArchiveCache, source: LocalFile, number: int) -> None:
    """The cache reads what is parsed, or refuses it in the same words."""
    try:
        expected: object = contents(read_archive(source, number))
    except FsdpckptError as error:
        expected = error.what
    try:
        found: object = contents(cache.read(source, number))
    except FsdpckptError as error:
        found = error.what
    assert found == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"param": torch.randn(3, 5), "cat_dim": 0},
        lambda: torch.randn(7).bfloat16(),
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(9, 2)[3:],
        lambda: {"param": torch.randn(0, 3)},
        lambda: 3,
        lambda: {"one": torch.ones(2), "two": torch.ones(2)},
        lambda: {"a": [torch.ones(2)]},
        lambda: {"a": {}},
    ],
)
@pytest.mark.parametrize("sums", [True, False])
def test_what_is_read_is_what_would_be_parsed(make: Any, sums: bool, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(sums)
    try:
        sources = [
            saved_at(tmp_path / name / f"{'exp_avg' * length}.pt", make()) for length, name in enumerate("ab", 1)
        ]
    finally:
        torch.serialization.set_crc32_options(True)
    cache = ArchiveCache()
    for number, source in enumerate([*sources, *sources], 5):
        same(cache, source, number)
        root = cache.read(source, number).root
        for value in root.values() if isinstance(root, dict) else [root]:  # of which the caller may change the shape
            if isinstance(value, StoredTensor):
                value.shape = (1,)


def test_other_contents_are_not_taken_for_it(tmp_path: Path) -> None:
    values = [
        {"param": torch.randn(3, 5), "cat_dim": 0},
        {"param": torch.randn(5, 3), "cat_dim": 0},
        {"param": torch.randn(3, 5), "cat_dim": 1},
        {"param": torch.randn(3, 5), "cat_dam": 0},
        {"param": torch.randn(15), "cat_dim": 0},
        {"param": torch.ones(3, 5, dtype=torch.int32), "cat_dim": 0},
    ]
    cache = ArchiveCache()
    for number, value in enumerate(values):
        same(cache, saved_at(tmp_path / str(number) / "exp_avg.pt", value), number)


def test_every_flipped_bit_is_seen_as_by_parsing(tmp_path: Path) -> None:
    source = saved_at(tmp_path / "a" / "exp_avg.pt", {"param": torch.randn(3, 5), "cat_dim": 0})
    cache, data = ArchiveCache(), Path(source.path).read_bytes()
    same(cache, source, 0)
    generator = random.Random(3)
    path = tmp_path / "b" / "exp_avg.pt"
    path.parent.mkdir()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :])
        same(cache, LocalFile(str(path)), 0)
