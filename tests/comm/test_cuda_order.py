"""What the CUDA paths ask of torch, and in which order, played on a machine without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fsdpckpt.comm import torch_group, transport
from fsdpckpt.errors import WorkerError
from fsdpckpt.process import RankInfo

GPU = torch.device("cuda", 3)
MAIN = threading.main_thread()


class Recorder:
    """Stands in for ``torch.cuda`` and for what it makes: every call is an event, with the stream that is current."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.made = 0
        self._own = threading.local()  # each thread has a current stream

    @property
    def current(self) -> str:
        return getattr(self._own, "current", "caller's" if threading.current_thread() is MAIN else "default")

    @current.setter
    def current(self, name: str) -> None:
        self._own.current = name

    def say(self, event: str) -> None:
        self.events.append(f"{event} on {self.current}")

    def set_device(self, device: torch.device) -> None:
        self.events.append(f"device {device}")

    def current_stream(self, device: torch.device) -> PlayedStream:
        assert device == GPU
        return PlayedStream(self, self.current)

    def Stream(self, device: torch.device) -> PlayedStream:  # noqa: N802  # torch's name
        assert device == GPU
        self.made += 1
        return PlayedStream(self, f"own {self.made}")

    @contextmanager
    def stream(self, stream: PlayedStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class PlayedStream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_stream(self, other: PlayedStream) -> None:
        self.recorder.events.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.recorder.events.append(f"host waits for {self.name}")


class PlayedTensor:
    def __init__(self, recorder: Recorder, where: str, count: int = 0) -> None:
        self.recorder, self.where, self.count = recorder, where, count
        self.device = GPU

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> PlayedTensor:
        begin = part.start or 0
        return PlayedTensor(self.recorder, f"{self.where}[{begin}:{part.stop}]", part.stop - begin)

    def copy_(self, other: PlayedTensor, *, non_blocking: bool) -> None:
        self.recorder.say(f"{other.where} -> {self.where}{' async' if non_blocking else ''}")

    def record_stream(self, stream: PlayedStream) -> None:
        self.recorder.events.append(f"{self.where} used by {stream.name}")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    for name in ("set_device", "current_stream", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found


def played_empty(recorder: Recorder) -> Any:
    def empty(size: int, *, dtype: torch.dtype, device: Any = None, pin_memory: bool = False) -> PlayedTensor:
        assert dtype is torch.uint8 and pin_memory is (device is None)
        return PlayedTensor(recorder, "pinned" if pin_memory else "device")

    return empty


def test_what_is_sent_waits_for_its_copy_and_what_came_is_read_after_its_copy(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport.torch, "empty", played_empty(recorder))
    made = transport.TransferBuffers(GPU, count=1, size=4096)
    used = [f"own {number} waits for caller's" for number in (1, 2)]
    assert recorder.events == [used[0], "device used by own 1", used[1], "device used by own 2"]
    recorder.events.clear()
    made.fill(0, 0, 100, lambda begin, piece: recorder.say(f"fill {piece.where} from {begin}"))  # type: ignore[attr-defined]
    made.wait_for_copies()
    assert recorder.events == [
        "fill pinned[0:100] from 0 on caller's",
        "pinned[0:100] -> device[0:100] async on own 1",
        "caller's waits for own 1",
    ]
    recorder.events.clear()
    made.empty(0, 10, 50, lambda begin, piece: recorder.say(f"empty {piece.where} from {begin}"))  # type: ignore[attr-defined]
    assert recorder.events == [
        "device[10:60] -> pinned[0:50] async on own 2",
        "host waits for own 2",
        "empty pinned[0:50] from 0 on caller's",
    ]


def test_a_piece_is_filled_again_only_once_it_is_copied(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.torch, "empty", played_empty(recorder))
    made = transport.TransferBuffers(GPU, count=1, size=4096, piece=64, to_send=2)
    recorder.events.clear()
    made.fill(0, 64, 150, lambda begin, _: recorder.say(f"fill {begin}"))
    assert recorder.events == [
        "fill 0 on caller's",
        "pinned[0:64] -> device[64:128] async on own 1",
        "fill 64 on caller's",
        "pinned[0:64] -> device[128:192] async on own 1",
        "host waits for own 1",
        "fill 128 on caller's",
        "pinned[0:22] -> device[192:214] async on own 1",
    ]


def test_what_came_is_copied_straight_to_the_memory_of_the_caller(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport.torch, "empty", played_empty(recorder))
    made = transport.TransferBuffers(GPU, count=2, size=4096, received=0)
    recorder.events.clear()
    made.to_host(1, 7, PlayedTensor(recorder, "caller's memory", 50))  # type: ignore[arg-type]
    assert recorder.events == ["device[7:57] -> caller's memory async on own 2", "host waits for own 2"]


def test_a_post_that_never_returns_blocks_nobody(recorder: Recorder) -> None:
    """The first post of NCCL to a rank connects to it, and waits for ever if the rank has ended."""
    ended = threading.Event()

    class Failing:
        failure = None

        def raise_failure(self) -> None:
            """Nothing failed before the post."""

        def check_peers(self) -> None:
            raise WorkerError("worker 1 was lost")

    flying = transport.Transport(None, Failing(), GPU)  # type: ignore[arg-type]
    transfer = flying._start(lambda: [] if ended.wait(60) else [None], peer=1)
    with pytest.raises(WorkerError, match="worker 1 was lost"):
        transfer.wait()
    ended.set()
    flying.close()


def test_posts_keep_their_order_and_the_stream_of_their_caller(recorder: Recorder) -> None:
    class Quiet:
        failure = None

        def raise_failure(self) -> None:
            """Nothing fails."""

        check_peers = raise_failure

    def post(number: int) -> list[Any]:
        recorder.say(f"post {number}")
        return []

    flying = transport.Transport(None, Quiet(), GPU)  # type: ignore[arg-type]
    transfers = [flying._start(lambda number=number: post(number), peer=1) for number in range(3)]
    for transfer in transfers:
        transfer.wait()
    posts = [event for event in recorder.events if event.startswith("post")]
    assert posts == [f"post {number} on caller's" for number in range(3)]
    flying.close()


def test_data_that_lies_on_the_device_is_not_copied(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.torch, "empty", played_empty(recorder))
    made = transport.TransferBuffers(GPU, count=2, size=4096, on_device=True)
    pieces: list[str] = []
    for each in (made.fill, made.empty):
        each(1, 3, 7, lambda begin, piece: pieces.append(f"{piece.where} from {begin}"))  # type: ignore[attr-defined]
    made.wait_for_copies()
    assert pieces == ["device[3:10] from 0"] * 2
    assert recorder.events == []


def test_a_flight_lands_once_the_device_is_through_on_the_thread_and_stream_that_wait(recorder: Recorder) -> None:
    class Work:
        def wait(self) -> None:
            recorder.say("the stream waits for the work")

    flying = transport.Transport(None, None, GPU)  # type: ignore[arg-type]
    flying._wait([Work(), Work()])  # type: ignore[list-item]
    waited = "the stream waits for the work on own 1"
    assert recorder.events == [f"device {GPU}", waited, waited, "host waits for own 1"]


def plays_connecting(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first operation of a new group, without a GPU."""
    monkeypatch.setattr(torch_group.torch, "zeros", lambda *_, device: device)
    monkeypatch.setattr(torch_group.dist, "all_reduce", lambda _, *, group: recorder.events.append("connects"))
    monkeypatch.setattr(torch_group.torch.cuda, "synchronize", lambda _: None)


def test_nccl_connects_at_once_to_the_gpu_of_this_worker(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(backend: str, **given: Any) -> None:
        recorder.events.append(f"{backend} {given['rank']} of {given['world_size']} device {given.get('device_id')}")

    monkeypatch.setattr(torch_group.dist, "init_process_group", init)
    monkeypatch.setattr(torch_group.distributed_c10d, "_get_default_group", lambda: None)
    plays_connecting(recorder, monkeypatch)
    info = RankInfo(7, 8, 3, 4, "127.0.0.1", 1, "torchrun")
    torch_group._connect("nccl", GPU, None, info)  # type: ignore[arg-type]
    torch_group._connect("gloo", torch.device("cpu"), None, info)  # type: ignore[arg-type]
    assert recorder.events == [
        f"device {GPU}",
        f"cpu:gloo,cuda:nccl 7 of 8 device {GPU}",
        "connects",
        "gloo 7 of 8 device None",
    ]


def test_beside_a_live_group_nccl_connects_at_once_too(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_group.dist, "new_group", lambda *, backend: recorder.events.append(f"new {backend}"))
    plays_connecting(recorder, monkeypatch)
    info = RankInfo(7, 8, 3, 4, "127.0.0.1", 1, "torchrun")
    torch_group._connect("nccl", GPU, None, info)  # type: ignore[arg-type]
    assert recorder.events == [f"device {GPU}", "new cpu:gloo,cuda:nccl", "connects"]
