"""Workers that find different files under one name: one worker's is written, and the summary says whose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fsdpckpt.comm.protocol import original_error
from fsdpckpt.comm.torch_group import TorchGroup
from fsdpckpt.converters import same_files
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.converters.same_files import identity_proofs
from fsdpckpt.converters.shared_sources import SAMPLE, SAMPLES
from fsdpckpt.errors import WorkerError
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.options import ConvertOptions
from fsdpckpt.progress import NoProgress
from fsdpckpt.storage import mounts
from tests.comm.forked_workers import forked_workers
from tests.e2e.distributed.disks import bind, can_bind, own_namespace
from tests.oracle.compare import identical

needs_mounts = pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")
FULL = ConvertOptions(container=Container.TORCH, max_memory=1 << 20, threads=2)


def model(changed: float = 0.0) -> dict[str, torch.Tensor]:
    """One matrix; ``changed`` is added to an element that no sample shows."""
    weight = torch.arange(600.0 * 257).reshape(600, 257)
    weight.view(-1)[weight.numel() // 2 + SAMPLE] += changed
    return {"w": weight}


def disks(tmp_path: Path, files: Mapping[str, Path | None]) -> list[dict[str, str]]:
    """For each of ``files`` a disk that shows it, or nothing, as ``seen``."""
    (tmp_path / "seen").mkdir()
    found = []
    for name, path in files.items():
        disk = tmp_path / name
        disk.mkdir()
        if path is not None:
            shutil.copyfile(path, disk / f"source{path.suffix}")
        found.append({str(tmp_path / "seen"): str(disk)})
    return found


def run(
    tmp_path: Path, machines: list[dict[str, str]], source: Path, target: Path, options: ConvertOptions = FULL
) -> list[dict[str, Any]]:
    """The notes of a conversion by workers of which each sees its own disk; raises what they raised."""

    def body(rank: int) -> int:
        own_namespace()
        bind(machines[rank])
        with TorchGroup.start(device="cpu", limit=30) as group:
            try:
                report = convert(group, str(source), str(target), options, NoProgress(), workers_here=len(machines))
            except WorkerError as error:
                if rank == 0:
                    (tmp_path / "error").write_text(str(original_error(error)))
                return 3
        if rank == 0:
            (tmp_path / "notes").write_text(json.dumps([[note.kind, note.message, note.keys] for note in report.notes]))
        return 0

    codes = forked_workers(len(machines), body, limit=60)
    if codes != [0] * len(machines):
        raise RuntimeError((tmp_path / "error").read_text())
    return [
        dict(zip(("kind", "message", "keys"), note, strict=True))
        for note in json.loads((tmp_path / "notes").read_text())
    ]


def test_the_element_that_is_changed_is_in_no_sample(tmp_path: Path) -> None:
    for name, changed in (("a", 0.0), ("b", 1.0)):
        save_file(model(changed), tmp_path / name)
    one, other = (np.frombuffer((tmp_path / name).read_bytes(), np.uint8) for name in ("a", "b"))
    step = (len(one) - SAMPLE) / (SAMPLES - 1)
    (differing,) = np.flatnonzero(one != other)[[0]]
    assert differing % step > SAMPLE


@needs_mounts
def test_of_files_that_differ_where_no_sample_shows_it_the_first_worker_s_is_written(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "first.safetensors")
    save_file(model(1.0), tmp_path / "second.safetensors")
    machines = disks(tmp_path, {name: tmp_path / f"{name}.safetensors" for name in ("first", "second")})
    source = tmp_path / "seen" / "source.safetensors"
    notes = [note for note in run(tmp_path, machines, source, tmp_path / "out.pt") if note["kind"] == "copies"]
    assert identical(torch.load(tmp_path / "out.pt")["model"]["w"], model()["w"])
    assert [note["keys"] for note in notes] == [[str(source)]]
    assert "the copy of worker 0 was used for all. The copy of worker 1 has the same length" in notes[0]["message"]


@needs_mounts
@pytest.mark.parametrize("columns", [False, True])
def test_checksums_decide_whether_two_torch_files_are_one(columns: bool, tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "first.pt")
    torch.save(model(1.0), tmp_path / "second.pt")
    data = bytearray((tmp_path / "first.pt").read_bytes())
    data[len(data) // 2 + 2 * SAMPLE] ^= 1
    (tmp_path / "damaged.pt").write_bytes(data)
    options = FULL
    if columns:
        (tmp_path / "columns.json").write_text(json.dumps({"*": {"tp": "Shard(1)"}}))
        given = {"mesh": "tp=2", "placements": str(tmp_path / "columns.json"), "container": Container.TORCH}
        options = ConvertOptions(to=Layout.SHARDED, max_memory=1 << 20, threads=2, **given)  # type: ignore[arg-type]
    source = tmp_path / "seen" / "source.pt"
    (tmp_path / "same").mkdir()
    machines = disks(tmp_path / "same", {"0": tmp_path / "first.pt", "1": tmp_path / "first.pt"})
    machines = [{str(tmp_path / "seen"): next(iter(disk.values()))} for disk in machines]
    (tmp_path / "seen").mkdir()
    notes = run(tmp_path, machines, source, tmp_path / "same-out", options)
    assert [note for note in notes if note["kind"] == "copies"] == []
    shutil.copyfile(tmp_path / "second.pt", tmp_path / "same" / "1" / "source.pt")  # a stale copy
    with pytest.raises(RuntimeError, match="worker 0 and worker 1 see different files"):
        run(tmp_path, machines, source, tmp_path / "stale-out", options)
    shutil.copyfile(tmp_path / "damaged.pt", tmp_path / "same" / "1" / "source.pt")
    with pytest.raises(RuntimeError, match=r"source\.pt is damaged"):
        run(tmp_path, machines, source, tmp_path / "damaged-out", options)
    assert not any((tmp_path / f"{name}-out").exists() for name in ("stale", "damaged"))


@needs_mounts
def test_where_the_first_worker_has_none_the_next_one_s_is_written(tmp_path: Path) -> None:
    for name, changed in (("second", 0.0), ("third", 2.0)):
        save_file(model(changed), tmp_path / f"{name}.safetensors")
    files = {"first": None, "second": tmp_path / "second.safetensors", "third": tmp_path / "third.safetensors"}
    notes = run(tmp_path, disks(tmp_path, files), tmp_path / "seen" / "source.safetensors", tmp_path / "out.pt")
    (note,) = [note for note in notes if note["kind"] == "copies"]
    assert "the copy of worker 1 was used for all. The copy of worker 2 has the same length" in note["message"]
    assert identical(torch.load(tmp_path / "out.pt")["model"]["w"], model()["w"])


def test_one_file_proves_itself_under_every_path_and_a_copy_never_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    shutil.copy2(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    own, linked, copy = (set(identity_proofs(str(tmp_path / name))) for name in ("a", "link", "copy"))
    assert own == linked
    assert own.isdisjoint(copy)
    assert identity_proofs(str(tmp_path / "gone")) == ()
    monkeypatch.setattr(same_files, "_boot", lambda: "another machine")
    assert set(identity_proofs(str(tmp_path / "a"))) & own  # its inode and times, as a shared file system shows them


@pytest.mark.parametrize(
    ("line", "proved"),
    [
        ("36 35 {dev} / {dir} rw - nfs4 server:/export rw", "nfs4 server:/export /file"),
        ("36 35 {dev} /sub {dir} rw shared:7 - lustre 10.0.0.1@tcp:/fs rw", "lustre 10.0.0.1@tcp:/fs /sub/file"),
        ("36 35 {dev} / {dir} rw - fuse.gcsfuse bucket rw", "fuse.gcsfuse bucket /file"),
        ("36 35 {dev} / {dir} rw - nfs4 127.0.0.1:/ rw", None),  # a tunnel of each machine's own
        ("36 35 {dev} / {dir} rw - ext4 /dev/nvme0n1 rw", None),
        ("36 35 0:999 / {dir} rw - nfs4 server:/export rw", None),
        ("36 35 {dev} / /elsewhere rw - nfs4 server:/export rw", None),
        (r"36 35 {dev} /a\040b {dir} rw - nfs4 server:/c\040d rw", "nfs4 server:/c d /a b/file"),
        ("nonsense", None),
    ],
)
def test_a_path_in_a_file_system_of_many_machines_proves_the_file(
    line: str, proved: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    device = (tmp_path / "file").stat().st_dev
    text = line.format(dev=f"{device >> 8 & 0xFFF}:{device & 0xFF}", dir=tmp_path)
    (tmp_path / "mountinfo").write_text(f"{text}\n")
    monkeypatch.setattr(mounts, "_LISTING", str(tmp_path / "mountinfo"))
    assert same_files._path_in_shared_mount(str(tmp_path / "file"), device) == proved
