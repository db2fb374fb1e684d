"""``inspect``, ``convert``, ``diff`` and ``verify`` on files that torch saved: what is printed, exit codes, JSON."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.cli import diff
from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.verify.difference import ComparedKey, Difference
from tests.cli.conftest import Run, training_state
from tests.oracle.compare import identical


def test_inspect_shows_a_summary_then_a_line_a_key(run: Run, saved: Path) -> None:
    done = run("inspect", saved)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == f"{saved}: full, torch (plain), 1 rank"
    assert "model: 6 tensors, 80 elements, 320 B, float32" in lines
    assert "optim: keyed by id, 18 tensors, 166 elements, 664 B, float32" in lines
    assert "problems: none" in lines
    assert any(line.startswith("  0: 6 parameters; lr=0.01, betas=(0.9, 0.999)") for line in lines)
    assert "  epoch = 4" in lines
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == ["section", "key", "dtype", "shape", "bytes", "placement"]
    assert [line.split()[:2] for line in table[1:3]] == [["model", "0.weight"], ["model", "0.bias"]]
    assert len(table) == 1 + 24


def test_inspect_json_is_the_contracts_document(run: Run, saved: Path) -> None:
    done = run("inspect", saved, "--json", "--ranks")
    document = json.loads(done.out)
    about = ("layout", "container", "key_type", "world_size")
    assert [document[name] for name in about] == ["full", "torch", "id", 1]
    assert document["sections"]["optim"]["tensors"] == 18
    first = document["tensors"][0]
    expected = {
        "section": "model", "param": "0.weight", "state": None, "key": "0.weight",
        "dtype": "float32", "shape": [7, 5], "numel": 35, "nbytes": 140, "placement": "whole",
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected
    (chunk,) = first["pieces"]
    data = saved.read_bytes()[chunk["offset"] : chunk["offset"] + chunk["nbytes"]]
    assert identical(
        torch.frombuffer(bytearray(data), dtype=torch.float32).view(7, 5),
        training_state()["model"]["0.weight"],  # type: ignore[index]
    )
    assert (chunk["rank"], chunk["file"], chunk["box"]) == (0, str(saved), [[0, 7], [0, 5]])
    moment = next(row for row in document["tensors"] if row["key"] == "3.exp_avg_sq")
    assert (moment["section"], moment["param"], moment["state"]) == ("optim", "3", "exp_avg_sq")
    assert document["param_groups"][0]["params"] == [0, 1, 2, 3, 4, 5]
    assert document["extra"] == [{"key": "epoch", "type": "int", "value": 4}]
    assert document["problems"] == []
    assert "pieces" not in json.loads(run("inspect", saved, "--json").out)["tensors"][0]
    line = run("inspect", saved, "--ranks", "--keys", "2.bias").out.splitlines()[-1].split()
    assert line[:2] == ["model", "2.bias"] and "step-2.pt" in line and int(line[-1]) > 0


def test_names_only_is_for_pipes(run: Run, saved: Path) -> None:
    done = run("inspect", saved, "--names-only", "--section", "model")
    assert done.out.splitlines() == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    done = run("inspect", saved, "--names-only", "--keys", "*.exp_avg", "--keys", "2.w*")
    assert done.out.splitlines() == ["2.weight", *(f"{n}.exp_avg" for n in range(6))]
    unmatched = run("inspect", saved, "--names-only", "--keys", "nothing*")
    assert (unmatched.code, unmatched.out) == (2, "")
    assert "--keys 'nothing*' matches no key" in unmatched.err
    assert "has no tensors in section extra" in run("inspect", saved, "--section", "extra").err
    assert run("inspect", saved, "--section", "extra", "-q").err == ""


def test_stats_are_those_of_the_tensors(run: Run, saved: Path) -> None:
    document = json.loads(run("inspect", saved, "--stats", "--section", "model", "--json").out)
    weight = training_state()["model"]["2.weight"].double()  # type: ignore[index]
    row = next(row for row in document["tensors"] if row["key"] == "2.weight")
    assert row["stats"]["max"] == weight.max().item()
    assert row["stats"]["norm"] == pytest.approx(weight.norm().item())
    assert row["stats"]["std"] == pytest.approx(weight.std(correction=0).item())
    table = run("inspect", saved, "--stats", "--keys", "2.weight").out.splitlines()
    assert f"{weight.min().item():.5g}" in table[-1].split()


def test_diff_of_equal_checkpoints_is_quiet_about_differences(run: Run, saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.pt"
    torch.save(training_state(), other)
    done = run("diff", saved, other)
    assert (done.code, done.out) == (0, "")
    assert "0 differ" in done.err
    everything = run("diff", saved, other, "--all").out.splitlines()
    assert len(everything) > 24
    assert {line[0] for line in everything} == {"="}
    state: Any = training_state()
    state["model"]["2.bias"] += 1e-6
    torch.save(state, other)
    assert [run("diff", saved, other, *options).code for options in ((), ("--atol", "1e-4"))] == [1, 0]


def test_diff_shows_a_sigil_a_key_and_exits_1(run: Run, saved: Path, tmp_path: Path) -> None:
    state = training_state()
    model: dict[str, torch.Tensor] = state["model"]  # type: ignore[assignment]
    model["2.bias"][1] += 0.25
    model["new"] = model.pop("0.bias")
    state["epoch"] = 5
    torch.save(state, tmp_path / "b.pt")
    done = run("diff", saved, tmp_path / "b.pt")
    assert done.code == 1
    changed = done.out.splitlines()
    assert changed[0] == "- model 0.bias  tensor float32 [7]"
    assert changed[1].startswith("* model 2.bias  1 of 3 elements differ, first at [1], by up to 0.25")
    assert changed[2:] == ["* extra epoch  4 vs 5", "+ model new  tensor float32 [7]"]
    document = json.loads(run("diff", saved, tmp_path / "b.pt", "--json").out)
    counts = {"same": len(document["entries"]) - 4, "differ": 2, "only_a": 1, "only_b": 1, "not_counted": 0}
    assert document["counts"] == counts
    assert document["same"] is False
    assert run("diff", saved, tmp_path / "b.pt", "--only", "optim").code == 0
    assert run("diff", saved, tmp_path / "b.pt", "--only", "model", "--atol", "0.5").code == 1


def random_states(directory: Path, ranks: int, **more: object) -> Path:
    """A model, and the random states of each rank."""
    directory.mkdir()
    for rank in range(ranks):
        torch.save({"w": torch.full((2, 2), 3.0)}, directory / f"model_world_size_{ranks}_rank_{rank}.pt")
        extra = {"rng": {"cpu": torch.full((16,), rank, dtype=torch.uint8), "python": [3, rank]}, "epoch": 2, **more}
        torch.save(extra, directory / f"extra_state_world_size_{ranks}_rank_{rank}.pt")
    return directory


def test_on_a_terminal_layers_that_differ_alike_and_a_missing_section_are_one_line() -> None:
    entries = [
        ComparedKey("-", Section.OPTIM, f"layers.{n}.w.{state}", "tensor") for n in range(3) for state in ("a", "b")
    ]
    entries += [ComparedKey("*", Section.MODEL, f"layers.{n}.w", "shape [2] vs [3]") for n in range(3)]
    entries += [ComparedKey("=", Section.MODEL, "norm.w")]
    result = Difference(tuple(entries), (), ("one", "other"))
    shown = "\n".join(map(str, diff._lines(result, 80, everything=False)))
    assert "- optim  all 6 keys, only in A" in shown
    assert "* model layers.{0..2}.w  x3  shape [2] vs [3]" in shown
    assert len(list(diff._lines(result, None, everything=False))) == 9, "a pipe gets every key"
    assert len(list(diff._lines(result, 80, everything=True))) == 10
    assert result.summary == "1 same, 3 differ, 6 only in one, 0 only in other"


def test_random_states_of_ranks_that_one_side_lacks_are_listed_and_are_no_difference(run: Run, tmp_path: Path) -> None:
    three, two = random_states(tmp_path / "three", 3), random_states(tmp_path / "two", 2)
    done = run("diff", three, two)
    assert done.code == 0
    assert done.out == "- extra rank2  4 values of ranks, only in A, not counted\n"
    assert run("diff", two, three).out == "+ extra rank2  4 values of ranks, only in B, not counted\n"
    strict = run("diff", three, two, "--strict")
    assert strict.code == 1
    assert strict.out.splitlines()[0] == "- extra rank2.rng.cpu  tensor uint8 [16]"
    document = json.loads(run("diff", three, two, "--json").out)
    assert (document["same"], document["counts"]["only_a"], document["counts"]["not_counted"]) == (True, 0, 4)
    assert {entry["rank"] for entry in document["entries"] if not entry["counts"]} == {2}


def test_random_states_of_a_rank_that_both_have_count(run: Run, tmp_path: Path) -> None:
    one, other = random_states(tmp_path / "one", 2), random_states(tmp_path / "other", 2)
    torch.save(
        {"rng": {"cpu": torch.full((16,), 9, dtype=torch.uint8)}, "epoch": 2},
        other / "extra_state_world_size_2_rank_1.pt",
    )
    done = run("diff", one, other)
    assert done.code == 1
    shown = {line.split()[2]: line[0] for line in done.out.splitlines()}
    assert shown["rank1.rng.cpu"] == "*"
    assert shown["rank1.rng.python.1"] == "-"  # both have rank 1, and one of them lost this


def test_verify_reports_an_undamaged_file_as_whole(run: Run, saved: Path) -> None:
    done = run("verify", saved)
    assert (done.code, done.out) == (0, "")
    assert f"{saved} is whole: 24 tensors" in done.err
    assert run("verify", saved, "-q").err == ""
    lines = run("verify", saved, "--digests", "-q").out.splitlines()  # the data on stdout
    weight = training_state()["model"]["0.weight"]  # type: ignore[index]
    assert lines[0] == f"{hashlib.sha256(weight.numpy().tobytes()).hexdigest()}  model 0.weight float32 [7, 5]"
    assert len(lines) == 24


@pytest.mark.parametrize("options", [(), ("--stats", "--keys", "*weight*")], ids=" ".join)
def test_the_chunks_that_are_printed_are_those_that_python_has(run: Run, options: tuple[str, ...]) -> None:
    sharded = str(Path(__file__).parents[1] / "golden" / "torch-2.4" / "f2_default" / "ckpt")
    printed = json.loads(run("inspect", sharded, "--json", "--ranks", *options).out)
    description = fsdpckpt.inspect(sharded, keys=options[2:], ranks=True, stats=bool(options))
    found = description.to_json(ranks=True)
    assert {name: value for name, value in printed.items() if name != "schema"} == found
    assert [list(row) for row in printed["tensors"]] == [list(row) for row in found["tensors"]]  # type: ignore[union-attr,call-overload]
    assert any(len(row["pieces"]) > 1 for row in printed["tensors"])
    files = [file.path for file in description.checkpoint.files]
    for row, named in zip(printed["tensors"], description.tensors, strict=True):
        chunks = named.tensor.chunks
        for at, piece in enumerate(row["pieces"]):
            start, size = chunks.start[at].tolist(), chunks.size[at].tolist()
            assert piece == {
                "rank": chunks.rank[at],
                "file": files[chunks.file[at]],
                "offset": chunks.offset[at],
                "nbytes": math.prod(size) * named.tensor.dtype.itemsize,
                "box": [[begin, begin + length] for begin, length in zip(start, size, strict=True)],
            }
        assert len(row["pieces"]) == len(chunks.rank)


def test_verify_finds_a_flipped_byte_that_torch_loads_silently(run: Run, saved: Path) -> None:
    chunk = json.loads(run("inspect", saved, "--json", "--ranks").out)["tensors"][0]["pieces"][0]
    data = bytearray(saved.read_bytes())
    data[chunk["offset"] + 3] ^= 1
    saved.write_bytes(data)
    torch.load(saved, weights_only=True)
    done = run("verify", saved)
    assert done.code == 1
    assert done.out.startswith("problem: checksum: model 0.weight: ")
    document = json.loads(run("verify", saved, "--json").out)
    assert [(problem["kind"], problem["key"]) for problem in document["problems"]] == [("checksum", "0.weight")]
    assert document["whole"] is False


def test_verify_finite_leaves_out_masks_unless_they_are_named(run: Run, tmp_path: Path) -> None:
    model = {"a.weight": torch.ones(2, 2), "attn.mask": torch.full((3, 3), float("-inf"))}
    model["attn.mask"][0, 0] = float("nan")
    state = {"a.weight": {"step": torch.tensor(2.0), "exp_avg": torch.ones(2, 2)}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": ["a.weight"]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "named.pt")
    done = run("verify", tmp_path / "named.pt", "--finite")
    assert done.code == 0
    assert "1 model tensor seems to be a buffer, not searched for NaN and Inf: attn.mask" in done.err
    named = run("verify", tmp_path / "named.pt", "--finite", "--include", "*mask")
    assert (named.code, "attn.mask: 1 NaN and 8 Inf of 9 elements" in named.out) == (1, True)
    torch.save(model, tmp_path / "alone.pt")  # nothing says which of them is a buffer
    assert [run("verify", tmp_path / "alone.pt", *options).code for options in ((), ("--finite",))] == [0, 1]
    assert run("verify", tmp_path / "alone.pt", "--finite", "--exclude", "*.mask").code == 0
    assert run("verify", tmp_path / "alone.pt", "--exclude", "*.mask").code == 2


def test_states_that_share_bytes_are_shown_by_inspect_found_by_verify_and_refused_by_convert(
    run: Run, tmp_path: Path
) -> None:
    moment = torch.randn(4, 3)
    state = {"w": {"step": torch.tensor(2.0), "exp_avg": moment, "exp_avg_sq": moment.view(4, 3)}}
    path = tmp_path / "aliased.pt"
    torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": ["w"]}]}, path)
    assert "problem: optim w: the states exp_avg and exp_avg_sq share the same bytes" in run("inspect", path).out
    assert run("inspect", path, "--ranks").code == 0
    assert run("verify", path).code == 1
    refused = run("convert", path, tmp_path / "out.pt", "--to", "full")
    assert refused.code == 3
    assert "exp_avg and exp_avg_sq share the same bytes" in refused.err
    assert "why:" in refused.err
    assert not (tmp_path / "out.pt").exists()


def test_convert_prints_what_it_did_and_diff_agrees(run: Run, saved: Path, tmp_path: Path) -> None:
    done = run("convert", saved, tmp_path / "out", "--to", "sharded", "--world-size", "3")
    assert done.code == 0, done.err
    assert done.out.startswith(f"{tmp_path / 'out'}: sharded, dcp, 3 ranks\n")
    assert run("diff", saved, tmp_path / "out").code == 0
    document = json.loads(run("convert", saved, tmp_path / "again.pt", "--to", "full", "--json").out)
    assert (document["layout"], document["container"], document["tensors"]) == ("full", "torch", 24)
    torch.load(tmp_path / "again.pt", weights_only=True)


def test_a_dry_run_prints_the_plan_and_writes_nothing(run: Run, saved: Path, tmp_path: Path) -> None:
    done = run("convert", saved, tmp_path / "out.pt", "--only", "model", "--dtype", "bfloat16", "--dry-run")
    assert done.code == 0, done.err
    assert "read    320 B of tensor data" in done.out
    assert "nothing was written" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2.pt"]


def test_every_option_of_convert_reaches_the_conversion(run: Run, saved: Path, tmp_path: Path) -> None:
    done = run(
        "convert", saved, tmp_path / "out.pt", "--to", "full", "--container", "torch", "--only", "model",
        "--include", "*.weight", "--exclude", "1.*", "--rename", "0=first", "--add-prefix", "net.",
        "--dtype", "float16", "--max-memory", "1MiB", "--threads", "1", "--verify", "full", "-q",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.err == ""
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    original = training_state()["model"]
    assert list(loaded) == ["net.first.weight", "net.2.weight"]
    assert identical(loaded["net.2.weight"], original["2.weight"].half())  # type: ignore[index]
