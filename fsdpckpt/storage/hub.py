"""Uploads to a repository of the Hugging Face Hub: all files appear with one commit, and older ones go with it.

In buckets, which have no commits, and of what several workers send, each file appears alone, in the order of any upload
(``storage.upload``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fsdpckpt.errors import FsdpckptError, TargetUnwritableError
from fsdpckpt.storage.parts import request_target
from fsdpckpt.storage.remote_file import is_hub
from fsdpckpt.storage.retry import target_error, with_retries
from fsdpckpt.storage.upload import RemoteTarget, UploadOptions
from fsdpckpt.version import __version__


def is_repository(filesystem: Any, path: str) -> bool:
    """Whether ``path`` is in a repository of the Hub, not in a bucket."""
    return is_hub(filesystem) and not path.startswith("buckets/")


def require_hub_place(remote: RemoteTarget) -> None:
    """Raises TargetUnwritableError if ``remote`` is on the Hub, in a repository or bucket that does not exist."""
    if not is_hub(remote.filesystem):
        return

    def error(cause: BaseException, url: str, action: str, attempts: int) -> FsdpckptError:
        if not isinstance(cause, (FileNotFoundError, ValueError)):
            return target_error(cause, url, action, attempts)
        return TargetUnwritableError(
            f"{url} cannot be written: its repository or bucket does not exist, or this account may not see it",
            file=url,
            found=str(cause).partition("\n")[0],
            next_step="create it (hf repo create NAMESPACE/NAME), or log in (hf auth login)",
        )

    with_retries(
        lambda: remote.filesystem.resolve_path(remote.root), url=remote.url, action="looking it up", make_error=error
    )


def hub_target_kind(filesystem: Any, root: str, *, alone: bool) -> type[RemoteTarget]:
    """How files are sent to ``root``. ``alone``: by one process."""
    if not is_hub(filesystem):
        return RemoteTarget
    return HubTarget if alone and is_repository(filesystem, root) else HubFiles


_PROGRESS_BARS = threading.RLock()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Without those of huggingface_hub: the command has its own."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    with _PROGRESS_BARS:
        silent = are_progress_bars_disabled()
        disable_progress_bars()
        try:
            yield
        finally:
            if not silent:
                enable_progress_bars()


@dataclass(frozen=True, slots=True)
class HubFiles(RemoteTarget):
    """See ``RemoteTarget``. huggingface_hub's files would copy each to the disk first, and leave the copy there when
    sending it fails.
    """

    def put(self, name: str, data: bytes | bytearray) -> None:
        self._send_one(name, bytes(data))

    def _upload(self, name: str, path: str, nbytes: int, options: UploadOptions) -> None:
        self._send_one(name, path)
        options.advance(nbytes)

    def _send_one(self, name: str, content: str | bytes) -> None:
        """Send one file: what is at a path, or some bytes. Raises TargetUnwritableError."""
        where = self.filesystem.resolve_path(self._path(name))

        def send() -> None:
            if not is_repository(self.filesystem, self.root):
                self.filesystem._api.batch_bucket_files(where.bucket_id, add=[(content, where.path)])
                return
            self.filesystem._api.upload_file(
                path_or_fileobj=content,
                path_in_repo=where.path_in_repo,
                repo_id=where.repo_id,
                repo_type=where.repo_type,
                revision=where.revision,
                commit_message=f"fsdpckpt {__version__}",
            )

        with _without_progress_bars():
            request_target(send, url=self._url(name), action="uploading it")
        self.filesystem.invalidate_cache()


@dataclass(frozen=True, slots=True)
class HubTarget(RemoteTarget):
    """See ``RemoteTarget``: nothing is there before ``finish``."""

    def begin(self, sizes: Mapping[str, int], upload: str) -> None:
        """Nothing is announced: no reader sees a part of a commit."""

    def send(self, files: Mapping[str, str], options: UploadOptions) -> None:
        """The commit sends them."""

    def finish(self, files: Mapping[str, str], names: Collection[str], options: UploadOptions, *, upload: str) -> None:
        """Commit ``files``, and delete what is there and not among ``names``. Raises TargetUnwritableError."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        where = self.filesystem.resolve_path(self.root)
        deleted = [name for name in self.names if name not in names]

        def in_repository(name: str) -> str:
            return "/".join(filter(None, (where.path_in_repo, name)))

        def commit() -> None:
            operations: list[Any] = [CommitOperationAdd(in_repository(name), path) for name, path in files.items()]
            operations += [CommitOperationDelete(in_repository(name)) for name in deleted]
            self.filesystem._api.create_commit(
                where.repo_id,
                operations,
                commit_message=f"fsdpckpt {__version__}",
                repo_type=where.repo_type,
                revision=where.revision,
            )

        with _without_progress_bars():
            request_target(commit, url=self.url, action="committing it")
        self.filesystem.invalidate_cache()
        for name, path in files.items():
            nbytes = os.path.getsize(path)
            self._require_length(name, nbytes)
            if options.check is not None:
                options.check(self._url(name), path)
            options.advance(nbytes)
