"""Which publisher a target takes, and what it leaves of a failed run. What only stores need is imported for them."""

from __future__ import annotations

from contextlib import suppress

from fsdpckpt import flags
from fsdpckpt.converters.output.publisher import Publisher, Request
from fsdpckpt.converters.output.rename import Rename
from fsdpckpt.converters.output.resume import is_resumable, staged_leftover
from fsdpckpt.errors import Leftover, TargetUnwritableError, attach_leftover
from fsdpckpt.options import ConvertOptions
from fsdpckpt.storage import is_url

_OTHER_DIRECTORY = f"add {flags.staging('DIR')}, a local directory that can be written to and has room for the output"


def publisher_of(request: Request, *, staged: bool = False) -> Publisher:
    """How the output of ``request`` is written and published. ``staged``: to a store, through a local disk."""
    if not is_url(request.target):
        return Rename(request)
    from fsdpckpt.converters.output.store_publisher import publisher_for_store

    return publisher_for_store(request, staged=staged)


def attach_leftovers(error: BaseException, target: str, options: ConvertOptions) -> None:
    """Add to ``error`` what a failed run left for ``target``, as far as this process sees it."""
    if isinstance(error, TargetUnwritableError) and is_url(target) and not is_url(error.file or target):
        error.next_step, error.run_again = _OTHER_DIRECTORY, False
    if is_resumable(error):
        with suppress(OSError):  # it must not hide the error
            leftover = _leftover(target, options)
            if leftover is not None:
                attach_leftover(error, leftover)


def _leftover(target: str, options: ConvertOptions) -> Leftover | None:
    if not is_url(target):
        return staged_leftover(target, options)
    from fsdpckpt.converters.output.upload import spooled_leftover

    return spooled_leftover(target, options)
