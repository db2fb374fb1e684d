"""Retries requests to object stores and web servers, and describes their failures."""

from __future__ import annotations

import errno
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from fsdpckpt.credentials import hidden_in, shown_cause
from fsdpckpt.errors import FsdpckptError, SourceError, SourceMissingError, TargetUnwritableError
from fsdpckpt.process import pending_requests

T = TypeVar("T")

ErrorMaker = Callable[[BaseException, str, str, int], FsdpckptError]
"""(last error, URL, action, attempts) -> the error to raise."""

ATTEMPTS = 6  # about ten seconds with the pauses below: longer than a store's hiccup, shorter than a user's patience
MAX_SECONDS = 60.0  # no further attempt after this: some packages retry several times within each of ours
FIRST_PAUSE = 0.2  # seconds; doubles with every attempt, with random jitter so that threads do not fall into step

# Errors of the packages that fsspec opens URLs with. They are looked up, never imported: most are not installed.
_ERROR_CLASSES = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("requests.exceptions", "RequestException"),
    ("gcsfs.retry", "HttpError"),
    ("gcsfs.retry", "ChecksumError"),
    ("google.api_core.exceptions", "GoogleAPIError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
    ("httpx", "HTTPError"),  # of huggingface_hub, in its newer versions httpx2
    ("httpx2", "HTTPError"),
)
OF_AN_UPLOAD = ("uploading part", "ending the upload")  # actions for which an upload has to be there, begun before
_FINAL_NUMBERS = {errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENOSYS}
_FINAL_NUMBERS |= {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EREMCHG}
_FINAL_NAMES = ("Credential", "ParamValidation", "Auth", "InvalidURL", "NonHttpUrl", "Certificate")
_FINAL_STATUS = range(400, 500)
_TRANSIENT_STATUS = frozenset({408, 425, 429})  # timed out, too early, too many requests
_STATUS_NAMES = ("status", "status_code", "code")  # as aiohttp, azure, httpx and gcsfs name it
_STATUS_PREFIXES = (("Forbidden: ", 403), ("Bad Request: ", 400))  # gcsfs raises plain OSError for these


class ShortAnswerError(OSError):
    """A store ended its answer before sending all bytes that were requested."""


