"""A part of an object is sent once its bytes, and all that they depend on, are there."""

from __future__ import annotations

import random
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest

from fsdpckpt.errors import InternalError, TargetUnwritableError
from fsdpckpt.storage.object_file import Coverage, ObjectFile, needs_of_parts, parts_held

NO_CHECKSUMS = np.zeros((0, 3), np.int64)


class Store:
    """What ``ObjectFile`` asks of a ``RemoteTarget``: ``objects`` that are complete, ``aborted`` uploads."""

    url = "s3://runs"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.sent: list[int] = []
        self.aborted = 0

    def put(self, name: str, data: bytearray) -> None:
        self.objects[name] = bytes(data)

    def in_parts(self, name: str, upload: str = "") -> Parts:
        return Parts(self, name, upload)


class Parts:
    def __init__(self, store: Store, name: str, upload: str) -> None:
        self.store, self.name = store, name
        self.upload = upload or f"upload of {name}"
        self.tags: dict[int, str] = {}

    def send(self, number: int, data: bytearray) -> None:
        self.store.sent.append(number)
        self.tags[number] = bytes(data).hex()

    def complete(self) -> None:
        self.store.objects[self.name] = b"".join(bytes.fromhex(self.tags[number]) for number in sorted(self.tags))

    def abort(self) -> None:
        self.store.aborted += 1


def object_file(
    store: Store, nbytes: int, checksums: np.ndarray = NO_CHECKSUMS, own: tuple[int, int] | None = None
) -> ObjectFile:
    return ObjectFile(store, "x", nbytes, part=10, checksums=checksums, completed=lambda: None, own=own)  # type: ignore[arg-type]


def write(file: ObjectFile, begin: int, data: bytes) -> None:
    file.write(begin, data)
    file.settle(begin, begin + len(data))
    for part in file.ready():
        file.send(*part)


@pytest.mark.parametrize("seed", range(20))
def test_ranges_written_in_any_order_cover_what_they_cover(seed: int) -> None:
    rng = random.Random(seed)
    coverage, there = Coverage(), set()
    for _ in range(60):
        begin = rng.randrange(200)
        end = begin + rng.randrange(1, 9)
        coverage.add(begin, end)
        there.update(range(begin, end))
        low = rng.randrange(200)
        high = low + rng.randrange(12)
        assert coverage.has(low, high) == there.issuperset(range(low, high))


def test_a_part_waits_for_a_checksum_of_bytes_in_later_parts() -> None:
    """The checksum of [12, 35) is stored at 8, in parts 0 and 1; that of [40, 44) at 36, in part 3."""
    table = np.array([[12, 35, 8], [40, 44, 36], [50, 50, 0]], np.int64)
    assert needs_of_parts(50, 10, table).tolist() == [[0, 35], [8, 35], [20, 30], [30, 44], [40, 50]]
    store = Store()
    file = object_file(store, 50, table)
    sent = []
    for begin in range(0, 50, 5):
        file.write(begin, bytes(5))
        file.settle(begin, begin + 5)
        if begin == 30:
            file.patch(8, b"abcd")
        for part in file.ready():
            file.send(*part)
        sent.append(sorted(store.sent))
    assert sent == [[], [], [], [], [], [2], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert store.objects["x"] == bytes(8) + b"abcd" + bytes(38)
    with pytest.raises(InternalError, match="was sent before"):
        file.patch(8, b"late")


def test_a_checksum_that_lies_in_two_parts_is_written_before_either_is_sent() -> None:
    store = Store()
    file = object_file(store, 30, np.array([[0, 5, 18]], np.int64))
    write(file, 0, bytes(20))
    assert store.sent == [0], "its last two bytes are not there yet"
    file.write(20, bytes(10))
    file.settle(20, 30)
    file.patch(18, b"sum!")
    for part in file.ready():
        file.send(*part)
    assert store.objects == {"x": bytes(18) + b"sum!" + bytes(8)}


def test_several_send_one_object_and_hold_what_waits_for_each_others_bytes() -> None:
    """The checksum of [12, 35) is stored at 8 and 46: in what the first sends, and in what the third sends."""
    table = np.array([[12, 35, 8, 46]], np.int64)
    needs, owns = needs_of_parts(50, 10, table), [(0, 20), (20, 40), (40, 50)]
    assert [parts_held(needs, 10, *own) for own in owns] == [2, 0, 1]
    store, data = Store(), bytes(range(50))
    files = [object_file(store, 50, table, own) for own in owns]
    upload = files[0].begin_shared()
    for file in files[1:]:
        file.join(upload)
    for file, (begin, end) in zip(files, owns, strict=True):
        write(file, begin, data[begin:end])
    assert sorted(store.sent) == [2, 3] and store.objects == {}
    tags: dict[int, str] = {}
    for file in files:
        for at in (8, 46):  # 8 to 11 lie in two parts
            file.patch(at, b"sum!")
        tags.update(file.send_held())
    assert store.objects == {}
    with pytest.raises(InternalError, match="4 of 5 parts were sent"):
        files[0].complete({number: tag for number, tag in tags.items() if number != 3})
    files[0].complete(tags)
    assert store.objects == {"x": data[:8] + b"sum!" + data[12:46] + b"sum!"}
    files[0].close()
    assert store.aborted == 0


def test_an_object_that_is_given_up_by_one_or_one_of_several_leaves_no_parts() -> None:
    store = Store()
    alone = object_file(store, 25)
    write(alone, 0, bytes(12))
    with pytest.raises(InternalError, match="were not sent"):
        alone.commit()
    files = [object_file(store, 25, own=own) for own in ((0, 10), (10, 25))]
    files[1].join(files[0].begin_shared())
    write(files[1], 10, bytes(15))
    with pytest.raises(InternalError, match="1 parts were not sent"):
        files[0].send_held()
    for file in (alone, alone, *files):
        file.close()
    assert (store.aborted, store.objects) == (3, {})


def test_parts_of_an_object_that_could_not_be_completed_are_removed() -> None:
    store = Store()
    file = object_file(store, 25)
    parts = file._upload()
    parts.complete = Mock(side_effect=TargetUnwritableError("the store is gone"))  # type: ignore[method-assign]
    with pytest.raises(TargetUnwritableError):
        write(file, 0, bytes(25))
    file.close()
    assert (store.aborted, store.objects) == (1, {})


def test_parts_are_removed_if_the_last_one_is_still_sent_when_the_object_is_given_up() -> None:
    store = Store()
    file = object_file(store, 25)
    parts, sending, closing = file._upload(), threading.Event(), threading.Event()
    send = parts.send

    def send_slowly(number: int, data: bytearray | bytes) -> None:
        sending.set()
        closing.wait(5)
        send(number, data)

    write(file, 0, bytes(20))
    parts.send = send_slowly  # type: ignore[method-assign]
    last = threading.Thread(target=write, args=(file, 20, bytes(5)))
    last.start()
    sending.wait(5)
    closer = threading.Thread(target=file.close)
    closer.start()
    while not file._closed:
        time.sleep(0.001)
    closing.set()
    last.join()
    closer.join()
    assert (store.aborted, store.objects) == (1, {})
