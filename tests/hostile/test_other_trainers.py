"""Damaged and hostile files of other trainers' formats: refused with exit code 3, or what was damaged is not needed."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from fsdpckpt.ir.account import Fate
from tests.fuzz.corpus import GOLDEN
from tests.fuzz.layouts import BESIDE, SAVED, WRITTEN, files_of, is_torch, put
from tests.hostile.opcodes import P2, call_forms
from tests.hostile.pickles import GADGETS
from tests.hostile.test_files import TERABYTE, refusal, sparse
from tests.oracle.compare import differences
from tests.readers.junk import save

pytestmark = pytest.mark.timeout(120)

KINDS = {
    "zero2": "deepspeed/zero2-fp32",
    "zero3": "deepspeed/zero3-bf16",
    "universal": "deepspeed/zero1-bf16-universal.tar.xz",
    "pipeline": "deepspeed/pipeline.tar.xz",
    "expert-pipeline": "deepspeed/expert-pipeline.tar.xz",
    "autotp": "deepspeed/autotp-zero3.tar.xz",
    "experts": "deepspeed/experts.tar.xz",
    "torch_dist": "megatron/uneven.tar.xz",
    "torch_checkpointing": "torch_checkpointing/torch",
    "fsdp_dtensor": "megatron/fsdp-dtensor.tar.xz",
    "pipeline-bf16": "deepspeed/pipeline-bf16.tar.xz",
    "autoep": "deepspeed/autoep-zero1.tar.xz",
    "autoep-zero3": "deepspeed/autoep-zero3.tar.xz",
    "autoep-universal": "deepspeed/autoep-zero3-universal.tar.xz",
}
TINY_KINDS = ("nanotron", "megatron-buffers", "megatron-grid", "plain-experts", "skyrl", "automodel", "llamafactory")
MOST_FILES = 4  # of a checkpoint that are damaged: a universal one has many that are alike


def checkpoint(kind: str, directory: Path) -> Path:
    if kind in TINY_KINDS:
        return put(files_of(kind), directory / "run")
    source = GOLDEN / KINDS[kind]
    if source.is_dir():
        path = shutil.copytree(source, directory / "run")
    else:
        with tarfile.open(source) as archive:
            archive.extractall(directory / "run", filter="data")
        path = next(
            each.parent
            for each in (directory / "run").rglob("*")
            if each.name in ("latest", "latest_universal", ".metadata", "zero")
        )
    (path / "truth.pt").unlink(missing_ok=True)
    return path


def damages(file: Path, generator: random.Random) -> Iterator[tuple[str, Callable[[], object]]]:
    data = file.read_bytes()
    at, bit = generator.randrange(len(data)), 1 << generator.randrange(8)
    flipped = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
    if file.name != "metadata.pkl":  # without it, it is a checkpoint of other rank files
        yield "missing", file.unlink
    yield "half", lambda: file.write_bytes(data[: len(data) // 2])
    # Nothing says that a name in metadata was another, and only archives have checksums.
    if file.name not in (".metadata", "metadata.pkl") and file.suffix not in (".safetensors", ".json"):
        yield f"bit {bit} of {at} flipped", lambda: file.write_bytes(flipped)


def converted(source: Path, target: Path) -> Any:
    rule = ("standard",) if (source / "common.pt").exists() else ()
    target.unlink(missing_ok=True)
    fsdpckpt.convert(str(source), str(target), no_weight_decay=rule)
    return torch.load(target, weights_only=True)


@pytest.mark.parametrize("kind", [*KINDS, *TINY_KINDS])
def test_damage_is_refused_or_changes_nothing(kind: str, tmp_path: Path) -> None:
    source, target = checkpoint(kind, tmp_path), tmp_path / "full.pt"
    whole = converted(source, target)
    generator = random.Random(5)
    files = sorted(path for path in source.rglob("*") if path.is_file() and path.stat().st_size)
    read = sorted({path.name: path for path in generator.sample(files, len(files))}.values())
    refused = 0
    for file in generator.sample(read, min(MOST_FILES, len(read))):
        data = file.read_bytes()
        for what, damage in damages(file, generator):
            damage()
            try:
                found = converted(source, target)
            except FsdpckptError as error:
                assert error.exit_code == 3, (file, what, error)
                assert not target.exists(), (file, what)
                refused += 1
            else:
                assert not list(differences(found, whole, f"{file.name} {what}: "))
            file.write_bytes(data)
    assert refused > (5 if kind in KINDS else 1)


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("zero2", "global_step3/zero_pp_rank_{}_mp_rank_00_optim_states.pt", ("0", "1")),
        ("zero3", "global_step3/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", ("0", "1")),
        ("zero3", "global_step3/zero_pp_rank_{}_mp_rank_00_model_states.pt", ("1", "2")),
        ("universal", "global_step3_universal/zero/embed.weight/{}.pt", ("exp_avg", "exp_avg_sq")),
        ("universal", "global_step3_universal/zero/embed.weight/{}.pt", ("fp32", "exp_avg")),
        ("torch_dist", "__{}_0.distcp", ("0", "1")),
        ("fsdp_dtensor", "__{}_0.distcp", ("0", "1")),
        ("expert-pipeline", "global_step3/bf16_zero_pp_rank_1_mp_rank_{}_optim_states.pt", ("00", "01")),
        ("expert-pipeline", "global_step3/mp_rank_{}_model_states.pt", ("00", "01")),
        ("expert-pipeline", "global_step3/layer_0_expert_2_mp_rank_{}_model_states.pt", ("00", "01")),
        ("autoep", "global_step3/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", ("1", "3")),
        ("autoep", "global_step3/layer_{}_mp_rank_00_model_states.pt", ("0_expert_1", "0_expert_2")),
        ("autoep", "global_step3/layer_{}_mp_rank_00_model_states.pt", ("0_expert_1", "1_expert_1")),
        ("autoep-zero3", "global_step3/zero_pp_rank_{}_mp_rank_00_model_states.pt", ("0", "2")),
        ("autoep-zero3", "global_step3/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", ("0", "2")),
        ("pipeline", "global_step3/layer_{}-model_states.pt", ("01", "03")),
        ("pipeline-bf16", "global_step3/bf16_zero_pp_rank_0_mp_rank_{}_optim_states.pt", ("00", "01")),
        ("pipeline-bf16", "global_step3/mp_rank_{}_model_states.pt", ("00", "01")),
        ("autotp", "global_step3/zero_pp_rank_0_mp_rank_{}_optim_states.pt", ("00", "01")),
        ("experts", "global_step3/layer_0_expert_{}_mp_rank_00_model_states.pt", ("0", "2")),
        ("megatron-grid", "iter_0000003/mp_rank_00_{}/model_optim_rng.pt", ("000_000", "000_001")),
    ],
)
def test_files_that_change_places_are_refused(kind: str, one: str, other: tuple[str, str], tmp_path: Path) -> None:
    """Many have one length and one form: what they were called when they were saved is in them."""
    source = checkpoint(kind, tmp_path)
    first, second = (source / one.format(name) for name in other)
    data = first.read_bytes(), second.read_bytes()
    for contents in (data[::-1], (data[0], data[0])):
        first.write_bytes(contents[0])
        second.write_bytes(contents[1])
        with pytest.raises(FsdpckptError) as error:
            converted(source, tmp_path / "full.pt")
        assert error.value.exit_code == 3
        assert not (tmp_path / "full.pt").exists()


def test_the_data_of_a_file_that_is_like_another_is_checked(tmp_path: Path) -> None:
    """The second of two parameters of one shape is not parsed, only compared with the first."""
    source = checkpoint("universal", tmp_path)
    file = source / "global_step3_universal" / "zero" / "blocks.1.up.weight" / "exp_avg.pt"
    data = file.read_bytes()
    at = data.index(torch.load(file, weights_only=True)["param"].numpy().tobytes())
    file.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 1]) + data[at + 6 :])
    with pytest.raises(FsdpckptError, match=r"blocks\.1\.up\.weight/exp_avg\.pt is damaged") as error:
        converted(source, tmp_path / "full.pt")
    assert error.value.exit_code == 3
    problems = fsdpckpt.verify(str(source)).problems
    assert [problem.kind for problem in problems] == ["checksum"]


GADGETS_OF = (("posix", "system"), ("builtins", "eval"), ("numpy.testing._private.utils", "runstring"))
UNREAD = frozenset({".metadata.json", "fsdp_config.json", *BESIDE})  # copied as they are, to each rank
PICKLES = re.compile(r"\.(pt|pkl|bin|metadata)$")
WITHOUT_PICKLES = ("huggingface",)


@pytest.mark.parametrize("kind", [kind for kind in (*SAVED, *WRITTEN) if kind not in WITHOUT_PICKLES])
def test_a_pickle_that_calls_is_refused_wherever_it_lies(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out, and named, where the checkpoint is whole without it."""
    monkeypatch.chdir(tmp_path)
    path = put(files_of(kind), tmp_path / kind)
    fsdpckpt.inspect(str(path))
    pickles = {file: content for file, content in files_of(kind).items() if PICKLES.search(file) and file not in UNREAD}
    assert pickles
    for number, (file, content) in enumerate(pickles.items()):
        module, name = GADGETS_OF[number % len(GADGETS_OF)]
        called = call_forms(module, name, *GADGETS[module, name])["REDUCE"]
        if file == "metadata.pkl":  # that of another program is not loaded: this one is recognised by a word in it
            called += b"rank_to_layout_info"
        (path / file).write_bytes(called)
        if is_torch(file, content):
            with zipfile.ZipFile(path / file, "w") as archive:
                archive.writestr("a/data.pkl", called)
        if file == "meta.pt":
            left_out = fsdpckpt.inspect(str(path)).checkpoint.ledger.account.of(file)
            assert left_out is not None and left_out.fate is Fate.LEFT_OUT
        else:
            assert f"{module}.{name}" in str(refusal(path)), file
        (path / file).write_bytes(content)
    assert not (tmp_path / "CANARY").exists()


