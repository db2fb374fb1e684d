"""Where bytes are: local files, remote stores, staging."""

from fsdpckpt.storage.protocols import (
    UPLOADING,
    ByteSource,
    ByteTarget,
    Entry,
    FileIdentity,
    change_between,
    changed_error,
    identity_of_status,
    is_remote,
    is_url,
    remote_identity,
    require_complete_url,
)

__all__ = [
    "ByteSource",
    "ByteTarget",
    "Entry",
    "FileIdentity",
    "UPLOADING",
    "change_between",
    "changed_error",
    "identity_of_status",
    "is_remote",
    "is_url",
    "remote_identity",
    "require_complete_url",
]
