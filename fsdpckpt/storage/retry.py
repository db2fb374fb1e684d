"""What stores answer, in this program's words, and which answers are worth another try."""

from __future__ import annotations

import errno
import random
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from fsdpckpt.errors import FsdpckptError, InternalError, SourceError, SourceMissingError, TargetUnwritableError

__all__ = ["ATTEMPTS", "ShortAnswerError", "Unavailable", "described", "final", "store_errors", "target_error", "tried"]

T = TypeVar("T")

Words = Callable[[BaseException, str, str, int], FsdpckptError]
"""(error, url, what was done, attempts) to the error that is raised."""

ATTEMPTS = 6  # with the pauses below about ten seconds: longer than a store's hiccup, shorter than patience
MOST_SECONDS = 60.0  # after which there is no other attempt: some packages make several of their own each time
FIRST_PAUSE = 0.2  # seconds; doubles with every attempt, and is drawn at random so that threads do not come in step

# The classes that are raised by the packages which fsspec opens URLs with, none of which is imported for this.
_CLASSES = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("requests.exceptions", "RequestException"),
    ("gcsfs.retry", "HttpError"),
    ("gcsfs.retry", "ChecksumError"),
    ("google.api_core.exceptions", "GoogleAPIError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
)
_FINAL_NUMBERS = frozenset(
    {
        errno.EINVAL,
        errno.EPERM,
        errno.EACCES,
        errno.ENOENT,
        errno.ENOSYS,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.EREMCHG,
    }
)
_FINAL_NAMES = ("Credential", "ParamValidation", "Auth", "InvalidURL", "NonHttpUrl", "Certificate")
_FINAL_STATUS = range(400, 500)
_PASSING_STATUS = frozenset({408, 425, 429})  # timed out, too early, too many requests
_STATUS_NAMES = ("status", "status_code", "code")  # what aiohttp, azure and gcsfs call it
_STATUS_WORDS = (("Forbidden: ", 403), ("Bad Request: ", 400))  # where gcsfs raises no class of its own


class ShortAnswerError(OSError):
    """A store ended its answer before all that was asked for had come."""


class Unavailable(OSError):  # the HTTP words for it
    """An HTTP status that says nothing about the file. ``status``: the number."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status} {reason}".rstrip())
        self.status = status


def store_errors() -> tuple[type[BaseException], ...]:
    """All that a file system of fsspec raises when its store does not do what it is asked."""
    found: list[type[BaseException]] = [OSError, TimeoutError, EOFError]
    for module, name in _CLASSES:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            found.append(kind)
    return tuple(found)


def final(error: BaseException) -> bool:
    """Whether the same request would get the same answer again."""
    status = _status(error)
    if status is not None:
        return status in _FINAL_STATUS and status not in _PASSING_STATUS
    if any(part in type(error).__name__ for part in _FINAL_NAMES):
        return True
    if isinstance(error, (FileNotFoundError, PermissionError)):  # with no number when fsspec's packages make them
        return True
    return isinstance(error, OSError) and error.errno in _FINAL_NUMBERS


def described(error: BaseException) -> str:
    """One line about ``error``."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return text if text and isinstance(error, (ShortAnswerError, Unavailable)) else f"{name}: {text}" if text else name


def tried(work: Callable[[], T], *, url: str, doing: str, words: Words | None = None) -> T:
    """What ``work`` returns, asked for up to ``ATTEMPTS`` times within ``MOST_SECONDS``.

    ``doing``: what it does, for the message. Raises SourceMissingError when there is nothing at ``url``, SourceError
    with the last answer when all attempts failed or another one would be in vain; what ``words`` makes, if given.
    """
    kinds = store_errors()
    caught: tuple[type[BaseException], ...] = (*kinds, ValueError)
    begun = time.monotonic()
    for attempt in count(1):
        try:
            return work()
        except FsdpckptError:
            raise
        except caught as error:
            if not isinstance(error, kinds) and _status(error) is None:  # no answer of a store's
                raise
            if attempt == ATTEMPTS or final(error) or time.monotonic() - begun > MOST_SECONDS:
                raise (words or _source_error)(error, url, doing, attempt) from error
        time.sleep(FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311  # no secret
    raise InternalError("an endless loop ended")  # for the type checker: count() has no end


def _source_error(error: BaseException, url: str, doing: str, attempts: int) -> SourceError:
    if _missing(error):
        return SourceMissingError(
            f"{url} does not exist",
            file=url,
            why="the URL is misspelt, or the object was removed",
            next_step="check the URL, then run the command again",
        )
    if _not_allowed(error):
        return SourceError(
            f"{url} may not be read: {described(error)}",
            file=url,
            why="the credentials are missing or expired, or do not allow it",
            next_step="check the credentials of this store, then run the command again",
        )
    if _elsewhere(error):
        return SourceError(
            f"{url} cannot be read here: its bucket is in another region",
            file=url,
            found=described(error),
            next_step="set AWS_DEFAULT_REGION to the bucket's region, and AWS_ENDPOINT_URL if it has one of its own",
        )
    tries = f" {attempts} times" if attempts > 1 else ""
    return SourceError(
        f"{url} cannot be read: {doing} failed{tries}",
        file=url,
        found=described(error),
        why="the store or the network between is failing" if attempts > 1 else "the store refused the request",
        next_step="run the command again; convert --resume goes on where it stopped",
    )


def target_error(error: BaseException, url: str, doing: str, attempts: int) -> FsdpckptError:
    """As one about a target: what could not be written, and why."""
    denied = _not_allowed(error)
    tries = f" {attempts} times" if attempts > 1 else ""
    why, next_step = "the store refused the request", "run it again"
    if denied:
        why = "the credentials are missing or expired, or do not allow it"
        next_step = "check the credentials of this store, then run the command again"
    elif _missing(error):
        why, next_step = "there is no such bucket or container", "create it or correct its name, then run it again"
    elif attempts > 1:
        why = "the store or the network between is failing"
    elif _elsewhere(error):
        why = "the bucket is in another region: set AWS_DEFAULT_REGION, and AWS_ENDPOINT_URL if it has one of its own"
    return TargetUnwritableError(
        f"cannot write {url}: {doing} failed{tries}",
        file=url,
        found=described(error),
        why=why,
        next_step=next_step,
    )


def _not_allowed(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or "Credential" in type(error).__name__ or _status(error) in (401, 403)


def _elsewhere(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EREMCHG  # how s3fs says "moved permanently"


def _missing(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) or _status(error) == 404


def _status(error: BaseException) -> int | None:
    """The HTTP status that a store answered with, None where its package does not tell it."""
    for name in _STATUS_NAMES:
        status = getattr(error, name, None)
        if isinstance(status, int):
            return status
    return next((status for words, status in _STATUS_WORDS if str(error).startswith(words)), None)
