"""Numbers and names made to lead a reader astray: in file names, in lists of files, on pages of web servers."""

from __future__ import annotations

import json
import random
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from fsdpckpt import api
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceError, SourceIncompleteError
from fsdpckpt.execute.journal import Journal, JournaledWindows, RunIdentity, first_record, read_run, windows_record
from fsdpckpt.storage import FileIdentity
from fsdpckpt.storage.remote_file import _require_same
from fsdpckpt.storage.remote_store import links_of

pytestmark = pytest.mark.timeout(60)

_SECONDS = 10  # of processor time; what these take without a bound is hours, or all memory


def _weights() -> bytes:
    return save({"w": torch.arange(7.0) + 1})


def _torch(path: Path) -> None:
    torch.save({"w": torch.arange(7.0) + 1}, path)


@pytest.mark.parametrize(
    "names",
    [
        ["model_world_size_99999999999_rank_0.pt"],
        ["model_world_size_999999_rank_0.pt", "optim_world_size_999998_rank_0.pt"],
        ["model_rank99999999999.pt", "model_rank0.pt"],
        ["model-00001-of-99999999999.safetensors"],
        ["model-00001-of-999999.safetensors", "other-00002-of-999999.safetensors"],
        ["shard-99999999999-model-00001-of-00001.safetensors"],
        ["shard-999999-model-00001-of-00001.safetensors"],
        ["__99999999999.metadata", "__0_0.distcp"],
        ["__99999999999_0.distcp"],
    ],
)
def test_a_number_in_a_file_name_asks_for_no_list_of_so_many(names: list[str], tmp_path: Path) -> None:
    for name in names:
        if name.endswith(".pt"):
            _torch(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(_weights())
    begin = time.process_time()
    try:
        api.inspect(str(tmp_path)).to_json()
    except (SourceError, NeedsInformationError) as error:
        assert len(error.details) <= 1 << 17
    assert time.process_time() - begin < _SECONDS


def test_how_many_rank_files_are_missing_is_said_though_not_all_are_named(tmp_path: Path) -> None:
    _torch(tmp_path / "model_world_size_200000_rank_7.pt")
    with pytest.raises(SourceIncompleteError, match="199,999 rank files are missing") as error:
        api.inspect(str(tmp_path))
    assert error.value.details[7] == "model_world_size_200000_rank_8.pt"


@pytest.mark.parametrize("place", [1 << 63, 10**30, (1 << 62) // 3])
def test_a_chunk_that_is_placed_beyond_any_tensor_is_refused(place: int, tmp_path: Path) -> None:
    info = json.dumps({"w": {"saved_offsets": [place, 0]}})
    data = save({"w": torch.ones(2, 3)}, {"format": "pt", "DCP_SHARDING_INFO": info})
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(SourceCorruptError, match="where no tensor reaches"):
        api.inspect(str(tmp_path / "m.safetensors"))


def _journal(path: Path, seed: int) -> str:
    """A journal of a program that keeps something else in it: each time another part of it."""
    identity = RunIdentity("1", "ab", {"to": "full"}, [[FileIdentity("a.pt", 9, 5, 3, "t")]])
    windows = JournaledWindows(np.array([[0, 0, 8, 7, 0]]))
    records = [json.loads(json.dumps(record)) for record in (first_record(identity), windows_record(windows))]
    generator = random.Random(seed)
    record = generator.choice(records)
    key = generator.choice([name for name in record if name not in ("format", "version", "plan", "options")])
    change = generator.randrange(4)
    if change == 0:
        del record[key]
    else:
        record[key] = [[[1, 2]], [["a", "b", "c", "d"]], [[{"path": "x"}]], [7]][generator.randrange(4)]
    journal = Journal(str(path))
    journal.append(records)
    journal.close()
    return str(path)


@pytest.mark.parametrize("seed", range(24))
def test_a_journal_of_another_form_is_no_run(seed: int, tmp_path: Path) -> None:
    assert read_run(_journal(tmp_path / "journal", seed)) is None


def test_a_manifest_that_names_files_elsewhere_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    inside = tmp_path / "checkpoint"
    for directory in (outside, inside):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(_weights())
    names = ["../outside/model.safetensors", "../outside/other.safetensors", f"{outside}/gone.pt", "a\0b"]
    listed = {name: {"nbytes": 1, "crc32": f"{zlib.crc32(name.encode()):08x}"} for name in names}
    (inside / "fsdpckpt.json").write_text(json.dumps({"version": "0.1.0", "files": listed}))
    described = api.inspect(str(inside)).to_json()
    assert "outside" not in json.dumps(described) and described["tensors"]


@pytest.mark.parametrize(
    "page",
    [
        "<a" + " " * 400_000,
        "<a href=" * 100_000,
        "<a " + "href = " * 100_000,
        '<a href="' + "a/" * 200_000,
        "<a x='" * 90_000,
    ],
    ids=["spaces", "tags", "attributes", "path", "quotes"],
)
def test_a_page_made_to_keep_a_reader_busy_is_searched_in_passing(page: str) -> None:
    begin = time.process_time()
    links_of("http://host/run/", page)
    assert time.process_time() - begin < _SECONDS


def test_links_of_a_page_are_those_to_its_own_server() -> None:
    page = """<a href="../">up</a> <A class="q" HREF='m.pt'>m</A> <a\nhref=a%20b.pt>u</a> <a href="http://other/run/x">o</a>
    <a href="/run/y&amp;z.pt"> <a href="file://host/etc/passwd"> <a name="here"> <abbr href="no"> <a href="http://[bad/x">
    <a href="\0http://host/run/n.pt">"""
    found = links_of("http://host/run/", page)
    links = ["", "run/a%20b.pt", "run/m.pt", "run/n.pt", "run/y&z.pt"]
    assert found == [f"http://host/{link}" for link in links]


def test_a_length_of_thousands_of_digits_says_nothing() -> None:
    identity = FileIdentity("http://host/m.pt", 9, tag="ETag=a")
    _require_same(identity, "ETag=a", "9" * 5000)