W = torch.arange(15.0)
GROUP = {"lr": 0.1, "params": [0]}
BASE = {"state": {0: {"step": 3, "exp_avg": W}}, "param_groups": [GROUP]}


def zero(directory: Path, *, shapes: Any = None, **states: Any) -> Path:
    """A step of ZeRO 2 of one rank, with one parameter."""
    held = {"base_optimizer_state": BASE, "single_partition_of_fp32_groups": [W], "group_paddings": [0]}
    shapes = shapes or [{"w": [3, 5]}]
    files = {
        "mp_rank_00_model_states.pt": {"module": dict.fromkeys(shapes[0], W.reshape(3, 5)), "param_shapes": shapes},
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {"optimizer_state_dict": {"zero_stage": 2, **held, **states}},
    }
    save(files, directory)
    return directory


def universal(directory: Path, *, shapes: Any = None) -> Path:
    files: dict[str, Any] = {
        "mp_rank_00_model_states.pt": {"module": {}, "param_shapes": shapes or [{"w": [3, 5]}]},
        "zero/optimizer_state.pt": {"param_groups": [GROUP]},
        "zero/w/fp32.pt": {"param": W.reshape(3, 5), "cat_dim": 0},
    }
    save(files, directory)
    return directory


SHAPES: list[Any] = [
    [{"w": [1 << 40, 1 << 40]}],
    [{"w": [1 << 62, 4]}],
    [{"w": [-3, -5]}],
    [{"w": [1] * 500}],
    [{"w": [3.0, 5]}],
    [{"w": [3, 5]}, {"w": [3, 5]}],
    [{"w": [3, 5], "v": [1 << 58]}],
]


