"""What proves that two workers see one and the same file under a path, or files with the same bytes.

Length and samples do not: a fine-tune that changed a few rows has both. One file system and inode do, and so do
checksums of everything in the file.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.formats.zip import checksummed_directory
from fsdpckpt.storage.mounts import Mount, mounts_of
from fsdpckpt.storage.sources import Sources

# File systems that many machines mount, by the name that Linux gives them; of FUSE those that serve one store to all.
_SHARED = frozenset(
    ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "pvfs2", "glusterfs", "afs", "ocfs2"]
    + [f"fuse.{name}" for name in ("glusterfs", "gcsfuse", "s3fs", "mountpoint-s3", "juicefs", "blobfuse2", "sshfs")]
)
_LOCAL_SERVERS = ("localhost", "127.", "[::1]")  # a tunnel, or a server of each machine's own


def identity_proofs(path: str) -> tuple[bytes, ...]:
    """What only this file has, in several forms: workers with one of them in common see one file. Empty if it is not
    seen.

    Its inode in this kernel; its inode, length and times, which a file system that many machines mount gives to all of
    them alike, and which no copy has; its path in such a file system.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ()
    texts = [f"times {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"]
    if boot := _boot():
        texts.append(f"inode {boot} {status.st_dev} {status.st_ino}")
    if shared := _path_in_shared_mount(path, status.st_dev):
        texts.append(f"mount {shared} {status.st_size}")
    return tuple(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:16] for text in texts)


@cache
def _boot() -> str:
    """The identity of this machine's running kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:  # no Linux
        return ""


def _path_in_shared_mount(path: str, device: int) -> str | None:
    """File system, server and path there of a file that is on a file system of many machines."""
    real = os.path.realpath(path)
    above = [mount for mount in mounts_of(device) if _is_shared(mount) and _is_below(real, mount.point)]
    if not above:
        return None
    nearest = max(above, key=lambda mount: len(mount.point))  # of several mounts in each other
    inside = os.path.relpath(real, nearest.point)
    return f"{nearest.system} {nearest.source} {os.path.normpath(os.path.join(nearest.root, inside))}"


def _is_below(path: str, directory: str) -> bool:
    """Whether the real ``path`` is ``directory`` or below it, by their texts."""
    return os.path.commonpath([path, directory]) == directory


def _is_shared(mount: Mount) -> bool:
    """Whether other machines see the same files there."""
    return mount.system in _SHARED and not mount.source.startswith(_LOCAL_SERVERS)


def checksum_proof(path: str, sources: Sources) -> bytes:
    """A hash of the checksums of everything in a torch file; empty if it has none, or is not seen."""
    try:
        directory = checksummed_directory(sources.open(path))
    except (FsdpckptError, OSError):
        return b""
    return hashlib.sha256(directory).digest() if directory is not None else b""
