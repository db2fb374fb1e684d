"""``fsdpckpt units``: from a model on the meta device, from checkpoints real FSDP1 made, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdpckpt.flat.live.save import units_of
from fsdpckpt.ir.units_json import loads
from tests.cli.conftest import Run
from tests.oracle.flat_models import Nested, Outer, Perceptron

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = ("--model", "tests.oracle.flat_models:Nested")
WRAP = ("--wrap", "tests.oracle.flat_models:Outer", "--wrap", "tests.oracle.flat_models:Perceptron")
OTHER_MODEL = ("--model", "tests.oracle.flat_models:TiedTransformer", "--wrap", "none")
RANKS = 3


def wrapped(rank: int, *, use_orig_params: bool) -> FullyShardedDataParallel:
    """Rank ``rank`` of 3 on the fake process group, with a seeded model."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    torch.manual_seed(5)
    model = Nested()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Outer, Perceptron}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


@pytest.fixture(params=[False, True], ids=["flat", "orig"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[bool, Path, Path]]:
    """(use_orig_params, raw ``optimizer.state_dict()`` of each rank after a step, the full model before wrapping)."""
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(RANKS):
        model = wrapped(rank, use_orig_params=request.param)
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        for param in list(model.parameters()):
            if not param.numel():  # FSDP leaves gradients of parameters without elements on this rank None
                param.grad = None
        optimizer.step()
        torch.save(optimizer.state_dict(), ranks / f"optim_world_size_{RANKS}_rank_{rank}.pt")
    torch.save(Nested().state_dict(), tmp_path / "model.pt")
    yield request.param, ranks, tmp_path / "model.pt"
    dist.destroy_process_group()


def flag(use_orig_params: bool) -> str:
    return "--use-orig-params" if use_orig_params else "--no-use-orig-params"


def test_a_model_on_the_meta_device_gives_a_table(run: Run) -> None:
    done = run("units", *MODEL, *WRAP, "--no-use-orig-params", "--param-dtype", "bfloat16")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "3 units, 14 parameters, 378 elements; use_orig_params=False"
    assert [line.split() for line in lines[2:6]] == [
        ["flat", "parameter", "strategy", "parameters", "frozen", "elements", "dtype", "param_dtype"],
        ["_flat_param", "full-shard", "4", "-", "66", "float32", "bfloat16"],
        ["outer._flat_param", "full-shard", "4", "-", "126", "float32", "bfloat16"],
        ["outer.inner._flat_param", "full-shard", "6", "-", "186", "float32", "bfloat16"],
    ]
    assert "built by tests.oracle.flat_models:Nested on the meta device" in lines
    done = run("units", *MODEL, *WRAP)
    assert done.code == 0 and "use_orig_params=False, FSDP's own default" in done.out


def test_json_is_the_units_file_and_output_writes_it(run: Run, tmp_path: Path) -> None:
    arguments = ("units", *MODEL, *WRAP, "--use-orig-params", "--ignore", "outer.inner")
    document = json.loads(run(*arguments, "--json").out)
    done = run(*arguments, "-o", tmp_path / "new" / "u.json")
    assert (done.code, done.err) == (0, f"wrote {tmp_path / 'new' / 'u.json'}\n")
    data = (tmp_path / "new" / "u.json").read_bytes()
    assert json.loads(data) == document
    units = loads(data, source="u.json")
    assert [unit.prefix for unit in units.units] == ["", "outer"]
    assert len(units.unmanaged) == 6
    assert "outside of all units: outer.inner.norm.weight float32 [7]" in done.out.splitlines()
    assert run(*arguments, "-o", tmp_path / "v.json", "--quiet").err == ""


def test_output_of_the_users_code_stays_out_of_the_document(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module lies in the current directory, as a training script does."""
    (tmp_path / "loud_training.py").write_text(
        "import torch\nprint('importing')\n"
        "def make():\n    print('making')\n    return torch.nn.Linear(3, 5)\n"
        "def leave():\n    raise SystemExit(0)\n"
    )
    (tmp_path / "script_without_guard.py").write_text("import sys\nsys.exit('usage: ...')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    done = run("units", "--model", "loud_training:make", "--wrap", "none", "--use-orig-params", "--json")
    assert (done.code, done.err) == (0, "importing\nmaking\n")
    assert [param.shape for param in loads(done.out.encode(), source="stdout").units[0].params] == [(5, 3), (5,)]
    for name, message in {"loud_training:leave": "SystemExit", "script_without_guard:make": "usage: ..."}.items():
        done = run("units", "--model", name, "--wrap", "none", "--use-orig-params")
        assert (done.code, done.out) == (2, "")
        assert message in done.err


def test_an_existing_file_is_replaced_only_with_overwrite(run: Run, tmp_path: Path) -> None:
    arguments = ("units", *MODEL, *WRAP, "--use-orig-params", "-o", tmp_path)
    assert run(*arguments).code == 0
    before = (tmp_path / "units.json").read_bytes()
    done = run(*arguments)
    assert done.code == 5
    assert str(tmp_path / "units.json") in done.err
    assert "--overwrite" in done.err
    again = ("--strategy", "no-shard", "--overwrite")
    assert run(*arguments, *again).code == 0
    assert (tmp_path / "units.json").read_bytes() != before


@pytest.mark.parametrize("content", ['{"hidden_size": 5}', '{"units": {"format": "fsdpckpt-units", "version": 1}}'])
def test_a_file_that_is_not_a_units_file_is_never_replaced(content: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    done = run("units", *MODEL, *WRAP, "--use-orig-params", "-o", tmp_path / "config.json", "--overwrite")
    assert done.code == 5
    assert "is not a units file" in done.err
    assert (tmp_path / "config.json").read_text() == content


def test_a_checkpoint_proves_the_models_units(run: Run, trained: tuple[bool, Path, Path]) -> None:
    use_orig_params, ranks, _ = trained
    done = run("units", *MODEL, *WRAP, flag(use_orig_params), "--from", ranks, "--json")
    assert done.code == 0, done.err
    units = loads(done.out.encode(), source="stdout")
    live = units_of(wrapped(0, use_orig_params=use_orig_params))
    assert (units.units, units.parameters) == (live.units, live.parameters)
    assert len(json.loads(done.out)["how"]) > 2


@pytest.mark.parametrize("wrong", ["one class less", "the other alignment", "another model"])
def test_units_the_checkpoint_contradicts_are_refused(
    wrong: str, run: Run, trained: tuple[bool, Path, Path], tmp_path: Path
) -> None:
    use_orig_params, ranks, _ = trained
    arguments = {
        "one class less": (*MODEL, *WRAP[:2], flag(use_orig_params)),
        "the other alignment": (*MODEL, *WRAP, flag(not use_orig_params)),
        "another model": (*OTHER_MODEL, flag(use_orig_params)),
    }[wrong]
    done = run("units", *arguments, "--from", ranks, "-o", tmp_path / "u.json")
    assert done.code == 3, done.out
    assert "the units of the model are not those of" in done.err
    assert not (tmp_path / "u.json").exists()


def test_a_full_checkpoint_proves_names_and_shapes_of_the_models_units(run: Run, tmp_path: Path) -> None:
    torch.save(Nested().state_dict(), tmp_path / "model.pt")
    done = run("units", *MODEL, *WRAP, "--use-orig-params", "--from", tmp_path / "model.pt")
    assert done.code == 0
    assert f"names and shapes are those of {tmp_path / 'model.pt'}" in done.out
    done = run("units", *OTHER_MODEL, "--use-orig-params", "--from", tmp_path / "model.pt")
    assert done.code == 3
    assert "embed.weight is in the units, not in" in done.err


def test_a_checkpoint_with_a_reference_gives_its_units(run: Run, trained: tuple[bool, Path, Path]) -> None:
    use_orig_params, ranks, reference = trained
    globs = ("--unit", "outer", "--unit", "outer.inner")
    done = run("units", "--from", ranks, "--reference", reference, *globs, "--json")
    assert done.code == 0, done.err
    live = units_of(wrapped(0, use_orig_params=use_orig_params))
    found = loads(done.out.encode(), source="stdout")
    assert found.use_orig_params is use_orig_params
    assert [(unit.prefix, unit.params) for unit in found.units] == [(u.prefix, u.params) for u in live.units]
    assert found.parameters == live.parameters


def test_a_units_file_is_proved_by_the_checkpoint(run: Run, trained: tuple[bool, Path, Path], tmp_path: Path) -> None:
    use_orig_params, ranks, _ = trained
    path = tmp_path / "u.json"
    assert run("units", *MODEL, *WRAP, flag(use_orig_params), "-o", path).code == 0
    assert run("units", "--from", ranks, "--units", path).code == 0
    document = json.loads(path.read_text())
    document["units"][0]["params"][1]["shape"] = [8]
    path.write_text(json.dumps(document))
    done = run("units", "--from", ranks, "--units", path)
    assert done.code == 3
    document["units"][0]["strategy"] = "all"
    path.write_text(json.dumps(document))
    done = run("units", "--from", ranks, "--units", path)
    assert (done.code, "units[0].strategy" in done.err) == (3, True)


def test_a_checkpoint_alone_does_not_show_what_was_wrapped(run: Run, trained: tuple[bool, Path, Path]) -> None:
    _, ranks, reference = trained
    done = run("units", "--from", ranks)
    assert done.code == 4
    assert "--reference" in done.err
    done = run("units", "--from", ranks, "--reference", reference, "--json")
    assert done.code == 4
    assert "--unit" in json.loads(done.out)["error"]["next_step"]
