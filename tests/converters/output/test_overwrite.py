"""What ``--overwrite`` may delete: a checkpoint in which every file is a part of it. Nothing else is ever deleted."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.cli.convert import done_lines
from fsdpckpt.converters.output.overwrite import find_replaceable
from fsdpckpt.errors import SourceError, TargetExistsError, UsageError
from fsdpckpt.storage import staging
from tests.makers import Change, Make, add_copy, dcp_of, files, lose, safetensors, together


def state(seed: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    return {"model": {"w.weight": torch.randn(7, 3), "w.bias": torch.randn(7)}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "source.pt")
    return tmp_path / "source.pt"


def everything(path: Path) -> dict[str, bytes | str]:
    """What is at and below ``path``: contents of files, targets of links."""
    below = [path, *path.rglob("*")] if path.is_dir() else [path]
    return {
        str(one.relative_to(path)): os.readlink(one) if one.is_symlink() else one.read_bytes()
        for one in below
        if one.is_symlink() or one.is_file()
    }


def convert(source: Path, target: Path, *, overwrite: bool = True, **options: Any) -> Any:
    """Replace ``target`` by a checkpoint of the same kind, a file or a directory."""
    to = "full" if target.suffix else "sharded"
    container = {"container": "dcp"} if to == "sharded" else {}
    return fsdpckpt.convert(source, target, to=to, overwrite=overwrite, **container, **options)


def refused(source: Path, target: Path) -> TargetExistsError:
    """The error of a conversion that should have replaced ``target``: nothing there, or beside it, has changed."""
    before = everything(target.parent)
    with pytest.raises(TargetExistsError) as plan:
        convert(source, target, dry_run=True)
    with pytest.raises(TargetExistsError) as error:
        convert(source, target)
    with pytest.raises(TargetExistsError) as unasked:
        convert(source, target, overwrite=False)
    assert everything(target.parent) == before
    assert str(plan.value) == str(error.value)
    assert "overwrite" not in str(unasked.value.next_step), "offered, and then refused"
    assert unasked.value.details == error.value.details
    return error.value


def write(path: Path, text: str = "mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_in(target: Path, make: Make) -> Path:
    target.mkdir(parents=True)
    make(target)
    return target


def texts(*names: str, text: str = "mine") -> Make:
    return files(dict.fromkeys(names, text))


def array() -> bytes:
    data = io.BytesIO()
    np.savez(data, x=np.zeros(8))
    return data.getvalue()


NO_CHECKPOINTS: dict[str, Make] = {
    "a project": texts("train.py", "results.csv"),
    "chapters": texts("chapter1.tex", "chapter2.tex", "chapter3.tex"),
    "a home": texts("thesis/chapter.tex", ".bashrc"),
    "git": texts(".git/HEAD", ".git/objects/pack/pack-1.pack"),
    "a data set": files({"train.npz": array()}),
    "a damaged file": files({"model.pt": b"PK\x03\x04 and then nothing of use"}),
    "what a crash left": dcp_of(state(2), lose(".metadata")),
    "a run": files({"step-100/model.pt": state(2)}),
    "a zoo": files({"bert.pt": state(2)["model"], "gpt.pt": state(3)["model"]}),
    "nothing but a link": lambda target: (target / "data").symlink_to(target.parent),
    "only settings": texts("config.json", "tokenizer.json", text="{}"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_a_directory_that_is_no_checkpoint_is_never_deleted(source: Path, tmp_path: Path, kind: str) -> None:
    target = make_in(tmp_path / "theirs" / "out", NO_CHECKPOINTS[kind])
    error = refused(source, target)
    assert error.exit_code == 5
    found = [name for name in everything(target) if any(name in detail or detail in name for detail in error.details)]
    assert found or any(str(target) in detail for detail in error.details), error
    assert f"mv {target} {target}.old" in str(error.next_step)


def archive(target: Path) -> None:
    with zipfile.ZipFile(target, "w") as file:
        file.writestr("photo.jpg", b"photo")


def half_a_file(target: Path) -> None:
    torch.save(state(2), target)
    os.truncate(target, target.stat().st_size // 2)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "text": lambda target: write(target, "Dear diary"),
    "archive": archive,
    "half a file": half_a_file,
    "a pickled module": lambda target: torch.save(torch.nn.Linear(2, 2), target),
}


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x"])
@pytest.mark.parametrize("kind", NO_FILES)
def test_a_file_that_does_not_read_as_a_checkpoint_is_never_deleted(
    source: Path, tmp_path: Path, kind: str, name: str
) -> None:
    (tmp_path / "theirs").mkdir()
    NO_FILES[kind](tmp_path / "theirs" / name)
    assert "is not a checkpoint" in refused(source, tmp_path / "theirs" / name).what


def by_us(*, manifest: bool, **options: Any) -> Make:
    """What this program writes, with or without ``fsdpckpt.json``."""

    def make(target: Path) -> None:
        full = target.parent / "full.pt"
        torch.save(state(), full)
        fsdpckpt.convert(full, target, **options)
        full.unlink()
        if not manifest:
            (target / "fsdpckpt.json").unlink()

    return make


RNG = {"python": (3, (1, 2), None)}
ADAM = {"state": {"w.bias": {"exp_avg": torch.randn(7)}}, "param_groups": [{"lr": 0.1, "params": ["w.bias"]}]}
OURS = by_us(manifest=True, to="sharded", world_size=2)
RANKS = by_us(manifest=False, to="sharded", container="torch", world_size=2, buffers="none")
HUGGING_FACE = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json")
CHECKPOINTS: dict[str, Make] = {
    "DCP": dcp_of(state(2)),
    "ranks": RANKS,
    "one file": files({"full.pt": state(2)}),
    "safetensors": by_us(manifest=False, container="safetensors"),
    "ours": OURS,
    "the Trainer": together(  # of transformers
        dcp_of({"model": state(2)["model"]}, at="pytorch_model_fsdp_0"),
        dcp_of({"optimizer": ADAM}, at="optimizer_0"),
        files({"scheduler.pt": {"last_epoch": 3}, "rng_state_0.pth": RNG, "rng_state_1.pth": RNG}),
        files({"training_args.bin": {"learning_rate": 0.1}}),
        texts("trainer_state.json", "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", text="{}"),
    ),
    "accelerate": together(
        files({"pytorch_model_fsdp.bin": state(2)["model"], "scheduler.bin": {"last_epoch": 3}}),
        texts("random_states_0.pkl", text="a pickle of numpy's"),
        texts("custom_checkpoint_0.pkl", text="a pickle of anything"),
    ),
    "verl": together(
        RANKS,
        texts("fsdp_config.json", text='{"FSDP_version": 2, "world_size": 2}'),
        texts(*(f"huggingface/{name}" for name in HUGGING_FACE), text="{}"),
    ),
}
STRANGERS = ["notes.txt", "train.py", "data/train.bin", ".git/HEAD", "other-run/model.pt", "optimizer_0/notes.md"]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_is_replaced_with_its_side_files_and_not_with_a_file_of_something_else(
    source: Path, tmp_path: Path, kind: str
) -> None:
    """The plan lists them."""
    target = make_in(tmp_path / "theirs" / "out", CHECKPOINTS[kind])
    find_replaceable(str(target))
    for stranger in STRANGERS:
        copy = Path(shutil.copytree(target, target.parent / "copy"))
        write(copy / stranger)
        with pytest.raises(TargetExistsError) as error:
            find_replaceable(str(copy))
        assert stranger in error.value.details or "not one checkpoint" in error.value.what, error.value
        shutil.rmtree(copy)
    write(target / STRANGERS[0])
    assert refused(source, target).details == (STRANGERS[0],)
    (target / STRANGERS[0]).unlink()
    held = everything(target)
    plan = convert(source, target, dry_run=True)
    assert everything(target) == held
    report = convert(source, target)
    for one in (plan, report):
        assert {file.path: file.nbytes for file in one.replaced} == {name: len(data) for name, data in held.items()}
    assert fsdpckpt.diff(source, target).same
    assert sorted(os.listdir(target)) == [".metadata", "__0_0.distcp", "fsdpckpt.json"]
    assert os.listdir(target.parent) == ["out"]


@pytest.mark.parametrize("kind", ["DCP", "one file", "ours", "the Trainer"])
def test_a_torch_file_that_is_no_training_state_is_never_deleted_with_a_checkpoint(
    source: Path, tmp_path: Path, kind: str
) -> None:
    """A reader opens it as something that was saved beside the model; it may be a data set."""
    target = make_in(tmp_path / "out", CHECKPOINTS[kind])
    if kind == "one file":
        (target / "full.pt").rename(target / "model.pt")
    torch.save({"labels": [1, 2, 3]}, target / "mnist.pt")
    assert refused(source, target).details == ("mnist.pt",)
    torch.save({"images": torch.zeros(3)}, target / "mnist.pt")
    assert any(detail.endswith("mnist.pt") for detail in refused(source, target).details)


@pytest.mark.parametrize("kind", ["DCP", "ours"])
def test_a_link_is_never_deleted_nor_what_it_leads_to(source: Path, tmp_path: Path, kind: str) -> None:
    target = make_in(tmp_path / "out", CHECKPOINTS[kind])
    write(tmp_path / "dataset" / "train.bin")
    (target / "data").symlink_to(tmp_path / "dataset")
    assert refused(source, target).details == ("data",)
    (target / "data").unlink()
    (target / "__0_0.distcp").rename(tmp_path / "moved")
    (target / "__0_0.distcp").symlink_to(tmp_path / "moved")
    assert refused(source, target).details == ("__0_0.distcp",)
    make_in(tmp_path / "project", NO_CHECKPOINTS["a project"])
    (tmp_path / "latest").symlink_to(tmp_path / "project")  # which is not followed to delete it
    refused(source, tmp_path / "latest")


LINKED = ["directory", "one file of it", "behind a link to a directory", "not read", "shard of an index", "DST a file"]


@pytest.mark.parametrize("kind", LINKED)
def test_a_source_of_links_into_dst_is_not_deleted_with_it(tmp_path: Path, kind: str) -> None:
    source, target = tmp_path / "source", tmp_path / "theirs" / ("x.pt" if kind == "DST a file" else "out")
    options: dict[str, Any] = {"to": "full" if target.suffix else "sharded", "overwrite": True}
    folder = tmp_path / "elsewhere" if kind == "behind a link to a directory" else source
    for each in {source, folder, target.parent}:
        each.mkdir()
    given = source
    if kind == "DST a file":
        torch.save(state(), target)
    elif kind == "shard of an index":
        shard = "model-00001-of-00001.safetensors"
        make_in(target, safetensors(shard, state()["model"]))
        given = source / "model.safetensors.index.json"
        given.write_text(json.dumps({"weight_map": dict.fromkeys(state()["model"], shard)}))
    else:
        make_in(target, dcp_of(state() | {"optimizer": {"state": {}, "param_groups": []}}))
    if folder != source:
        (source / "dcp").symlink_to(folder)
    if kind == "not read":
        torch.save(state(), source / "model.pt")
        (source / "older").symlink_to(target)
        options["ignore_file"] = ("older",)
    else:
        for file in [target] if target.is_file() else target.iterdir():
            (folder / file.name).symlink_to(file)
    if kind == "one file of it":
        (source / ".metadata").unlink()
        shutil.copy(target / ".metadata", source)
    before = everything(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(UsageError, match="would delete data of the source, which has links into it") as error:
            fsdpckpt.convert(given, target, dry_run=dry_run, **options)
        assert all(str(target) in detail for detail in error.value.details)
        assert everything(tmp_path) == before


@pytest.mark.parametrize("link", [True, False])
def test_a_source_may_be_links_and_a_reference_may_be_in_dst(source: Path, tmp_path: Path, link: bool) -> None:
    target, links = tmp_path / "out", tmp_path / "links"
    fsdpckpt.convert(source, target, to="sharded")
    links.mkdir()
    (links / "model.pt").symlink_to(source)
    reference = tmp_path / "latest" if link else target
    if link:
        reference.symlink_to(target)
    fsdpckpt.convert(links, target, to="sharded", reference=reference, overwrite=True, add_prefix="new.")
    assert fsdpckpt.verify(target).whole


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_link_as_dst_stays_and_what_it_leads_to_is_replaced(source: Path, tmp_path: Path, kind: str) -> None:
    suffix, to = (".pt", "full") if kind == "file" else ("", "sharded")
    real, link = tmp_path / f"step-1{suffix}", tmp_path / f"latest{suffix}"
    fsdpckpt.convert(source, real, to=to, add_prefix="old.")
    link.symlink_to(real.name)
    with pytest.raises(TargetExistsError, match=f"it is a link to {real}"):
        fsdpckpt.convert(source, link, to=to)
    report = fsdpckpt.convert(source, link, to=to, overwrite=True)
    assert os.readlink(link) == real.name
    assert f" in {real}, " in "".join(done_lines(report))
    assert fsdpckpt.diff(source, real).same
    assert sorted(tmp_path.iterdir()) == sorted([source, real, link])


def test_a_manifest_does_not_cover_what_was_put_beside_the_files_that_it_lists(source: Path, tmp_path: Path) -> None:
    target = make_in(tmp_path / "out", OURS)
    for name in list(json.loads((target / "fsdpckpt.json").read_text())["files"]):
        (target / name).unlink()
    write(target / "thesis.tex")
    assert refused(source, target).details == ("thesis.tex",)


def cut_to(name: str, nbytes: int) -> Change:
    return lambda target: os.truncate(target / name, nbytes)


TORN_METADATA, TORN_DATA = cut_to(".metadata", 100), together(lose("__1_0.distcp"), cut_to("__0_0.distcp", 10))
JUNK = [".DS_Store", ".nfs00000000a1b2c3d400000001"]  # what macOS and NFS leave
REPLACED: dict[str, Make] = {
    "an empty directory": files({}),
    "ours without a file": together(OURS, lose("__1_0.distcp")),
    "files of an older DCP directory": together(OURS, add_copy("__1_0.distcp", "__7_0.distcp")),
    "torn metadata": together(OURS, TORN_METADATA),
    "torn data": together(OURS, TORN_DATA),
    "all torn": together(OURS, TORN_METADATA, TORN_DATA),
    **{
        f"{name} in {kind}": together(make, files({name: b"left behind"}))
        for name in JUNK
        for kind, make in (("DCP", CHECKPOINTS["DCP"]), ("ours", OURS), ("nothing", files({})))
    },
}


@pytest.mark.parametrize("kind", REPLACED)
def test_an_older_checkpoint_a_torn_one_of_our_own_or_nothing_is_replaced(
    source: Path, tmp_path: Path, kind: str
) -> None:
    target = make_in(tmp_path / "out", REPLACED[kind])
    if "torn" in kind:
        with pytest.raises(SourceError):
            fsdpckpt.inspect(target)
    convert(source, target)
    assert fsdpckpt.diff(source, target).same and fsdpckpt.verify(target).whole
    assert sorted(os.listdir(target)) == [".metadata", "__0_0.distcp", "fsdpckpt.json"]


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_a_file_is_replaced_also_if_it_is_empty(source: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    if name == "out.pt":
        target.touch()
        convert(source, target)
        torch.save(state(2), target)
    else:
        fsdpckpt.convert(source, target)
    convert(source, target)
    assert fsdpckpt.diff(source, target).same


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_empty_directory_is_as_good_as_none(source: Path, tmp_path: Path, overwrite: bool) -> None:
    report = fsdpckpt.convert(source, make_in(tmp_path / "out", files({})), to="sharded", overwrite=overwrite)
    assert not report.replaced and os.listdir(tmp_path).count("out") == 1


def test_the_current_directory_is_no_dst_though_it_is_empty(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(TargetExistsError, match="current directory") as error:
        fsdpckpt.convert(source, ".", to="sharded")
    assert str(tmp_path / "here" / "converted") in str(error.value.next_step)


def after_the_check(monkeypatch: pytest.MonkeyPatch, name: str, action: Callable[[], None]) -> None:
    """Do ``action`` once right before ``storage.staging`` calls its ``name``: all checks have passed by then."""
    real, done = getattr(staging, name), []

    def interfere(*arguments: object) -> object:
        if not done:
            done.append(True)
            action()
        return real(*arguments)

    monkeypatch.setattr(staging, name, interfere)


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("directory", [True, False])
@pytest.mark.parametrize("when", ["copying", "at the last moment"])
def test_what_comes_to_dst_while_it_is_replaced_is_not_deleted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, directory: bool, exchanges: bool
) -> None:
    from fsdpckpt.converters import pipeline

    target = tmp_path / "theirs" / ("out" if directory else "out.pt")
    if directory:
        make_in(target, OURS)
    else:
        target.parent.mkdir()
        torch.save(state(2), target)

    def somebody_writes() -> None:
        write(target / "results" / "all.csv" if directory else target, "42")

    if not exchanges:
        monkeypatch.setattr(staging, "swap_names", lambda *_: False)
    if when == "copying":
        execute = pipeline.execute
        monkeypatch.setattr(pipeline, "execute", lambda *all, **more: (somebody_writes(), execute(*all, **more))[1])
    else:
        after_the_check(monkeypatch, "swap_names", somebody_writes)
    before = everything(target)
    with pytest.raises(TargetExistsError):
        convert(source, target)
    now = everything(target)
    assert now.pop("results/all.csv" if directory else ".") == b"42"
    assert now == {name: data for name, data in before.items() if name != "."}


@pytest.mark.parametrize("directory", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_what_appears_at_a_new_dst_meanwhile_is_not_deleted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: bool, overwrite: bool
) -> None:
    target = tmp_path / ("out" if directory else "out.pt")
    after_the_check(monkeypatch, "rename_if_absent", lambda: write(target / "all.csv" if directory else target, "42"))
    with pytest.raises(TargetExistsError, match=r"exists|no part|not read|changed"):
        fsdpckpt.convert(source, target, to="sharded" if directory else "full", overwrite=overwrite)
    assert everything(target) == {"all.csv" if directory else ".": b"42"}


@pytest.fixture
def store() -> Iterator[Any]:
    """An object store in memory, in which ``memory://bucket`` is empty."""
    import fsspec

    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def objects(store: Any) -> dict[str, bytes]:
    return {name: store.cat_file(name) for name in store.find("/bucket")}


