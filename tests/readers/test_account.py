"""Reading is accounting: every file below a source, and every entry in it, is read, or left out by a rule."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, NeedsInformationError, SourceIncompleteError, SourceUnrecognisedError
from fsdpckpt.ir.account import Account, Fate, Rule
from fsdpckpt.ir.checkpoint import Checkpoint, Section
from fsdpckpt.ir.files import paths_in
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import walk
from fsdpckpt.readers import detect
from fsdpckpt.readers.detect import OpenOptions, open_checkpoint
from fsdpckpt.readers.parts import ReadPart
from fsdpckpt.readers.protocol import FileTable
from fsdpckpt.storage.sources import Sources
from tests.fuzz.layouts import SAVED, WRITTEN, files_of, put
from tests.makers import dcp_of, save
from tests.oracle.compare import identical
from tests.readers.contents import opened
from tests.readers.test_missing_sections import OPTIMIZER, trainer

GOLDEN = Path(__file__).parent.parent / "golden"
MODEL = {"w": torch.randn(5, 3)}


def collection(unpacked: Path) -> Iterator[Path]:
    """Every checkpoint in the repository."""
    yield from (path for path in GOLDEN.glob("*/*") if path.is_dir() and path.name != "__pycache__")
    for archive in sorted(GOLDEN.glob("*/*.tar.xz")):
        target = unpacked / archive.parent.name / archive.name.partition(".")[0]
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
        yield target


def unaccounted(path: Path, account: Account) -> list[str]:
    """The files below ``path`` of which ``account`` says nothing."""
    files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return [file for file in files if account.of(file) is None]


def places(tensors: Iterator[Tensor]) -> set[tuple[int, int]]:
    """Where the first chunk of each tensor is: its file and offset."""
    return {(int(leaf.chunks.file[0]), int(leaf.chunks.offset[0])) for leaf in tensors if leaf.numel}


def test_every_file_and_every_entry_of_the_collection_is_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[ReadPart] = []
    joined = detect.join
    monkeypatch.setattr(detect, "join", lambda source, read, *rest: parts.extend(read) or joined(source, read, *rest))
    count = 0
    for path in collection(tmp_path):
        parts.clear()
        try:
            with Sources() as sources:
                checkpoint = open_checkpoint(
                    str(path), sources=sources, options=OpenOptions(ignore_file=("truth*", "*[o]l.pt"))
                )
        except NeedsInformationError as error:  # several checkpoints in one directory
            assert len(error.details) > 1
            continue
        count += 1
        assert unaccounted(path, checkpoint.ledger.account) == [], path
        assert all(entry.read_as for entry in checkpoint.ledger.account.entries), path
        read = {file.path for file in checkpoint.ledger.account.files if file.fate is Fate.READ}
        assert {os.path.relpath(each, path) for each in paths_in(checkpoint.files)} <= read
        assert {entry.part for entry in checkpoint.ledger.account.entries} == {part.label for part in parts}
        saved = (leaf for part in parts for _, leaf in walk(part.tree.root) if isinstance(leaf, Tensor))
        assert places(saved) <= places(named.tensor for named in checkpoint.tensors()) | settings(checkpoint), path
    assert count > 40


@pytest.mark.parametrize("kind", [*SAVED, *WRITTEN])
def test_a_file_that_no_rule_knows_is_named_wherever_it_lies(kind: str, tmp_path: Path) -> None:
    """A weight more is read, or refused with its name; it is never passed over."""
    path = put(files_of(kind), tmp_path / "run")
    folders = {path, *(file.parent for file in path.rglob("*") if file.is_file())}
    odd = [folder / "odd.xyz" for folder in folders]
    for file in odd:
        file.write_bytes(bytes(50))
    account = opened(path).ledger.account
    assert unaccounted(path, account) == []
    fates = {account.of(file.relative_to(path).as_posix()).fate for file in odd}  # type: ignore[union-attr]
    assert fates == {Fate.LEFT_OUT}
    for folder in folders:
        more = folder / "more.pt"
        save({"more": torch.ones(3)}, more)
        try:
            found = opened(path)
        except FsdpckptError as error:
            assert "more.pt" in str(error), error
        else:
            entry = found.ledger.account.of(more.relative_to(path).as_posix())
            assert entry is not None and (entry.fate is not Fate.LEFT_OUT or entry.detail), more
        more.unlink()


def settings(checkpoint: Checkpoint) -> set[tuple[int, int]]:
    """The places of tensors in param groups: equal ones of several parameters became one."""
    groups = checkpoint.optim.param_groups if checkpoint.optim is not None else None
    return places(leaf for group in groups or () for _, leaf in walk(group) if isinstance(leaf, Tensor))


def test_what_is_left_out_says_by_which_rule(tmp_path: Path) -> None:
    trainer(source := tmp_path / "checkpoint-4")
    save(MODEL, source / "model.safetensors")
    (source / ".cache").mkdir()
    (source / ".cache" / "x").write_text("x")
    save(MODEL, source / "checkpoint-2" / "model.pt")
    (source / "notes.txt").write_text("x")
    (source / "odd.xyz").write_text("x" * 50)
    (source / "logs").mkdir()
    (source / "again").symlink_to("optimizer_0")
    account = opened(source).ledger.account
    assert unaccounted(source, account) == []
    rules = {path: rule for rule, paths in account.paths(Fate.LEFT_OUT).items() for path in paths}
    assert rules == {
        ".cache/": Rule.HIDDEN,
        "again/": Rule.LINK,
        "checkpoint-2/": Rule.SEPARATE,
        "logs/": Rule.EMPTY,
        "model.safetensors": Rule.EXPORT,
        "notes.txt": Rule.DESCRIBES,
        "odd.xyz": Rule.OTHER,
        "trainer_state.json": Rule.DESCRIBES,
    }
    assert account.of("scheduler.pt").detail == "extras"  # type: ignore[union-attr]
    assert account.of("optimizer_0/.metadata").detail == "metadata"  # type: ignore[union-attr]
    shown = fsdpckpt.inspect(source).to_json()["account"]
    assert {"path": "odd.xyz", "fate": "left-out", "detail": Rule.OTHER} in shown["files"]
    assert {"part": f"{source}/optimizer_0", "key": "optimizer", "read_as": ("optimizer",)} in [
        {**entry, "read_as": tuple(entry["read_as"])} for entry in shown["entries"]
    ]


def test_the_account_of_a_conversion_says_what_was_copied(tmp_path: Path) -> None:
    trainer(source := tmp_path / "checkpoint-4")
    (source / "notes.txt").write_text("x")
    (source / ".hidden").write_text("x")
    fsdpckpt.convert(source, tmp_path / "on-2", world_size=2)
    document = json.loads((tmp_path / "on-2" / "fsdpckpt.json").read_text())
    assert set(document["copied"]) == {"notes.txt", "rng_state.pth", "scheduler.pt", "trainer_state.json"}
    assert document["left_out"] == {Rule.HIDDEN: [".hidden"]}


# --- no depth at which the search ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4, 9])
@pytest.mark.parametrize(("model", "optimizer"), [("model/ckpt", "model/optimizer"), ("model", "optimizer")])
def test_parts_are_found_at_any_depth(depth: int, model: str, optimizer: str, tmp_path: Path) -> None:
    """VeOmni has the parts of one step one directory deeper than slime, and its own files beside them."""
    step = (source := tmp_path / "run").joinpath(*map(str, range(depth)), "global_step_3")
    dcp_of({"model": MODEL})(step / model)
    dcp_of({"optimizer": OPTIMIZER})(step / optimizer)
    for folder in ("extra_state", "loader"):
        for rank in range(3):
            save({"global_step": 3, folder: rank}, step / folder / f"rank_{rank}.pt")
    found = opened(source)
    assert found.model is not None and found.optim is not None and found.problems == ()
    assert [extra["loader"]["loader"] for extra in found.rank_extra] == [0, 1, 2]  # type: ignore[index, call-overload]
    assert unaccounted(source, found.ledger.account) == []
    fsdpckpt.convert(source, tmp_path / "full.pt")
    assert identical(torch.load(tmp_path / "full.pt")["model"]["w"], MODEL["w"])


def test_a_part_below_another_is_read_or_a_candidate_and_never_passed_over(tmp_path: Path) -> None:
    dcp_of({"model": MODEL})(tmp_path / "one" / "model")
    dcp_of({"optimizer": OPTIMIZER})(tmp_path / "one" / "model" / "more" / "deep" / "optim")
    assert opened(tmp_path).optim is not None
    dcp_of({"model": MODEL})(tmp_path / "one" / "model" / "more" / "model")
    with pytest.raises(NeedsInformationError, match="2 candidates for the model"):
        opened(tmp_path)


def test_a_search_of_more_directories_than_a_checkpoint_has_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpckpt.readers.search._MAX_LISTED", 20)
    for number in range(30):
        (tmp_path / "a" / str(number)).mkdir(parents=True)
    with pytest.raises(NeedsInformationError, match="more than 20 directories"):
        opened(tmp_path)


def test_settings_and_random_states_alone_are_no_checkpoint(tmp_path: Path) -> None:
    for rank in range(2):
        save({"global_step": 3, "rng": torch.get_rng_state()}, tmp_path / "run" / f"extra_state_rank_{rank}.pt")
    save({"last_epoch": 3, "_last_lr": [0.1]}, tmp_path / "scheduler.pt")
    for source, what in ((tmp_path / "run", "global_step, rng"), (tmp_path / "scheduler.pt", "last_epoch, _last_lr")):
        with pytest.raises(SourceUnrecognisedError, match="no model and no optimizer") as error:
            opened(source)
        assert error.value.found == what and error.value.exit_code == 3


# --- parts without content --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [(), (".metadata.tmp",)])
@pytest.mark.parametrize("part", ["model", "optimizer", "lr_scheduler", "optimizer/deeper"])
def test_a_directory_that_was_made_for_a_part_and_not_filled_is_a_problem(
    part: str, left: tuple[str, ...], tmp_path: Path
) -> None:
    source = tmp_path / "iter_3"
    dcp_of({"model": MODEL})(source / "model")
    dcp_of({"optimizer": OPTIMIZER})(source / "optimizer")
    dcp_of({"lr_scheduler": {"last_epoch": 3}})(source / "lr_scheduler")
    assert fsdpckpt.verify(source).whole
    shutil.rmtree(source / part.partition("/")[0])
    (source / part).mkdir(parents=True)
    for name in left:
        (source / part / name).touch()
    (problem,) = [problem for problem in fsdpckpt.verify(source).problems if problem.kind == "missing-section"]
    assert problem.message.startswith(f"{source / part.partition('/')[0]} is empty")
    with pytest.raises(SourceIncompleteError, match="not whole"):
        fsdpckpt.convert(source, tmp_path / "out.pt")
    other = "optim" if part == "model" else "model"
    fsdpckpt.convert(source, tmp_path / "rest.pt", only=other)


def test_a_file_of_a_part_without_bytes_is_a_problem(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "model.pt")
    (tmp_path / "optimizer.pt").touch()
    (problem,) = fsdpckpt.verify(tmp_path).problems
    assert problem.file == f"{tmp_path}/optimizer.pt" and problem.fatal
    (tmp_path / "optimizer.pt").unlink()
    (tmp_path / "logs").mkdir()
    (tmp_path / "empty.txt").touch()
    assert fsdpckpt.verify(tmp_path).whole


def test_a_step_whose_save_did_not_finish_is_named_beside_the_one_that_is_read(tmp_path: Path) -> None:
    dcp_of({"model": MODEL, "optimizer": OPTIMIZER})(tmp_path / "step-10")
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20" / ".metadata.tmp").touch()
    found = opened(tmp_path)
    assert found.model is not None and found.problems == ()
    assert any(f"{tmp_path}/step-20 is empty" in note.message for note in found.notes)
    with pytest.raises(SourceIncompleteError, match=r"nothing but \.metadata\.tmp"):
        opened(tmp_path / "step-20")


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_link_to_a_sibling_is_that_sibling(tmp_path: Path) -> None:
    trainer(tmp_path / "checkpoint-900")
    (tmp_path / "latest").symlink_to("checkpoint-900")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert opened(tmp_path).origin.directory == f"{tmp_path}/checkpoint-900"
    assert opened(tmp_path / "latest").flavor == "trainer"
    save(MODEL, tmp_path / "files" / "epoch=3.ckpt")
    (tmp_path / "files" / "last.ckpt").symlink_to("epoch=3.ckpt")
    found = opened(tmp_path / "files")
    assert [Path(file.path).name for file in found.files] == ["epoch=3.ckpt"]
    assert found.ledger.account.of("last.ckpt").detail == Rule.LINK  # type: ignore[union-attr]


def test_what_only_a_link_leads_to_is_read_through_it(tmp_path: Path) -> None:
    dcp_of({"model": MODEL})(tmp_path / "disk" / "a")
    (tmp_path / "run" / ".store").mkdir(parents=True)
    dcp_of({"optimizer": OPTIMIZER})(tmp_path / "run" / ".store" / "b")
    (tmp_path / "run" / "model").symlink_to(tmp_path / "disk" / "a")
    (tmp_path / "run" / "optimizer").symlink_to(".store/b")
    found = opened(tmp_path / "run")
    assert found.model is not None and found.optim is not None
    for rank in (0, 1):
        save({"seed": rank}, tmp_path / "run" / f"random_states_{rank}.pkl")
    (tmp_path / "run" / "random_states_2.pkl").symlink_to("random_states_1.pkl")
    seeds = [extra["random_states"] for extra in opened(tmp_path / "run").rank_extra]
    assert seeds == [{"seed": 0}, {"seed": 1}, {"seed": 1}], "a rank's file may be a link to that of another"


def test_two_links_to_one_directory_elsewhere_are_one(tmp_path: Path) -> None:
    dcp_of({"model": MODEL})(tmp_path / "disk" / "a")
    (tmp_path / "disk" / "a" / "again").symlink_to(tmp_path / "disk" / "a")
    (tmp_path / "run").mkdir()
    for name in ("best", "last"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "disk" / "a")
    found = opened(tmp_path / "run")
    assert found.model is not None and found.ledger.account.of("last/x").detail == Rule.LINK  # type: ignore[union-attr]


def test_a_part_that_is_given_up_takes_its_files_and_bytes_of_ours_with_it() -> None:
    table = FileTable()
    kept = table.add("model.pt", 10)
    for _ in range(2):  # its numbers are given again
        assert (table.add_inline(b"1234"), table.add("optimizer.pt", 20)) == (1, 2)
        table.truncate(1)
    assert [file.path for file in table.files()] == ["model.pt"] and table.add("model.pt", 10) == kept


# --- what nothing names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["old_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0.pt.bak"])
def test_data_that_nothing_names_is_left_out_by_a_rule_and_a_note_says_so(name: str, tmp_path: Path) -> None:
    source = shutil.copytree(
        GOLDEN / "deepspeed" / "zero2-fp32", tmp_path / "run", ignore=shutil.ignore_patterns("*l.pt")
    )
    (source / "global_step3" / name).write_bytes(b"x" * 90)
    found = opened(source)
    entry = found.ledger.account.of(f"global_step3/{name}")
    assert entry is not None and (entry.fate, entry.detail) == (Fate.LEFT_OUT, Rule.UNNAMED)
    assert f"{Rule.UNNAMED}: global_step3/{name}" in [note.message for note in found.notes]


@pytest.mark.parametrize("name", ["optim.pkl", "optimizer.bin"])
def test_a_file_named_as_the_optimizer_that_no_reader_reads_is_no_absence(name: str, tmp_path: Path) -> None:
    save(MODEL, tmp_path / "model.pt")
    (tmp_path / name).write_bytes(pickle.dumps({"state": {}}))
    (problem,) = opened(tmp_path).problems
    assert problem.fatal and problem.section is Section.OPTIM and "in no format that is read" in problem.message
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.convert(tmp_path, tmp_path.with_suffix(".pt"))
    fsdpckpt.convert(tmp_path, tmp_path.with_suffix(".pt"), only="model")
    save({"optimizer": OPTIMIZER}, tmp_path / "trained.pt")
    assert opened(tmp_path).problems == (), "the optimizer is elsewhere: this file is something else"


def test_what_lies_above_the_one_checkpoint_is_in_a_note(tmp_path: Path) -> None:
    dcp_of({"model": MODEL})(tmp_path / "run" / "ckpt")
    (tmp_path / "run" / "weights.bin").write_bytes(b"x" * 50)
    (tmp_path / "run" / ".lock").write_text("x")
    found = opened(tmp_path / "run")
    assert [left.names for left in found.origin.left_out] == [(".lock", "weights.bin")]
    assert found.ledger.account.of(".lock").detail == Rule.HIDDEN  # type: ignore[union-attr]


def test_a_refused_file_beside_the_checkpoint_is_no_secret_of_verify(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "model.pt")
    save({"args": Path("x"), "hook": print, "optimizer": OPTIMIZER}, tmp_path / "trainer.pt")
    assert any("trainer.pt is left out" in note for note in fsdpckpt.verify(tmp_path).notes)


@pytest.mark.parametrize("depth", [3, 9, 40])
def test_sections_are_found_at_any_depth_of_a_file(depth: int, tmp_path: Path) -> None:
    content: dict[str, Any] = {"model": MODEL, "optimizer": OPTIMIZER}
    for level in range(depth):
        content = {f"level{level}": content, "epoch": level}
    save(content, tmp_path / "all.pt")
    found = opened(tmp_path)
    assert found.model is not None and list(found.model.params) == ["w"] and found.optim is not None
