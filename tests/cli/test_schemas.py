"""Every JSON document a command prints follows the schema that it names."""

from __future__ import annotations

import json
import zipfile
from importlib import resources
from pathlib import Path

import pytest

from tests.cli.conftest import Run

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: the schemas were not tested")

SCHEMAS = resources.files("fsdpckpt.cli") / "schemas"


def checked(text: str) -> dict[str, object]:
    """The document, which names its schema and follows it."""
    document: dict[str, object] = json.loads(text)
    named = document.get("schema")
    if named is None:
        assert (document["format"], document["version"]) == ("fsdpckpt-units", 1)
        named = "fsdpckpt/units/1"
    schema = json.loads((SCHEMAS / f"{str(named).split('/')[1]}.json").read_text())
    assert named == "fsdpckpt/units/1" or schema["title"] == named
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def test_the_schemas_are_schemas() -> None:
    names = sorted(path.name for path in SCHEMAS.iterdir())
    expected = "convert diff each error formats incomplete inspect run units verify"
    assert names == [f"{name}.json" for name in expected.split()]
    for name in names:
        jsonschema.Draft202012Validator.check_schema(json.loads((SCHEMAS / name).read_text()))


@pytest.mark.parametrize("form", ["full.pt", "dcp", "ranks", "flat", "weights"])
def test_the_documents_of_every_command_follow_their_schemas(form: str, run: Run, saved: Path, tmp_path: Path) -> None:
    more = {
        "full.pt": (),
        "dcp": ("--to", "sharded", "--world-size", "2", "--key-type", "name"),
        "ranks": ("--to", "sharded", "--world-size", "2", "--container", "torch", "--buffers", "none"),
        "flat": ("--to", "flattened", "--world-size", "2", "--unit", "none", "--use-orig-params", "--buffers", "none"),
        "weights": ("--container", "safetensors", "--only", "model"),
    }
    target = tmp_path / form
    for last in (("--dry-run",), ()):
        done = run("convert", saved, target, *more[form], *last, "--json", "-q")
        assert done.code == 0, done.err + done.out
        assert checked(done.out)["dry_run"] is bool(last)
    assert checked(run("inspect", target, "--json", "--ranks", "--stats").out)["source"] == str(target)
    assert checked(run("verify", target, "--json", "--digests", "--finite").out)["whole"] is True
    assert "counts" in checked(run("diff", saved, target, "--json", "--only", "model").out)


def test_the_documents_of_a_run_and_of_an_incomplete_checkpoint_follow_their_schemas(
    run: Run, saved: Path, tmp_path: Path
) -> None:
    ranks = ("--to", "sharded", "--container", "torch", "--world-size", "2", "--buffers", "none")
    for step in (1, 2):
        assert run("convert", saved, tmp_path / "run" / f"step-{step}", *ranks).code == 0
    (tmp_path / "run" / "step-2" / "optim_world_size_2_rank_1.pt").unlink()
    done = run("inspect", tmp_path / "run", "--json")
    assert (done.code, checked(done.out)["schema"]) == (0, "fsdpckpt/run/1")
    done = run("inspect", tmp_path / "run" / "step-2", "--json")
    assert (done.code, checked(done.out)["schema"]) == (3, "fsdpckpt/incomplete/1")
    assert list(checked(done.out)["readable"]) == ["model"]  # type: ignore[call-overload]


def test_documents_of_what_went_wrong_follow_their_schemas(run: Run, saved: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pt"
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 255
    damaged.write_bytes(data)
    assert checked(run("diff", saved, damaged, "--json").out)
    assert checked(run("verify", damaged, "--json").out)
    for arguments, code in (
        (("inspect", tmp_path / "nothing"), 3),
        (("convert", saved, saved), 2),
        (("convert", saved, tmp_path / "flat", "--to", "flattened", "--world-size", "2"), 4),
        (("convert", saved, damaged), 5),
        (("inspect", "--no-such-option"), 2),
    ):
        done = run(*arguments, "--json")
        assert done.code == code
        error = checked(done.out)["error"]
        assert isinstance(error, dict)
        assert error["exit_code"] == code


@pytest.mark.parametrize("damage", ["missing", "truncated", "removed", "no checkpoint", "unsafe"])
def test_verify_says_of_a_source_that_it_cannot_read_that_it_is_not_whole(
    damage: str, run: Run, saved: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run("convert", saved, out, "--to", "sharded", "--world-size", "2").code == 0
    path = out / "__1_0.distcp"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:700])
    else:
        out = tmp_path / "other"
        if damage == "no checkpoint":
            out.write_text("notes")
        elif damage == "unsafe":
            out.write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    done = run("verify", out, "--json")
    document = checked(done.out)
    assert (done.code, document["whole"], document["schema"]) == (3, False, "fsdpckpt/verify/1")
    assert isinstance(document["problems"], list) and isinstance(document["error"], dict)
    assert document["problems"][0]["message"] and document["error"]["exit_code"] == 3
    assert done.err.startswith("error: source ")


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--to", "sharded", "--container", "torch", "--world-size", "5"], "model_*_rank_{}.pt"),
        (["--to", "sharded", "--world-size", "5"], "__{}_0.distcp"),
        (["--container", "safetensors", "--only", "model", "--max-shard-size", "60"], "model-0000{}-*.safetensors"),
    ],
    ids=["torch", "dcp", "safetensors"],
)
@pytest.mark.parametrize("listed", [True, False])
def test_verify_lists_every_damaged_file_of_a_source_that_it_cannot_read_and_each_once(
    options: list[str], pattern: str, listed: bool, run: Run, saved: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run("convert", saved, out, *options).code == 0
    missing, short, torn = (next(out.glob(pattern.format(number))) for number in (1, 2, 3))
    for path, nbytes in ((short, 70), (torn, torn.stat().st_size // 2)):
        path.write_bytes(path.read_bytes()[:nbytes])
    flipped = next(out.glob("optim_*_rank_4.pt"), None)
    if flipped is not None:  # the other containers have no checksums of their own
        data = bytearray(flipped.read_bytes())
        with zipfile.ZipFile(flipped) as archive:
            data[data.index(max((archive.read(name) for name in archive.namelist() if "/data/" in name), key=len))] ^= 1
        flipped.write_bytes(data)
    if not listed:
        (out / "fsdpckpt.json").unlink()
    first = run("verify", out, "--json")
    missing.unlink()
    for done, names in ((first, [short, torn]), (run("verify", out, "--json"), [missing, short, torn])):
        problems = checked(done.out)["problems"]
        assert done.code == 3 and isinstance(problems, list)
        expected = [path for path in (*names, flipped) if path is not None]
        assert sorted(one["file"] for one in problems) == sorted(map(str, expected)), problems
        for path in expected:
            assert next(one for one in problems if path.name in one["message"])["file"] == str(path), problems
    assert "1 " in done.err and ("damaged" in done.err or "truncated" in done.err)


def test_a_units_file_follows_its_schema(run: Run, saved: Path) -> None:
    done = run("units", "--from", saved, "--unit", "none", "--use-orig-params", "--buffers", "none", "--json")
    assert done.code == 0, done.err
    assert checked(done.out)["units"]