@pytest.mark.parametrize("name", ["notes.txt", "data/train.bin", "other-run/model.pt"])
def test_an_object_of_something_else_is_never_deleted_from_a_store(source: Path, store: Any, name: str) -> None:
    url = "memory://bucket/run"
    fsdpckpt.convert(source, url, to="sharded", world_size=2)
    assert fsdpckpt.convert(source, url, to="sharded", overwrite=True, dry_run=True).replaced
    store.pipe_file(f"/bucket/run/{name}", b"mine")
    before = objects(store)
    with pytest.raises(TargetExistsError) as error:
        fsdpckpt.convert(source, url, to="sharded", overwrite=True)
    assert name in error.value.details and objects(store) == before


@pytest.mark.parametrize("url", ["memory://bucket/x.pt", "memory://bucket/thesis"])
def test_what_is_no_checkpoint_in_a_store_is_never_deleted(source: Path, store: Any, url: str) -> None:
    store.pipe_file(f"/bucket/{'x.pt' if url.endswith('.pt') else 'thesis/chapter.tex'}", b"mine")
    before = objects(store)
    with pytest.raises(TargetExistsError, match="is not a checkpoint"):
        fsdpckpt.convert(source, url, overwrite=True, to="full" if url.endswith(".pt") else "sharded")
    assert objects(store) == before


@pytest.mark.parametrize("named", [{"overwrite": True}, {"resume": True}, {}])
def test_an_upload_that_was_interrupted_deletes_nothing_that_came_since(
    source: Path, store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: dict[str, bool]
) -> None:
    from fsdpckpt.storage.upload import RemoteTarget

    def convert(**options: bool) -> None:
        fsdpckpt.convert(source, "memory://bucket/run", to="sharded", staging=tmp_path / "staging", **options)

    fsdpckpt.convert(source, "memory://bucket/run", to="sharded", world_size=3)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(RemoteTarget, "finish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(overwrite=True)
    store.pipe_file("/bucket/run/notes.txt", b"mine")
    before = objects(store)
    with pytest.raises(TargetExistsError) as error:
        convert(**named)
    assert error.value.details == ("notes.txt",) and objects(store) == before
    store.rm_file("/bucket/run/notes.txt")
    convert(**named)
    assert fsdpckpt.diff(source, "memory://bucket/run").same
    assert len([name for name in objects(store) if name.endswith(".distcp")]) == 1  # of the older one nothing is left


def test_nothing_at_all_is_replaceable(tmp_path: Path) -> None:
    assert find_replaceable(str(tmp_path / "nowhere")) == {}
