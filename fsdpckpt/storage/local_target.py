"""Writes local files at positions, and makes them and their names durable before they are trusted."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from contextlib import AbstractContextManager

import numpy as np

from fsdpckpt.errors import FsdpckptError, TargetUnwritableError
from fsdpckpt.storage.mounts import is_in_memory
from fsdpckpt.text import bytes_text

BLOCK = 4096  # bytes: the alignment that direct writes need on every disk in use
HUGE_PAGE = 2 << 20  # bytes
DIRECT_FROM = 1 << 20  # bytes: shorter files are not worth a second descriptor


class target_errors:  # noqa: N801  # used like a function; as a generator it would cost more than a small write
    """Turn an OSError while writing ``path`` into a TargetUnwritableError with the next step."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise _write_error(self._path, error) from None


def _write_error(path: str, error: OSError) -> FsdpckptError:
    why = {
        errno.ENOSPC: "the file system is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "no permission to write there",
        errno.EPERM: "no permission to write there",
        errno.EROFS: "the file system is mounted read-only",
        errno.ENAMETOOLONG: "the file name is too long for this file system",
        errno.EFBIG: "the file is larger than this file system allows",
    }.get(error.errno or 0, "the file system refused the request")
    return TargetUnwritableError(
        f"cannot write {path}: {error.strerror}",
        file=path,
        why=why,
        next_step="choose another DST, or make room",
        run_again=True,
    )


def aligned_buffer(nbytes: int) -> memoryview:
    """At least ``nbytes`` bytes of zeroed memory, aligned to a page, as direct writes need.

    In huge pages where Linux has some: touching 80 MiB for the first time takes 4 ms with them, 36 ms without, and 65
    ms in shared memory, which is what ``mmap`` gives by default.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class WritableFile:
    """A ``ByteTarget`` on a local disk.

    Large writes bypass the page cache (O_DIRECT) if the file system allows it: this saves one copy of the bytes, and
    the disk works from the first write on instead of waiting for the final fsync. Partial blocks, and memory that is
    not aligned as the file is, are written through the cache; both may be mixed, as they never share a block.
    """

    def __init__(self, path: str, nbytes: int, *, existing: bool = False) -> None:
        """``existing``: the file exists, with this length; other processes may write other bytes of it."""
        self.path = path
        self.nbytes = nbytes
        self._fd = self._direct = -1
        self._turn: AbstractContextManager[object] = contextlib.nullcontext()
        self._aligned = True
        self._durable = False  # committed
        self._lost = False  # a sync failed: the kernel reports a lost write once, and every later sync succeeds
        self._closing = threading.Lock()
        with target_errors(path):
            try:
                self._open(existing=existing)
            except BaseException:
                self.close()
                raise

    def _open(self, *, existing: bool) -> None:
        create = 0 if existing else os.O_CREAT | os.O_EXCL
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | create, 0o644)
        if not existing:
            os.ftruncate(self._fd, self.nbytes)
        if self.nbytes < DIRECT_FROM or not hasattr(os, "O_DIRECT"):
            return
        if is_in_memory(os.fstat(self._fd).st_dev):
            self._turn = threading.Lock()  # the kernel lets one thread write to such a file; the others would spin
            self._require_space()
            return
        if not existing:
            os.posix_fallocate(self._fd, 0, self.nbytes)  # finds a full disk now, and allocates contiguous extents
        with contextlib.suppress(OSError):  # a file system without direct writes
            self._direct = os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def _require_space(self) -> None:
        """Find a full file system now. Allocating would write zeros to all of the file, which is in memory."""
        free, used = os.fstatvfs(self._fd), os.fstat(self._fd).st_blocks * 512
        if free.f_blocks > 0 and free.f_bavail * free.f_frsize < self.nbytes - used:  # no blocks: there is no limit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at ``offset``."""
        with target_errors(self.path):
            view = memoryview(data)
            low, high = self._blocks(offset, view)
            if low < high:
                try:
                    _write_all(self._direct, view[low:high], offset + low)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # EINVAL: the device needs another alignment
                        raise
                    self._aligned = False  # the descriptor stays: other threads may be writing with it
                    low = high
            if low >= high:
                low = high = len(view)
            with self._turn:
                _write_all(self._fd, view[:low], offset)
                _write_all(self._fd, view[high:], offset + high)

    def _blocks(self, offset: int, view: memoryview) -> tuple[int, int]:
        """The range of ``view`` that is whole blocks of the file and aligned in memory; (0, 0) if there is none."""
        if self._direct < 0 or not self._aligned or len(view) < BLOCK or (_address_of(view) - offset) % BLOCK:
            return 0, 0
        return -offset % BLOCK, (offset + len(view)) // BLOCK * BLOCK - offset

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with what was written at ``offset``."""
        with target_errors(self.path):
            done = 0
            while done < len(buffer):
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
                if got == 0:
                    raise OSError(errno.EIO, "the staged file became shorter")
                done += got

    def sync(self) -> None:
        """Make what was written so far durable. Any thread may call it at any time."""
        with target_errors(self.path):
            with self._closing:  # a closed descriptor's number may belong to another file by now
                descriptor = os.dup(self._fd) if self._fd >= 0 else -1
            if descriptor < 0 and self._durable:
                return
            if descriptor < 0 or self._lost:
                raise OSError(errno.EIO, "what was written is not known to be on the disk")
            try:
                os.fdatasync(descriptor)
            except OSError:
                self._lost = True
                raise
            finally:
                os.close(descriptor)

    def commit(self) -> None:
        """See ``ByteTarget.commit``."""
        with target_errors(self.path):
            length = os.fstat(self._fd).st_size
            if length != self.nbytes:
                raise TargetUnwritableError(
                    f"{self.path} changed while it was written",
                    file=self.path,
                    expected=bytes_text(self.nbytes),
                    found=bytes_text(length),
                )
            if self._lost:
                raise OSError(errno.EIO, "what was written is not known to be on the disk")
            try:
                os.fsync(self._fd)
            except OSError:
                self._lost = True
                raise
            self._durable = True
            self.close()

    def close(self) -> None:
        with self._closing:
            for descriptor in (self._fd, self._direct):
                if descriptor >= 0:
                    os.close(descriptor)
            self._fd = self._direct = -1


def _address_of(view: memoryview) -> int:
    """The memory address of the first byte of ``view``."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


# What a file system answers that cannot sync directories: some network ones and FUSE.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


def sync_directory(path: str) -> bool:
    """Make the file names in a directory durable. False if the file system cannot do that."""
    with target_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
            return False
        finally:
            os.close(descriptor)
    return True


def replace_file(path: str, content: bytes) -> None:
    """Make ``content`` the file at ``path``, durably and at once: readers see the earlier file or the new one.

    Raises OSError, and then leaves the earlier file.
    """
    folder, name = os.path.split(os.path.abspath(path))
    partial = os.path.join(folder, f".{name}-{os.urandom(8).hex()}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    with contextlib.suppress(TargetUnwritableError):  # the file is complete, and visible under its name
        sync_directory(folder)
