"""Models and buckets of the Hugging Face Hub, played by a server on loopback, through huggingface_hub itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, SourceMissingError, TargetExistsError, TargetUnwritableError
from fsdpckpt.storage.hub import hub_target_kind
from fsdpckpt.storage.upload import UploadOptions
from tests.e2e.remote.conftest import FORMS
from tests.e2e.remote.hub import BUCKET, REPOSITORY, Hub, serve_hub
from tests.e2e.remote.stores import files_below

MODEL, RUNS = f"hf://{REPOSITORY}", f"hf://buckets/{BUCKET}"


@pytest.fixture
def hub(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The repository and the bucket hold ``files``, which is left as it is."""
    hugging_face = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    with serve_hub() as state:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": state.url, "token": False})
        hugging_face.HfFileSystem.clear_instance_cache()
        state.files.update(files_below(files))
        state.bucket.update(state.files)
        yield state
        hugging_face.HfFileSystem.clear_instance_cache()


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_by_ranges(name: str, hub: Hub, files: Path) -> None:
    for where in (MODEL, f"{MODEL}@main", RUNS):
        hub.requests.clear()
        assert fsdpckpt.diff(f"{where}/{name}", files / name).same
        assert hub.requests and all(asked for _, asked in hub.requests)
        lengths = [int(end) - int(begin) + 1 for begin, end in (asked[6:].split("-") for _, asked in hub.requests)]
        assert sum(lengths) < 3 * sum(len(data) for path, data in hub.files.items() if path.startswith(name))


def test_what_is_not_there_is_missing(hub: Hub) -> None:
    for url in (f"{MODEL}/none.pt", "hf://someone/else/full.pt", f"{RUNS}/none"):
        with pytest.raises(SourceMissingError):
            fsdpckpt.inspect(url)


def test_a_file_that_changes_while_it_is_read_is_refused(hub: Hub, files: Path, tmp_path: Path) -> None:
    whole = hub.files["full.pt"]

    class Changing(dict[str, bytes]):
        reads = 0

        def get(self, path: str, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
            self.reads += 1
            if self.reads == 4:
                self["full.pt"] = whole[:-1] + bytes([whole[-1] ^ 1])
            return super().get(path, default)

    hub.files = Changing(hub.files)
    with pytest.raises(SourceCorruptError, match="changed while it was read"):
        fsdpckpt.convert(f"{MODEL}/full.pt", tmp_path / "out.pt")


def test_a_directory_appears_with_one_commit(hub: Hub, files: Path, tmp_path: Path, staging: Path) -> None:
    fsdpckpt.convert(files / "full.pt", tmp_path / "here", to="sharded", world_size=2)
    fsdpckpt.convert(f"{MODEL}/full.pt", f"{MODEL}/new/step-3", to="sharded", world_size=2, verify="full")
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert hub.commits == [[f"new/step-3/{name}" for name in names]]
    assert hub.files["new/step-3/__1_0.distcp"] == (tmp_path / "here" / "__1_0.distcp").read_bytes()
    assert list(staging.iterdir()) == []


def test_an_older_one_goes_with_the_commit_that_brings_the_new_one(hub: Hub, files: Path) -> None:
    with pytest.raises(TargetExistsError):
        fsdpckpt.convert(files / "twin.pt", f"{MODEL}/dcp", to="sharded", world_size=2)
    fsdpckpt.convert(files / "twin.pt", f"{MODEL}/dcp", to="sharded", world_size=2, overwrite=True)
    ((*changed,),) = hub.commits
    assert [name for name in changed if name.startswith("-")] == ["-dcp/__2_0.distcp"]
    assert fsdpckpt.diff(f"{MODEL}/dcp", files / "twin.pt").same


def test_a_commit_that_is_refused_leaves_nothing_and_is_made_again(hub: Hub, files: Path) -> None:
    before = dict(hub.files)
    hub.refused = 403
    with pytest.raises(TargetUnwritableError, match="committing it failed") as caught:
        fsdpckpt.convert(files / "full.pt", f"{MODEL}/again.pt")
    assert "credentials" in str(caught.value)
    assert hub.files == before
    hub.refused = 0
    fsdpckpt.convert(files / "full.pt", f"{MODEL}/again.pt")
    assert fsdpckpt.diff(f"{MODEL}/again.pt", files / "full.pt").same


def test_a_repository_that_is_not_there_is_an_error_before_anything_is_read(hub: Hub, files: Path) -> None:
    with pytest.raises(TargetUnwritableError, match="does not exist"):
        fsdpckpt.convert(files / "full.pt", "hf://someone/else/out.pt")
    assert hub.commits == []


def test_files_that_are_not_sent_in_one_commit_take_no_second_copy_on_the_disk(
    hub: Hub, files: Path, staging: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As several workers send them, and to a bucket, which this server does not write to."""
    filesystem, root = fsspec.core.url_to_fs(f"{MODEL}/apart")
    target = hub_target_kind(filesystem, root, alone=False)(f"{MODEL}/apart", filesystem, root, ())
    names = {"a.pt": str(files / "full.pt"), "b.pt": str(files / "twin.pt")}
    options = UploadOptions(1 << 20, lambda _: None, lambda *_: False, lambda *_: None, None, lambda: None)
    target.begin(dict.fromkeys(names, 1), "one")
    target.send(names, options)
    assert target.is_own("one")
    target.finish(names, names, options, upload="one")
    assert {path for path in hub.files if path.startswith("apart/")} == {"apart/a.pt", "apart/b.pt"}
    assert hub.files["apart/b.pt"] == (files / "twin.pt").read_bytes()
    with pytest.raises(TargetUnwritableError, match="uploading it failed"):
        fsdpckpt.convert(files / "full.pt", f"{RUNS}/out.pt")
    left = [path.name for path in staging.iterdir()]
    assert not [name for name in left if not name.startswith("fsdpckpt-")], left
    assert "Upload" not in capfd.readouterr().err
