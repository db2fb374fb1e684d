"""An output for a store that takes parts is sent while it is assembled: no disk, and the same bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import fsdpckpt
from fsdpckpt.converters import check
from fsdpckpt.converters.output import store_publisher, stream_memory
from fsdpckpt.errors import InternalError, TargetUnwritableError, UsageError
from fsdpckpt.storage import upload
from tests.e2e.remote.stores import files_below

SMALL = 4096  # bytes of a part in the store below


class MemoryParts:
    """Parts of an object of fsspec's memory store. ``most``: bytes on the staging disk when any part was sent."""

    most = 0
    places: tuple[Path, ...] = ()

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem, self.path = filesystem, path
        self.parts: dict[int, bytes] = {}

    def send(self, number: int, data: bytearray) -> None:
        assert not self.filesystem.exists(self.path)
        self.parts[number] = bytes(data)
        on_disk = sum(file.stat().st_size for place in self.places for file in place.rglob("*") if file.is_file())
        MemoryParts.most = max(MemoryParts.most, on_disk)

    def complete(self) -> None:
        ordered = [self.parts[number] for number in sorted(self.parts)]
        assert {len(part) for part in ordered[:-1]} == {SMALL}
        self.filesystem.pipe_file(self.path, b"".join(ordered))

    def abort(self) -> None:
        self.parts.clear()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, staging: Path) -> Iterator[str]:
    """A store that takes tiny parts."""
    monkeypatch.setattr(stream_memory, "PART", SMALL)
    monkeypatch.setattr(store_publisher, "PART", SMALL)
    monkeypatch.setattr(store_publisher, "takes_parts", lambda _: True)
    monkeypatch.setattr(upload, "takes_parts", lambda _: True)
    monkeypatch.setattr(upload.RemoteTarget, "abort_parts", lambda *_, **__: None)
    monkeypatch.setattr(
        upload.RemoteTarget, "in_parts", lambda target, name: MemoryParts(target.filesystem, target._path(name))
    )
    MemoryParts.most, MemoryParts.places = 0, (staging,)
    yield "memory://streamed"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/streamed"):
        filesystem.rm("/streamed", recursive=True)


def objects(url: str) -> dict[str, bytes]:
    filesystem, root = fsspec.core.url_to_fs(url)
    return {name[len(root) :].lstrip("/"): filesystem.cat_file(name) for name in filesystem.find(root)}


FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full.pt", {"to": "full"}),
    ("model.safetensors", {"only": "model"}),
    ("dcp", {"to": "sharded", "world_size": 3}),
    ("ranks", {"to": "sharded", "container": "torch", "world_size": 2, "buffers": "none"}),
    ("cast", {"to": "sharded", "world_size": 2, "dtype": "bfloat16"}),
    ("named", {"to": "sharded", "flavor": "accelerate", "world_size": 2}),
)


@pytest.mark.parametrize(("name", "options"), FORMS, ids=[name for name, _ in FORMS])
def test_every_form_has_the_bytes_that_it_has_on_a_disk(
    name: str, options: dict[str, Any], store: str, files: Path, tmp_path: Path, staging: Path
) -> None:
    fsdpckpt.convert(files / "full.pt", tmp_path / name, verify="full", **options)
    written = files_below(tmp_path / name)
    lists = sum(len(data) for path, data in written.items() if path.endswith(upload.UPLOADED_LAST))
    memory = random.Random(name).choice(["192KiB", "1MiB", "128MiB"])
    for threads in (1, 4):
        given = {**options, "verify": "full", "threads": threads, "max_memory": memory}
        report = fsdpckpt.convert(files / "full.pt", f"{store}/{threads}/{name}", **given)
        assert objects(f"{store}/{threads}/{name}") == written
        assert (report.streamed, report.disk_needed) == (True, 0)
        assert MemoryParts.most <= lists + 65536  # and the journal
        assert list(staging.iterdir()) == []


def test_records_in_any_form_get_their_checksums(store: str, tmp_path: Path) -> None:
    """Tensors much longer than a part, shorter than one, empty, and as long as one."""
    rng = random.Random(7)
    sizes = [rng.choice([0, 1, 3, 900, SMALL // 4, SMALL // 4 + 1, 9001]) for _ in range(60)]
    torch.save({"model": {f"p{n}": torch.randn(size) for n, size in enumerate(sizes)}}, tmp_path / "source.pt")
    for name, options in (("out.pt", {"to": "full"}), ("out", {"to": "sharded", "world_size": 4})):
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / name, **options)  # type: ignore[arg-type]
        fsdpckpt.convert(tmp_path / "source.pt", f"{store}/{name}", threads=4, **options)  # type: ignore[arg-type]
        assert objects(f"{store}/{name}") == files_below(tmp_path / name)


MUCH = "300MiB"  # for a part that every file fits into


def test_a_store_that_keeps_other_bytes_is_named_with_the_object(store: str, files: Path) -> None:
    filesystem = fsspec.filesystem("memory")
    put = upload.RemoteTarget.put

    def damaging(target: upload.RemoteTarget, name: str, data: bytes) -> None:
        at = len(data) // 2
        changed = bytes(data[:at]) + bytes([data[at] ^ 1]) + bytes(data[at + 1 :])
        put(target, name, changed if name == "__1_0.distcp" else data)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(upload.RemoteTarget, "put", damaging)
        patches.setattr(stream_memory, "PART", 64 << 20)
        patches.setattr(store_publisher, "PART", 64 << 20)
        with pytest.raises(TargetUnwritableError, match=r"__1_0\.distcp is not what was written to it"):
            fsdpckpt.convert(
                files / "full.pt", f"{store}/out", to="sharded", world_size=2, verify="full", max_memory=MUCH
            )
    assert not filesystem.exists("/streamed/out")


def test_a_fault_of_this_program_is_not_called_the_stores(
    store: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists of an output that does not pass the check are not in the store."""

    def match(*_: object) -> None:
        raise InternalError("the output does not read back as it was planned")

    monkeypatch.setattr(check, "read_back", match)
    with pytest.raises(InternalError):
        fsdpckpt.convert(files / "full.pt", f"{store}/out", to="sharded", world_size=2)


def test_parts_that_do_not_fit_into_memory_are_an_error_with_the_number_that_does(
    store: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_memory, "MAX_PARTS", 1)
    with pytest.raises(UsageError, match="too small to send parts of") as caught:
        fsdpckpt.convert(files / "full.pt", f"{store}/out.pt", max_memory="2MiB")
    assert "5MiB" in str(caught.value.next_step) and "staging" in str(caught.value.next_step)
    assert objects(store) == {}
    fsdpckpt.convert(files / "full.pt", f"{store}/out.pt", max_memory="5MiB")
    assert fsdpckpt.diff(f"{store}/out.pt", files / "full.pt").same
