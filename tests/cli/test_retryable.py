"""``retryable`` in an error's JSON: a rerun may mend it without any change, so CI may simply try again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpckpt.cli.errors import as_fsdpckpt_error, error_json
from fsdpckpt.comm.protocol import encode_error
from fsdpckpt.comm.store_monitor import Failure
from fsdpckpt.errors import FsdpckptError, SourceError, SourceMissingError, TargetExistsError, WorkerError
from fsdpckpt.storage import retry
from fsdpckpt.storage.protocols import changed_error
from fsdpckpt.storage.retry import HttpStatusError, ShortAnswerError, with_retries
from fsdpckpt.storage.staging import Staging
from tests.cli.conftest import Run


def failing_request(error: BaseException, **more: object) -> FsdpckptError:
    def request() -> None:
        raise error

    with pytest.raises(FsdpckptError) as raised:
        with_retries(request, url="s3://runs/a", action="reading it", **more)  # type: ignore[arg-type]
    return raised.value


def retryable(error: FsdpckptError) -> object:
    document = error_json(error)["error"]
    assert isinstance(document, dict)
    return document["retryable"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError("no answer in 30 s"), True),
        (ConnectionResetError("reset by peer"), True),
        (ShortAnswerError("ended early"), True),
        (HttpStatusError(503, "Slow Down"), True),
        (HttpStatusError(429, "Too Many Requests"), True),
        (HttpStatusError(403, "Forbidden"), False),
        (HttpStatusError(404, "Not Found"), False),
        (FileNotFoundError("s3://runs/a"), False),
        (PermissionError("access denied"), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("writing", [False, True], ids=["reading", "writing"])
def test_a_store_that_does_not_answer_may_answer_later(
    error: BaseException, expected: bool, writing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.0)
    more = {"make_error": retry.target_error} if writing else {}
    assert retryable(failing_request(error, **more)) is expected


def test_a_lost_worker_is_retryable_and_one_that_failed_is_what_its_error_is() -> None:
    lost = Failure(2, "copy", "killed by SIGKILL", WorkerError.exit_code)
    assert retryable(lost.error()) is True
    for original in (SourceError("store", retryable=True), SourceMissingError("rank 3 has no file")):
        failed = Failure(2, "read", original.what, 3, encode_error(original))
        assert retryable(failed.error()) is original.retryable
    assert retryable(Failure(0, "copy", "ValueError: a bug", 70, None).error()) is False


def test_a_checkpoint_that_is_still_written_is_retryable() -> None:
    assert retryable(changed_error("model.pt", "was written to")) is True


def test_a_lock_that_is_held_is_retryable(tmp_path: Path) -> None:
    first = Staging(str(tmp_path / "out"), directory=True)
    with pytest.raises(TargetExistsError) as raised:
        Staging(str(tmp_path / "out"), directory=True)
    first.discard()
    first.close()
    assert retryable(raised.value) is True


def test_a_full_disk_and_a_bug_are_not() -> None:
    assert retryable(as_fsdpckpt_error(OSError(28, "No space left on device", "/mnt/out"))) is False
    assert retryable(as_fsdpckpt_error(ZeroDivisionError())) is False


def test_the_document_of_a_command_says_it(run: Run, saved: Path, tmp_path: Path) -> None:
    done = run("convert", tmp_path / "nothing", tmp_path / "out", "--json")
    assert json.loads(done.out)["error"]["retryable"] is False
