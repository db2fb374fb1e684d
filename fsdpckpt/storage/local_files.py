"""Sources on this machine: files, bytes in memory, and zeros.

Every read returns exactly the bytes asked for or raises: a short read is an error, never a shorter result.
"""

from __future__ import annotations

import os
import shlex
import stat as modes

from fsdpckpt.errors import SourceError, SourceMissingError, SourceUnrecognisedError
from fsdpckpt.ir.checkpoint import ZEROS
from fsdpckpt.storage.identity import identity_of_status
from fsdpckpt.storage.protocol import ends_too_early

__all__ = ["LocalFile", "MemoryFile", "ZeroFile"]


def _absent(path: str) -> SourceMissingError:
    if os.path.islink(path):
        return SourceMissingError(
            f"{path} is a link to {os.readlink(path)}, which does not exist",
            file=path,
            why="a download into a cache did not finish, or what the link names was moved or not copied along",
            next_step="download or copy it again (cp -L, rsync -L), or remove the link",
        )
    return SourceMissingError(f"{path} does not exist", file=path, next_step="copy the file to where it is looked for")


def _unreadable(path: str, offset: int, error: OSError) -> SourceError:
    return SourceError(
        f"{path} cannot be read at offset {offset}: {error.strerror}",
        file=path,
        why="the disk or the network file system is failing",
        next_step="run the command again; if it fails at the same place, fetch the file again",
    )


class LocalFile:
    """A local file, read with pread: safe from many threads."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Without O_NONBLOCK opening a pipe would wait for a writer, maybe for ever; files and disks do not mind it.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise _absent(path) from None
        except OSError as error:
            raise SourceError(
                f"{path} cannot be opened: {error.strerror}",
                file=path,
                why="it belongs to another user, or the disk is failing",
                next_step=f"ls -l {shlex.quote(path)}",
            ) from None
        status = os.fstat(self._fd)
        if not modes.S_ISREG(status.st_mode):
            raise SourceUnrecognisedError(
                f"{path} is a pipe or a device: a checkpoint is read at many places, in no order",
                file=path,
                next_step="write it to a file first, and give that file",
            )
        self.nbytes = status.st_size
        self.identity = identity_of_status(path, status)

    def read(self, offset: int, nbytes: int) -> bytes:
        try:
            data = os.pread(self._fd, nbytes, offset)
            while len(data) < nbytes:
                more = os.pread(self._fd, nbytes - len(data), offset + len(data))
                if not more:
                    raise ends_too_early(self.path, offset, nbytes, len(data))
                data += more
        except OSError as error:
            raise _unreadable(self.path, offset, error) from error
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise _unreadable(self.path, offset + done, error) from error
            if got == 0:
                raise ends_too_early(self.path, offset, len(buffer), done)
            done += got

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class MemoryFile:
    """Bytes already in memory, e.g. one item cut out of a DCP file."""

    def __init__(self, data: bytes, path: str = "<memory>") -> None:
        self.path = path
        self.nbytes = len(data)
        self._data = data

    def read(self, offset: int, nbytes: int) -> bytes:
        data = self._data[offset : offset + nbytes]
        if len(data) < nbytes or offset < 0:
            raise ends_too_early(self.path, offset, nbytes, len(data))
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def close(self) -> None:
        return None


class ZeroFile:
    """Zeros wherever it is read, without a file: the states that ``--missing-state zeros`` makes."""

    def __init__(self) -> None:
        self.path = ZEROS
        self.nbytes = 1 << 62  # longer than any checkpoint: nothing lies behind its end

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(nbytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        for begin in range(0, len(buffer), len(_ZERO_BLOCK)):
            count = min(len(_ZERO_BLOCK), len(buffer) - begin)
            buffer[begin : begin + count] = _ZERO_BLOCK[:count]

    def close(self) -> None:
        return None


_ZERO_BLOCK = memoryview(bytes(1 << 20))  # copied, so that no buffer-sized block of zeros is allocated a read
