"""What the journal returns is what was appended whole, whatever a crash did to its end."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fsdpckpt.errors import TargetUnwritableError
from fsdpckpt.execute.journal import Journal, Record, read_records


def _records(seed: int) -> list[Record]:
    rng = random.Random(seed)
    return [{"number": number, "bytes": [rng.randrange(2**40) for _ in range(rng.randrange(9))]} for number in range(7)]


def _journal(path: Path, seed: int = 1) -> list[Record]:
    records = _records(seed)
    journal = Journal(str(path))
    journal.append(records[:3])
    journal.append(records[3:])
    journal.close()
    return records


def test_records_come_back_in_their_order_and_nothing_is_made_before_the_first(tmp_path: Path) -> None:
    Journal(str(tmp_path / "journal")).close()
    assert list(tmp_path.iterdir()) == [] and read_records(str(tmp_path / "journal")) == []
    assert _journal(tmp_path / "journal") == read_records(str(tmp_path / "journal"))


def test_a_journal_that_is_cut_or_flipped_anywhere_gives_the_records_that_are_whole_before_that(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = _journal(path)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place])
        assert read_records(str(path)) == records[: data[:place].count(b"\n")]
        if place % 5 == 0:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            assert read_records(str(path)) == records[: data[:place].count(b"\n")]


def test_appending_goes_on_behind_the_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = _journal(path)
    data = bytearray(path.read_bytes())
    data[data.index(b"\n") + 20] ^= 1  # in the second record
    path.write_bytes(data)
    journal = Journal(str(path))
    journal.append([{"short": 1}])
    journal.append(_records(2))
    journal.close()
    assert read_records(str(path)) == [records[0], {"short": 1}, *_records(2)]
    assert path.read_bytes().count(b"\n") == 2 + len(_records(2))


def test_a_line_with_the_right_sum_that_is_no_record_ends_the_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = _journal(path)
    lists = tmp_path / "lists"
    Journal(str(lists)).append([json.loads("[1, 2]")])
    path.write_bytes(path.read_bytes() + lists.read_bytes())
    assert read_records(str(path)) == records


def test_a_journal_that_cannot_be_written_is_an_error_of_the_target(tmp_path: Path) -> None:
    with pytest.raises(TargetUnwritableError):
        Journal(str(tmp_path / "gone" / "journal")).append(_records(1))
