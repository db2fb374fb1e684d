"""Universal checkpoints as DeepSpeed loads them: the files that it was seen to load, and what it could not load."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, NeedsInformationError, SourceUnsupportedError, UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.values import Global
from fsdpckpt.writers import WriteSpec
from fsdpckpt.writers.universal import lay_out
from tests.golden.deepspeed.resume import FSDP2, HERE, digests
from tests.materialise import materialise
from tests.oracle.compare import identical
from tests.readers.contents import opened
from tests.writers.source import Raw, Trained
from tests.writers.writer_contract import WriterContract

FLAVOR = "deepspeed-universal"
STEP = "global_step3_universal"


def torch_load(path: Path | str) -> Any:
    return torch.load(path, weights_only=True)


def test_the_bytes_are_those_that_deepspeed_loaded(tmp_path: Path) -> None:
    """``loaded.json`` was written where DeepSpeed loaded these files, and trained on with the same losses."""
    fsdpckpt.convert(str(FSDP2 / "full.pt"), str(tmp_path / "out"), flavor=FLAVOR)
    assert digests(tmp_path / "out") == json.loads((HERE / "loaded.json").read_text())


@pytest.mark.parametrize("name", ["zero1-bf16", "zero3-bf16", "zero1-elastic"])
def test_the_way_there_and_back_keeps_everything(name: str, tmp_path: Path) -> None:
    source = HERE / name / "global_step3"
    fsdpckpt.convert(str(source), str(tmp_path / "out"), flavor=FLAVOR, verify="full")
    compared = fsdpckpt.diff(str(source), str(tmp_path / "out"), strict=True)
    assert {entry.key for entry in compared.entries if entry.sigil != "="} == set()
    fsdpckpt.convert(str(tmp_path / "out"), str(tmp_path / "again"))
    assert digests(tmp_path / "again") == digests(tmp_path / "out")


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.25))
    parameter.grad = torch.randn(5, 3)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"] = {"w": saved["state"][0]}
    saved["param_groups"][0]["params"] = ["w"]
    torch.save({"model": {"w": parameter.detach()}, "optimizer": saved}, tmp_path / "a.pt")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "out", flavor=FLAVOR)
    assert fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "out").same
    fsdpckpt.convert(tmp_path / "out", tmp_path / "back.pt", to="full", verify="full")
    assert identical(torch_load(tmp_path / "back.pt")["optimizer"]["param_groups"][0]["lr"], torch.tensor(0.25))


def test_every_file_that_deepspeed_makes_is_there_with_the_same_content(tmp_path: Path) -> None:
    fsdpckpt.convert(str(HERE / "zero1-bf16" / "global_step3"), str(tmp_path / "ours"), flavor=FLAVOR)
    with tarfile.open(HERE / "zero1-bf16-universal.tar.xz") as archive:
        archive.extractall(tmp_path / "theirs", filter="data")
    theirs = {str(path.relative_to(tmp_path / "theirs")): path for path in (tmp_path / "theirs").rglob("*.pt")}
    frozen = {
        f"{STEP}/zero/{name}/fp32.pt" for name in ("adapter.weight", "head.weight", "mask")
    }  # copies of the module
    compared = 0
    for name, path in theirs.items():
        parts = name.split("/")
        if len(parts) == 4 and name not in frozen:
            one, other = torch_load(path), torch_load(tmp_path / "ours" / name)
            if isinstance(one, dict):
                assert other.keys() == one.keys() and other["cat_dim"] == one["cat_dim"]
                one, other = one["param"], other["param"]
            assert identical(one, other), name
            compared += 1
    assert compared == 60
    assert (tmp_path / "ours" / "latest_universal").read_text() == (
        tmp_path / "theirs" / "latest_universal"
    ).read_text()


def test_fp16s_loss_scaler_is_deepspeeds_object_again(tmp_path: Path) -> None:
    state = {"cur_scale": 1024.0, "dynamic": True, "cur_iter": 5, "dtype": Global("torch", "float16")}
    trained = Trained(seed=1)
    source = replace(trained.checkpoint, extra={"global_steps": 3, "loss_scaler": state, "overflow": False})
    written = {file.path: file for file in lay_out(source, WriteSpec()).files}
    assert b"DynamicLossScaler" in written[f"{STEP}/zero/optimizer_state.pt"].blob
    assert b"loss_scaler" not in written[f"{STEP}/mp_rank_00_model_states.pt"].blob
    materialise(lay_out(source, WriteSpec()), trained.raw.files, str(tmp_path / "out"))
    assert opened(tmp_path / "out").extra["loss_scaler"] == state
    mine = replace(source, extra={"loss_scaler": {"cur": 1}})  # not DeepSpeed's: stays where the user finds it
    written = {file.path: file for file in lay_out(mine, WriteSpec()).files}
    assert b"loss_scaler" in written["global_step0_universal/mp_rank_00_model_states.pt"].blob


def test_files_that_changed_places_are_found_by_the_manifest(tmp_path: Path) -> None:
    """Nothing in the files says whose they are."""
    fsdpckpt.convert(str(FSDP2 / "full.pt"), str(tmp_path / "out"), flavor=FLAVOR)
    one, other = (tmp_path / "out" / STEP / "zero" / f"blocks.{block}.up.weight" / "exp_avg.pt" for block in (0, 1))
    before = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(before)
    problems = fsdpckpt.verify(str(tmp_path / "out")).problems
    assert [problem.kind for problem in problems] == ["checksum"] * 2


def test_a_store_takes_it_and_gives_it_back() -> None:
    fsdpckpt.convert(str(FSDP2 / "full.pt"), "memory://deepspeed/universal", flavor=FLAVOR)
    assert fsdpckpt.diff(str(FSDP2 / "full.pt"), "memory://deepspeed/universal").same
    assert not fsdpckpt.verify("memory://deepspeed/universal").problems


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    raw = Raw()
    weight, tied = raw.views(*[torch.randn(3, 5)] * 2)
    moments = {"step": 3.0, "exp_avg": raw.whole(torch.randn(3, 5)), "exp_avg_sq": raw.whole(torch.randn(3, 5))}
    optim = Optimizer.of({"embed": moments}, [{"lr": 0.1, "params": ["embed"]}])
    source = replace(
        Trained(seed=1).checkpoint, model=ModelState({"head": tied, "embed": weight}), optim=optim, extra={}
    )
    materialise(lay_out(source, WriteSpec()), raw.files, str(tmp_path / "out"))
    state = torch_load(tmp_path / "out" / "global_step0_universal" / "mp_rank_00_model_states.pt")
    assert state["shared_params"] == {"head": "embed"}
    assert {name: tuple(value.shape) for name, value in state["module"].items()} == {"head": (0,), "embed": (0,)}
    fsdpckpt.convert(str(tmp_path / "out"), str(tmp_path / "full.pt"))
    model = torch_load(tmp_path / "full.pt")["model"]
    assert list(model) == ["head", "embed"] and identical(model["head"], model["embed"])


def test_tied_weights_of_flat_parameters_are_written_once_without_an_optimizer(tmp_path: Path) -> None:
    """Names that units record as shared have one ``Tensor``."""
    raw = Raw()
    weight, bias = raw.whole(torch.randn(3, 5)), raw.whole(torch.randn(3))
    source = replace(
        Trained(seed=1).checkpoint,
        model=ModelState({"embed": weight, "bias": bias, "head": weight}),
        optim=None,
        extra={},
    )
    target = lay_out(source, WriteSpec())
    written = {file.path.split("/zero/")[1] for file in target.files if "/zero/" in file.path}
    assert written == {"embed/fp32.pt", "bias/fp32.pt"}
    materialise(target, raw.files, str(tmp_path / "out"))
    state = torch_load(tmp_path / "out" / "global_step0_universal" / "mp_rank_00_model_states.pt")
    assert state["shared_params"] == {"head": "embed"}


def changed(**more: Any) -> Checkpoint:
    """The trained checkpoint with other fields; a function makes one of the field of old."""
    held = Trained(seed=1).checkpoint
    return replace(held, **{key: new(getattr(held, key)) if callable(new) else new for key, new in more.items()})


def with_state(**more: Any) -> Callable[[Optimizer], Optimizer]:
    """Each parameter has these states, too: None is its ``exp_avg``."""
    return lambda optim: optim.with_state(
        {
            key: {**entry, **{name: entry["exp_avg"] if value is None else value for name, value in more.items()}}
            for key, entry in optim.state.items()
        }
    )


def without_first(optim: Optimizer) -> Optimizer:
    return optim.with_state(dict(list(optim.state.items())[1:]))


NO_DIRECTORY, UNUSABLE = "a name that no directory can have", "5 optimizer states have an unusable name"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"optim": without_first}, NeedsInformationError, "1 parameter has no optimizer state: emb.weight"),
        ({"optim": with_state(d=0.5)}, SourceUnsupportedError, "not have its parameter's shape: emb.weight.d"),
        ({"model": None}, NeedsInformationError, "lacks 5 parameters of the optimizer: emb.weight"),
        ({"optim": lambda optim: replace(optim, groups=None)}, NeedsInformationError, "which param group"),
        *(
            ({"extra": {"global_steps": 10**digits}}, SourceUnsupportedError, "impossible step")
            for digits in (20, 300, 5000)
        ),
        *(
            ({"model": ModelState({name: Raw().whole(torch.ones(2))}), "optim": None}, SourceUnsupportedError, words)
            for words in [NO_DIRECTORY]
            for name in ("a/b", "..", "x" * 256, "optimizer_state.pt", "lone \ud800")
        ),
        *(
            ({"optim": with_state(**{state: None})}, SourceUnsupportedError, UNUSABLE)
            for state in ("fp32", "x" * 253, "a/b", "", "lone \ud800")
        ),
    ],
)
def test_what_deepspeed_could_not_load_is_refused(change: Any, error: type[FsdpckptError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        lay_out(changed(**change), WriteSpec())
    if words == "impossible step":
        assert (caught.value.key, caught.value.expected) == ("global_steps", "a number below 2^63")
    if words == UNUSABLE:
        assert caught.value.details[0] == f"emb.weight.{[*changed(**change).optim.state['emb.weight']][-1]}"


def test_a_state_with_the_longest_name_that_a_file_can_have_is_written(tmp_path: Path) -> None:
    source = changed(optim=with_state(**{"x" * 252: None}))
    materialise(lay_out(source, WriteSpec()), Trained(seed=1).raw.files, str(tmp_path / "out"))


def test_what_zero_3_does_not_restore_is_said() -> None:
    notes = [note.message for note in lay_out(Trained(seed=1).checkpoint, WriteSpec()).notes if note.kind == "zero-3"]
    assert len(notes) == 1 and "differ in" in notes[0]


def test_extras_that_deepspeed_has_other_things_for_are_left_out_and_named() -> None:
    target = lay_out(changed(extra={"module": 5, "mine": 6}), WriteSpec())
    assert [note.keys for note in target.notes if note.kind == "dropped"] == [("module",)]


def test_a_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """It loads on any."""
    with pytest.raises(UsageError):
        fsdpckpt.convert(str(FSDP2 / "full.pt"), str(tmp_path / "out"), flavor=FLAVOR, world_size=4)


class TestUniversalWriter(WriterContract):
    writer = staticmethod(lay_out)
    specs = (WriteSpec(),)

    def load(self, path: str, spec: WriteSpec) -> None:
        step = Path(path) / "global_step0_universal"
        trained = Trained(seed=11, key_type="name")
        for name, states in trained.states.items():
            for state, tensor in {**states, "fp32": trained.weights[name]}.items():
                loaded = torch_load(step / "zero" / name / f"{state}.pt")
                assert identical(loaded if state == "step" else loaded["param"], tensor)
        assert torch_load(step / "mp_rank_00_model_states.pt")["epoch"] == 7
        assert torch_load(step / "zero_pp_rank_0_mp_rank_00_model_states.pt")["module"] == {}
        assert len(torch_load(step / "zero" / "optimizer_state.pt")["param_groups"]) == len(trained.groups)

    def test_a_model_alone_is_laid_out(self, spec: WriteSpec) -> None:
        super().test_a_model_alone_is_laid_out(spec)
        checkpoint, _ = self.source()
        names = {file.path for file in lay_out(replace(checkpoint, optim=None), spec).files}
        assert not any(name.endswith("optimizer_state.pt") for name in names)  # ZeRO 1 and 2 stop without it
