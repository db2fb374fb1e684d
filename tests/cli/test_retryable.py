"""``retryable`` in an error's JSON: a rerun may mend it without any change, so CI may simply try again."""

from __future__ import annotations

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


def lock_error(directory: Path) -> FsdpckptError:
    first = Staging(str(directory / "out"), directory=True)
    with pytest.raises(TargetExistsError) as raised:
        Staging(str(directory / "out"), directory=True)
    first.discard()
    first.close()
    return raised.value


def of_a_worker(original: FsdpckptError) -> FsdpckptError:
    """What the others raise when one has failed with this."""
    return Failure(2, "read", original.what, 3, encode_error(original)).error()


def test_what_ends_by_itself_is_retryable_and_what_a_rerun_meets_again_is_not(tmp_path: Path) -> None:
    assert retryable(Failure(2, "copy", "killed by SIGKILL", WorkerError.exit_code).error()) is True
    assert retryable(of_a_worker(SourceError("store", retryable=True))) is True
    assert retryable(changed_error("model.pt", "was written to")) is True, "a checkpoint that is still written"
    assert retryable(lock_error(tmp_path)) is True
    assert retryable(of_a_worker(SourceMissingError("rank 3 has no file"))) is False
    assert retryable(Failure(0, "copy", "ValueError: a bug", 70, None).error()) is False
    assert retryable(as_fsdpckpt_error(OSError(28, "No space left on device", "/mnt/out"))) is False
    assert retryable(as_fsdpckpt_error(ZeroDivisionError())) is False
