"""Links source files that would be written unchanged, so that a conversion that only renames moves no data.

``--link`` chooses how. The file system is tried before the layout, because links need another layout than copies. Two
kinds of target files can be links: the data files of a DCP source, which the new ``.metadata`` refers to
(``writers.dcp``), and whole files whose plan would write the same bytes to the same places. A linked file is never
opened for writing.

A hard link is a second name for the same file. A reflink is a new file that shares blocks with the old one until either
is written to.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import posixpath
import struct
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fsdpckpt import flags
from fsdpckpt.errors import TargetUnwritableError, UsageError
from fsdpckpt.execute.checks import require_checksum, sum_of
from fsdpckpt.execute.compared_output import target_differs
from fsdpckpt.execute.recorded import linked_checksums
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Note, SourceFile
from fsdpckpt.ir.files import require_stored, stored_by_number
from fsdpckpt.ir.targets import LinkedFile, Target
from fsdpckpt.options import ConvertOptions, LinkMode
from fsdpckpt.plan import FilePlan, Plan
from fsdpckpt.readers.side_files import auxiliary
from fsdpckpt.storage import change_between, changed_error, identity_of_status, is_url
from fsdpckpt.storage.local_target import target_errors
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import Staging
from fsdpckpt.storage.target_checks import existing_and_missing
from fsdpckpt.text import plural, size_text

_FICLONE, _FICLONERANGE = 0x40049409, 0x4020940D  # linux/fs.h
_PROBE = 1 << 20  # bytes: a multiple of every block size


def can_reflink(path: str, directory: str) -> bool:
    """Whether a new file in ``directory`` can share blocks with the file at ``path``. Leaves nothing behind."""
    try:
        with open(path, "rb") as source, tempfile.TemporaryFile(dir=directory) as probe:
            nbytes = _PROBE if os.fstat(source.fileno()).st_size > _PROBE else 0  # 0: to the end
            fcntl.ioctl(probe.fileno(), _FICLONERANGE, struct.pack("qQQQ", source.fileno(), 0, nbytes, 0))
    except OSError:
        return False
    return True


def hardlink(source: str, path: str) -> None:
    """Give the file at ``source`` the second name ``path``; the caller syncs the directory. Raises
    TargetUnwritableError.
    """
    try:
        os.link(source, path, follow_symlinks=False)
    except OSError as error:
        raise _refused_error(source, path, error) from None
    _sync(path)


def reflink(source: str, path: str) -> None:
    """Create ``path`` with the bytes of ``source``. Raises TargetUnwritableError."""
    with target_errors(path):
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(source, "rb") as file:
                fcntl.ioctl(new, _FICLONE, file.fileno())
        finally:
            os.close(new)
    _sync(path)


def _sync(path: str) -> None:
    with target_errors(path):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _refused_error(source: str, path: str, error: OSError) -> TargetUnwritableError:
    why = {
        errno.EXDEV: "they are on different file systems, which no hard link can cross",
        errno.EPERM: "the file belongs to another user (fs.protected_hardlinks), or the file system has no hard links",
        errno.EMLINK: "the file has as many names as its file system allows",
    }.get(error.errno or 0, "the file system refused the request")
    return TargetUnwritableError(
        f"{path} cannot be a hard link to {source}: {error.strerror}",
        file=path,
        why=why,
        next_step=f"give {flags.link('auto')}, which copies where nothing can be shared",
    )


@dataclass(frozen=True, slots=True)
class Linking:
    """How files are linked (``COPY``: not at all), and the numbers of the source ``files`` that can be linked.

    ``requested``: the value of ``--link``.
    """

    requested: LinkMode
    mode: LinkMode = LinkMode.COPY
    files: frozenset[int] = frozenset()

    def notes(self, target: Target, files: Sequence[SourceFile]) -> list[Note]:
        """The note on what was linked. Raises UsageError if links were requested and no file would be unchanged."""
        if not target.links:
            if self.requested in (LinkMode.HARDLINK, LinkMode.REFLINK):
                raise UsageError(
                    f"{flags.link(self.requested)}: no file of DST would be the same as a file of SRC",
                    why="this conversion cuts the tensors differently, casts them, or writes them to other files",
                    next_step=f"drop {flags.link}: the bytes have to be copied",
                )
            if self.requested is LinkMode.AUTO and self.mode is LinkMode.COPY:
                message = "nothing was linked: the file system of DST cannot share blocks with the files of SRC"
                return [Note("linked", f"{message} (reflinks); {flags.link('hardlink')} may still share whole files")]
            return []
        nbytes = sum(files[link.source].nbytes for link in target.links)
        count = f"{plural(len(target.links), 'file')} of DST ({size_text(nbytes)})"
        if self.mode is LinkMode.HARDLINK:
            message = f"{count} are hard links to files of SRC. A program that writes into one changes SRC and DST; "
            message += "deleting one leaves the other"
        else:
            message = f"{count} share blocks with files of SRC (reflinks), until either is changed"
        unused = nbytes - sum(min(link.used, files[link.source].nbytes) for link in target.links)
        if unused > nbytes // 100:
            message += f". Linked files contain {size_text(unused)} that DST does not use"
        return [Note("linked", message)]


def without_links(options: ConvertOptions, why: str) -> ConvertOptions:
    """``options`` for a run that cannot link files because of ``why``. Raises UsageError if links were requested."""
    if options.link in (LinkMode.HARDLINK, LinkMode.REFLINK):
        raise UsageError(f"{flags.link(options.link)} cannot be done here: {why}", next_step=f"drop {flags.link}")
    return replace(options, link=LinkMode.COPY)


def choose_linking(requested: LinkMode, files: Sequence[SourceFile], target: str) -> Linking:
    """Find the files that can be linked into the directory of ``target``; the others are copied.

    If only other workers see a file, nothing is linked: the output must not depend on who sees what. Raises
    TargetUnwritableError or UsageError if nothing can be linked and ``requested`` names a kind of link.
    """
    if requested is LinkMode.COPY:
        return Linking(requested)
    local = {number: file.path for number, file in stored_by_number(files).items() if not is_url(file.path)}
    unseen = next((path for path in local.values() if not os.path.isfile(path)), None)
    devices = {number: os.stat(path).st_dev for number, path in local.items()} if unseen is None else {}
    parent, _ = existing_and_missing(os.path.dirname(os.path.realpath(target)))
    mode = LinkMode.HARDLINK if requested is LinkMode.HARDLINK else LinkMode.REFLINK
    if mode is LinkMode.HARDLINK:
        linkable_devices = {os.stat(parent).st_dev}
    else:
        first = {device: local[number] for number, device in reversed(devices.items())}
        linkable_devices = {device for device, path in first.items() if can_reflink(path, parent)}
    linkable = frozenset(number for number, device in devices.items() if device in linkable_devices)
    if linkable:
        return Linking(requested, mode, linkable)
    if requested is LinkMode.AUTO:
        return Linking(requested)
    if not devices:
        where = f"{unseen} is on another machine" if unseen is not None else "SRC is not on a disk of this machine"
        raise UsageError(
            f"{flags.link(requested)}: {where}",
            why="only files of one local file system can be linked",
            next_step=f"drop {flags.link}",
        )
    if mode is LinkMode.HARDLINK:
        raise TargetUnwritableError(
            f"{flags.link('hardlink')}: {target} and SRC are on different file systems",
            file=target,
            why="a hard link is a second name of a file, within its file system",
            next_step=f"give a DST on the file system of SRC, or drop {flags.link}",
        )
    raise TargetUnwritableError(
        f"{flags.link('reflink')}: the file system of {target} cannot share blocks with the files of SRC",
        file=target,
        why="XFS, Btrfs and some others can, within one file system; ext4 and tmpfs cannot",
        next_step=f"give {flags.link('hardlink')}, which makes SRC and DST share whole files, or drop {flags.link}",
    )


def link_equal_files(
    target: Target, plan: Plan, linking: Linking, files: Sequence[SourceFile], sources: Sources
) -> tuple[Target, Plan]:
    """Replace files that would equal a source file by links, in ``target`` and ``plan``.

    Small text files that describe a model are copied all the same: people edit them.
    """
    equal = {
        file.path: number
        for file in plan.files
        if linking.files and (number := _equal_file(file, linking, files, sources)) is not None
    }
    if not equal:
        return target, plan
    links = [LinkedFile(path, number, files[number].nbytes) for path, number in equal.items()]
    target = replace(
        target, files=[file for file in target.files if file.path not in equal], links=[*target.links, *links]
    )
    return target, plan.without(equal)


def _equal_file(file: FilePlan, linking: Linking, files: Sequence[SourceFile], sources: Sources) -> int | None:
    """The number of the linkable file with the bytes of ``file``; None if there is none.

    All tensor bytes must come from the same offsets of that file, and the bytes between them are compared. Checksums of
    tensor bytes are taken from the source: a copy would have compared the bytes with them.
    """
    copies = file.copies
    if not len(copies.file) or auxiliary(posixpath.basename(file.path)):
        return None
    number = int(copies.file[0])
    if number not in linking.files or files[number].nbytes != file.nbytes:
        return None
    in_place = (copies.file == number) & (copies.source == copies.target) & (copies.rows == 1) & (copies.cast < 0)
    return number if in_place.all() and _same_literals(file, sources, require_stored(files[number]).path) else None


def _same_literals(file: FilePlan, sources: Sources, path: str) -> bool:
    source = sources.open(path)
    checksum_offsets = np.sort(file.checksums[:, 2:].ravel()).tolist()
    for at, start, nbytes in file.literals.tolist():
        content = bytearray(source.read(at, nbytes))
        rows = slice(bisect_left(checksum_offsets, at), bisect_left(checksum_offsets, at + nbytes))
        for offset in checksum_offsets[rows]:
            content[offset - at : offset - at + 4] = bytes(min(4, at + nbytes - offset))
        if content != file.blob[start : start + nbytes]:
            return False
    return True


def make_links(
    target: Target, linking: Linking, files: Sequence[SourceFile], staging: Staging, sources: Sources
) -> None:
    """Make the links of ``target`` in ``staging``; their names become durable when it is committed.

    ``sources`` knows each of ``files``. Raises TargetUnwritableError, and SourceCorruptError for a file that changed
    since it was read.
    """
    for link in target.links:
        source, path = require_stored(files[link.source]).path, staging.locate(link.path)
        with target_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        (hardlink if linking.mode is LinkMode.HARDLINK else reflink)(os.path.realpath(source), path)
        linked, before = identity_of_status(source, os.stat(path)), sources.identity(source)
        if linking.mode is LinkMode.REFLINK:  # a new inode, with its own times
            linked = replace(before, nbytes=linked.nbytes)
        change = change_between(before, linked)
        if change is not None:
            raise changed_error(source, change)


def require_linked(target: Target, files: Sequence[SourceFile], path: str) -> None:
    """Raises TargetExistsError unless the linked files of the complete DST at ``path`` are those of the source."""
    for link in target.links:
        linked = os.path.join(path, link.path) if link.path else path
        source = require_stored(files[link.source]).path
        if not os.path.isfile(linked) or not (
            os.path.samefile(linked, source) or filecmp.cmp(linked, source, shallow=False)
        ):
            raise target_differs(path)


def check_linked(target: Target, checkpoint: Checkpoint, sources: Sources) -> None:
    """Read what linked files have a checksum for, in themselves or in ``fsdpckpt.json``, and compare.

    Raises SourceCorruptError for bytes that do not match.
    """
    linked = frozenset(link.source for link in target.links)
    checksums = Checksums.joined([checkpoint.checksums, linked_checksums(checkpoint, linked)])
    checkpoint = replace(checkpoint, checksums=checksums)
    require_recorded(checkpoint, np.isin(checksums.file, list(linked)), sources)


def require_recorded(checkpoint: Checkpoint, wanted: npt.NDArray[np.bool_], sources: Sources) -> None:
    """Read the bytes of the ``wanted`` checksums of ``checkpoint``. Raises SourceCorruptError if they do not match."""
    checksums = checkpoint.checksums
    summed = np.isin(checksums.file, checksums.file[wanted & (checksums.crc != 0)])  # all 0: saved without checksums
    columns = (checksums.file, checksums.offset, checksums.nbytes, checksums.crc)
    for file, offset, nbytes, crc in zip(*(column[wanted & summed].tolist() for column in columns), strict=True):
        path, length = checkpoint.files[file].path, checkpoint.files[file].nbytes
        recorded = (offset, nbytes) == (0, length)
        require_checksum(path, offset, nbytes, crc, sum_of(sources.open(path), offset, nbytes), recorded=recorded)