class HttpStatusError(OSError):
    """An HTTP answer with an error ``status``, for example 503."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status} {reason}".rstrip())
        self.status = status


def store_errors() -> tuple[type[BaseException], ...]:
    """Every exception that an fsspec file system raises if a request to its store fails."""
    kinds: list[type[BaseException]] = [OSError, TimeoutError, EOFError]
    for module, name in _ERROR_CLASSES:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            kinds.append(kind)
    return tuple(kinds)


def is_final(error: BaseException) -> bool:
    """Whether repeating the request would give the same error."""
    status = _status(error)
    if status is not None:
        return status in _FINAL_STATUS and status not in _TRANSIENT_STATUS
    if any(part in type(error).__name__ for part in _FINAL_NAMES):
        return True
    if isinstance(error, (FileNotFoundError, PermissionError)):  # fsspec's packages raise them without an errno
        return True
    return isinstance(error, OSError) and error.errno in _FINAL_NUMBERS


def _one_line(error: BaseException, url: str) -> str:
    """``error`` as one line of text, without what opens ``url``."""
    text = " ".join(hidden_in(str(error), url).split())
    name = type(error).__name__
    if isinstance(error, (ShortAnswerError, HttpStatusError)) and text:
        return text
    return f"{name}: {text}" if text else name


def with_retries(request: Callable[[], T], *, url: str, action: str, make_error: ErrorMaker | None = None) -> T:
    """Return the result of ``request()``, trying up to ``ATTEMPTS`` times within ``MAX_SECONDS``.

    ``action``: what the request does, for the message ("looking it up"). If all attempts fail, or a retry cannot
    help, raises the error that ``make_error`` makes of the last one; without it SourceMissingError if nothing is at
    ``url``, else SourceError.
    """
    kinds = store_errors()
    caught: tuple[type[BaseException], ...] = (*kinds, ValueError)
    started = time.monotonic()
    attempt = 1
    with pending_requests:
        while True:
            try:
                return request()
            except FsdpckptError:
                raise
            except caught as error:
                if not isinstance(error, kinds) and _status(error) is None:  # not an answer of a store
                    raise
                if attempt == ATTEMPTS or is_final(error) or time.monotonic() - started > MAX_SECONDS:
                    raise (make_error or _source_error)(error, url, action, attempt) from shown_cause(error)
            pause = FIRST_PAUSE * 2 ** (attempt - 1)
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  # not a secret
            attempt += 1


def _source_error(error: BaseException, url: str, action: str, attempts: int) -> SourceError:
    if is_missing(error):
        return SourceMissingError(
            f"{url} does not exist",
            file=url,
            why="the URL is misspelt, or the object was removed",
            next_step="check the URL",
            run_again=True,
        )
    if _is_forbidden(error):
        return SourceError(
            f"{url} may not be read: {_one_line(error, url)}",
            file=url,
            why="the credentials are missing or expired, or do not allow it",
            next_step="check the credentials of this store",
            run_again=True,
        )
    if _in_other_region(error):
        return SourceError(
            f"{url} cannot be read here: its bucket is in another region",
            file=url,
            found=_one_line(error, url),
            next_step="set AWS_DEFAULT_REGION to the bucket's region, and AWS_ENDPOINT_URL if it has one of its own",
        )
    tries = f", gave up after {attempts} attempts" if attempts > 1 else ""
    return SourceError(
        f"{url} cannot be read: {action} failed{tries}",
        file=url,
        found=_one_line(error, url),
        why="the store or the network is failing" if attempts > 1 else "the store refused the request",
        retryable=not is_final(error),
        run_again=True,
    )


def target_error(error: BaseException, url: str, action: str, attempts: int) -> FsdpckptError:
    """The error for a failed request to a target: what could not be written, and why."""
    denied = _is_forbidden(error)
    tries = f", gave up after {attempts} attempts" if attempts > 1 else ""
    why, next_step = "the store refused the request", None
    if denied:
        why = "the credentials are missing or expired, or do not allow it"
        next_step = "check the credentials of this store"
    elif is_missing(error) and action.startswith(OF_AN_UPLOAD):
        why = "another run, or a rule of the bucket for uploads that take long, has removed the parts that were sent"
    elif is_missing(error):
        why, next_step = "there is no such bucket or container", "create it or correct its name"
    elif attempts > 1:
        why = "the store or the network is failing"
    elif _in_other_region(error):
        why = "the bucket is in another region: set AWS_DEFAULT_REGION, and AWS_ENDPOINT_URL if it has one of its own"
    return TargetUnwritableError(
        f"cannot write {url}: {action} failed{tries}",
        file=url,
        found=_one_line(error, url),
        why=why,
        next_step=next_step,
        run_again=True,
        retryable=not is_final(error),
    )


def _is_forbidden(error: BaseException) -> bool:
    has_no_credentials = isinstance(error, PermissionError) or "Credential" in type(error).__name__
    return has_no_credentials or _status(error) in (401, 403)


def _in_other_region(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EREMCHG  # s3fs raises it for "moved permanently"


def is_missing(error: BaseException) -> bool:
    """Whether the store's answer is that there is nothing."""
    return isinstance(error, FileNotFoundError) or _status(error) == 404


def _status(error: BaseException) -> int | None:
    """The HTTP status of a store's answer, None if its package does not expose it."""
    for of in (error, getattr(error, "response", None)):
        for name in _STATUS_NAMES:
            status = getattr(of, name, None)
            if isinstance(status, int):
                return status
    return next((status for prefix, status in _STATUS_PREFIXES if str(error).startswith(prefix)), None)