@pytest.mark.parametrize("shapes", SHAPES, ids=lambda shapes: str(shapes)[:30])
@pytest.mark.parametrize("make", [zero, universal])
def test_shapes_that_are_impossible_or_said_twice_are_refused(
    make: Callable[..., Path], shapes: Any, tmp_path: Path
) -> None:
    fsdpckpt.inspect(str(make(tmp_path / "whole")))
    refusal(make(tmp_path / "damaged", shapes=shapes))


@pytest.mark.parametrize(
    "states",
    [
        {"single_partition_of_fp32_groups": [W[:14]]},
        {"single_partition_of_fp32_groups": [W, W]},
        {"single_partition_of_fp32_groups": []},
        {"param_alignment_paddings": [[1 << 60]]},
        {"single_partition_of_fp32_groups": [W[:14]], "partition_count": [1 << 58]},
        {"single_partition_of_fp32_groups": [W[:14]], "partition_count": ["x"]},
        {"base_optimizer_state": {"state": {1 << 60: {}}, "param_groups": [{"params": [1 << 60]}]}},
        {"base_optimizer_state": {"state": {0: {"exp_avg": W[:3]}}, "param_groups": [GROUP]}},
    ],
    ids=lambda states: str(states)[:60],
)
def test_partitions_that_do_not_add_up_are_refused(states: Any, tmp_path: Path) -> None:
    refusal(zero(tmp_path, **states))


