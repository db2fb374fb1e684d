"""Files of ``torch.save``, read as values with their tensors located in the file."""

from fsdpckpt.formats.torch.archive import (
    ChecksumRow,
    ComparedRecords,
    TorchArchive,
    check_byteorder,
    checksums_of,
    load_torch,
    local_tensor,
    notes_on_defaultdicts,
    notes_on_dropped,
    open_archive,
    parse_archive,
    read_archive,
    read_pickle,
)

__all__ = [
    "ChecksumRow",
    "ComparedRecords",
    "TorchArchive",
    "check_byteorder",
    "checksums_of",
    "load_torch",
    "local_tensor",
    "notes_on_defaultdicts",
    "notes_on_dropped",
    "open_archive",
    "parse_archive",
    "read_archive",
    "read_pickle",
]
