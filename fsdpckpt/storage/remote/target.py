"""A DST in an object store, which has no rename: what makes it appear complete or not at all.

Protocol for a directory: 1. an object ``fsdpckpt.uploading`` is put there first: readers refuse a directory that has
it. 2. What says that an older checkpoint there is complete is deleted. 3. The data goes up, side by side. 4. Objects of
an older checkpoint that the new one lacks are deleted. 5. The lists that name the data go up, ``fsdpckpt.json`` and
then, of a DCP directory, ``.metadata``, without which PyTorch loads nothing. 6. ``fsdpckpt.uploading`` is deleted.
A single object needs none of this: it appears, and replaces an older one, when its upload is completed.

``upload`` is all of it by one process. Several share it: one calls ``begin``, then all ``send``, then one ``complete``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fsdpckpt.errors import SourceError, TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage.protocol import UPLOADING, is_url
from fsdpckpt.storage.remote.errors import target_error, tried
from fsdpckpt.storage.remote.store import filesystem_of, is_http
from fsdpckpt.storage.remote.uploads import COPIES, MOST_UPLOADS, PART, Uploader, abort_leftovers

__all__ = ["RemoteTarget", "Sending", "open_target"]

# The later ones name the earlier ones; whoever reads one of these believes that what it names is there.
_LISTS = (".safetensors.index.json", "units.json", "fsdpckpt.json", ".metadata")


@dataclass(frozen=True, slots=True)
class Sending:
    """How files go up: with at most ``memory`` bytes held; ``sent`` is told how many bytes came.

    ``there`` says of a name and what the store says of it whether an earlier run has put it there; ``arrived`` is told
    of each object that has come. ``check`` compares an object (its URL) with its file.
    """

    memory: int
    sent: Callable[[int], None]
    there: Callable[[str, Mapping[str, Any]], bool]
    arrived: Callable[[str, Mapping[str, Any]], None]
    check: Callable[[str, str], None] | None


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """``names``: the objects that are at or below ``url`` now, relative to it ("" is the object ``url`` itself)."""

    url: str
    filesystem: Any
    root: str
    names: tuple[str, ...]

    @property
    def interrupted(self) -> bool:
        """Whether an upload of this program was begun there and has not ended."""
        return UPLOADING in self.names

    def upload(self, files: Mapping[str, str], sending: Sending) -> None:
        """Put the local ``files`` (relative name to path) there, by the protocol above."""
        self.begin({name: os.path.getsize(path) for name, path in files.items()})
        self.send(files, sending)
        self.complete(files, files, sending)

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Steps 1 and 2. ``sizes``: bytes of every file that will be there, by relative name."""
        abort_leftovers(self.filesystem, self.root, self.url)
        if "" not in sizes:
            self._announce(sizes)
            for name in (name for name in self.names if name.endswith(_LISTS)):
                self._delete(name)

    def send(self, files: Mapping[str, str], sending: Sending) -> None:
        """Step 3, for ``files``; others may send the rest of them meanwhile. Lists among them are left out."""
        data = [name for name in files if not name.endswith(_LISTS)]
        small = [name for name in data if os.path.getsize(files[name]) <= PART]
        pool = ThreadPoolExecutor(max(min(MOST_UPLOADS, sending.memory // (COPIES * PART)), 1))
        try:
            list(pool.map(lambda name: self._put(name, files[name], sending), small))
        finally:  # also after a signal: those that wait are not begun any more
            pool.shutdown(cancel_futures=True)
        for name in data:
            if name not in small:
                self._put(name, files[name], sending)

    def complete(self, files: Mapping[str, str], names: Collection[str], sending: Sending) -> None:
        """Steps 4 to 6, once all data is there. ``files``: the lists at least; ``names``: of all files."""
        directory = "" not in names
        for name in self.names:
            if name not in names and name != UPLOADING and not (directory and name.endswith(_LISTS)):
                self._delete(name)
        for ending in _LISTS:
            for name in (name for name in files if name.endswith(ending)):
                self._put(name, files[name], sending)
        if directory:
            self._delete(UPLOADING)

    def _put(self, name: str, path: str, sending: Sending) -> None:
        nbytes = os.path.getsize(path)
        uploader = Uploader(self.filesystem, sending.memory, sending.sent)
        at, url = self._name(name), self._url(name)
        if name in self.names and not name.endswith(_LISTS) and sending.there(name, uploader.info(at, url)):
            sending.sent(nbytes)
            return
        uploader.put(path, at, url)
        info = uploader.require(at, url, nbytes)
        if sending.check is not None:
            sending.check(url, path)
        sending.arrived(name, info)

    def _announce(self, sizes: Mapping[str, int]) -> None:
        text = json.dumps({"program": "fsdpckpt", "files": dict(sizes)})
        tried(
            lambda: self.filesystem.pipe_file(self._name(UPLOADING), text.encode()),
            url=self._url(UPLOADING),
            doing="uploading it",
            words=target_error,
        )

    def _delete(self, name: str) -> None:
        def delete() -> None:
            try:
                self.filesystem.rm_file(self._name(name))
            except FileNotFoundError:
                return

        tried(delete, url=self._url(name), doing="deleting it", words=target_error)

    def _name(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def open_target(url: str, source: str, *, overwrite: bool, resume: bool) -> RemoteTarget:
    """The DST at ``url``, if it may be written.

    Raises UsageError for one that holds or lies in ``source``, TargetExistsError for one that is there already and is
    neither to be overwritten nor resumed, TargetUnwritableError for what cannot be written to at all.
    """
    target = url.rstrip("/")
    if is_http(target):
        raise TargetUnwritableError(
            f"{url}: web servers are read from only",
            file=url,
            next_step="give a path, or the URL of an object store (s3://, gs://, abfs://)",
        )
    above, below = source.rstrip("/") + "/", target + "/"
    if above.startswith(below) or below.startswith(above):
        raise UsageError(f"{url} and the source lie within each other", file=url, next_step="give a DST outside of SRC")
    try:
        filesystem, root = filesystem_of(target)
    except SourceError as error:  # it is said of a source, and is true of a target
        next_step = (error.next_step or "give a path").replace(", https://, ...", ", ...")
        raise TargetUnwritableError(error.what, why=error.why, file=url, next_step=next_step) from error
    root = root.rstrip("/")
    if is_url(source):  # s3:// and s3a:// name one object
        other, name = filesystem_of(source)
        above, below = name.rstrip("/") + "/", root + "/"
        if type(other) is type(filesystem) and (above.startswith(below) or below.startswith(above)):
            raise UsageError(
                f"{url} and the source lie within each other", file=url, next_step="give a DST outside of SRC"
            )
    filesystem.invalidate_cache()
    found = tried(lambda: list(filesystem.find(root)), url=url, doing="listing it", words=target_error)
    objects = (str(name) for name in found if not str(name).endswith("/"))  # else it stands for a directory
    names = tuple(name[len(root) :].lstrip("/") for name in objects)
    remote = RemoteTarget(target, filesystem, root, names)
    if names:
        _refuse_existing(remote, overwrite=overwrite, resume=resume)
    return remote


def _refuse_existing(remote: RemoteTarget, *, overwrite: bool, resume: bool) -> None:
    if remote.interrupted:
        if not overwrite and not resume:
            raise TargetExistsError(
                f"{remote.url} holds an upload that has not ended",
                file=f"{remote.url}/{UPLOADING}",
                why="it was interrupted, or still runs on another machine",
                next_step="--resume goes on with it, --overwrite begins again; or give another DST",
            )
        return
    if not overwrite:
        raise TargetExistsError(
            f"{remote.url} exists",
            file=remote.url,
            why="fsdpckpt never replaces anything unasked",
            next_step="give another DST, or add --overwrite to replace it",
        )
    if "/" not in remote.root:
        raise TargetExistsError(
            f"{remote.url} is a whole bucket: --overwrite does not replace that",
            file=remote.url,
            why="everything in it would be deleted",
            next_step="give a DST of its own, one that does not exist yet",
        )