@pytest.mark.parametrize("name", ["../secret", "/secret", "..", ".", "a/../../secret", "a\0b", ""])
def test_names_of_parameters_lead_nowhere(name: str, tmp_path: Path) -> None:
    """In a universal checkpoint they are names of directories."""
    source = universal(tmp_path / "step", shapes=[{name: [3, 5]}])
    save({"fp32.pt": {"param": W.reshape(3, 5), "cat_dim": 0}}, tmp_path / "step" / "secret")
    save({"fp32.pt": {"param": W.reshape(3, 5), "cat_dim": 0}}, tmp_path / "secret")
    assert "missing" in str(refusal(source))
    with pytest.raises(FsdpckptError, match="no directory can have"):  # nor are they written
        plain = zero(tmp_path / "zero", shapes=[{name: [3, 5]}])
        fsdpckpt.convert(str(plain), str(tmp_path / "out"), flavor="deepspeed-universal")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["latest", "latest_universal", "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize("text", ["../other", "/etc", "..", "", "a\0b", "\udcff", "x" * 5000, "9" * 5000])
def test_pointers_that_leave_the_directory_are_not_followed(name: str, text: str, tmp_path: Path) -> None:
    zero(tmp_path / "other")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(text.encode(errors="surrogateescape"))
    refusal(tmp_path / "run")


@pytest.mark.parametrize("kind", [*SAVED, *WRITTEN])
def test_a_terabyte_of_nothing_is_refused_unread(kind: str, tmp_path: Path) -> None:
    path = put(files_of(kind), tmp_path / kind)
    begin = {".metadata": P2, ".pkl": P2, ".json": b"{", ".safetensors": (1 << 39).to_bytes(8, "little")}  # a header's
    for file, content in files_of(kind).items():
        if file in UNREAD or (path / file).suffix not in (*begin, ".pt", "") or not content:
            continue
        start = begin.get(Path(file).suffix or Path(file).name, b"PK\3\4")
        sparse(path / file, start, TERABYTE)
        refusal(path)
        (path / file).write_bytes(content)


@pytest.mark.parametrize(
    "text",
    [
        '{"sharded_backend": "torch_dist"',
        '{"sharded_backend": ["torch_dist"]}',
        "[" * 60_000,
        json.dumps({"sharded_backend": "x" * 60_000}),
    ],
    ids=lambda text: text[:40],
)
def test_a_format_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = put(files_of("megatron"), tmp_path / "it")
    (path / "metadata.json").write_text(text)
    refusal(path)


WEIGHT = "model/a/model_w_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"
STATES = "optimizer/optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (WEIGHT, "model_w_pp-rank-0-of-1_tp-rank-1-of-999999_exp-rank-0-of-999999.safetensors"),
        (WEIGHT, "model_w_pp-rank-999998-of-2_tp-rank-1-of-2.safetensors"),
        (STATES, "optimizer_pp-0-of-999999_tp-1-of-999999_exp-0-of-999999.pt"),
        (STATES, "optimizer_pp-0-of-1_tp-2-of-2_exp-0-of-1.pt"),
    ],
)
def test_names_that_count_more_ranks_than_there_can_be_are_refused_at_once(
    file: str, name: str, tmp_path: Path
) -> None:
    """Every combination of ranks used to be looked for, a million times a million of them."""
    path = put(files_of("nanotron"), tmp_path / "it")
    (path / file).rename((path / file).parent / name)
    refusal(path)


def checkpointing(directory: Path, **changed: Any) -> Path:
    path = put(files_of("torch_checkpointing"), directory / "it")
    metadata = pickle.loads((path / "metadata.pkl").read_bytes())
    (path / "metadata.pkl").write_bytes(pickle.dumps({**metadata, **changed}))
    return path


def test_a_world_of_a_million_ranks_of_many_items_is_refused_at_once(tmp_path: Path) -> None:
    """The names of the files that each item lacks used to be made before any was missed."""
    path = checkpointing(tmp_path, world_size=1 << 20, metadata={})
    for number in range(50):
        for rank in (0, 1):
            shutil.copy(path / "step_0.pt", path / f"item{number}_{rank}.pt")
    with (path / "metadata.pkl").open("ab") as file:
        file.write(b"rank_to_layout_info")
    assert "missing" in str(refusal(path))


@pytest.mark.parametrize("shared", ["ranks", "global_shape", "mesh_data", "global_offsets"])
def test_one_long_list_in_very_many_places_is_refused_at_once(shared: str, tmp_path: Path) -> None:
    """A pickle has it once, and refers to it."""
    long: Any = tuple(range(100_000))
    if shared == "global_offsets":
        long = ((0, 0),) * 100_000
    path = put(files_of("torch_checkpointing"), tmp_path / "it")
    metadata = pickle.loads((path / "metadata.pkl").read_bytes())
    described = metadata["metadata"]["model"]["nested_path_to_metadata"]
    (group,) = described.pop('["w"]')
    cut = group["sharding_metadata"]
    if shared == "global_offsets":
        data = {**cut["data"], "global_offsets": long, "local_offsets": long, "local_sizes": long}
        cut = {"type": "default_tensor_v1", "data": data}
    elif shared != "ranks":
        inner = {"mesh_spec": {**cut["data"]["mesh_spec"], shared: long}} if shared == "mesh_data" else {shared: long}
        cut = {**cut, "data": {**cut["data"], **inner}}
    for number in range(5_000):
        fresh = {**cut, "data": {**cut["data"], "mesh_spec": dict(cut["data"]["mesh_spec"])}}
        ranks = {"ranks": long} if shared == "ranks" else {}
        described[f'["w{number}"]'] = [{**group, "sharding_metadata": fresh, **ranks}]
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    refusal(path)
