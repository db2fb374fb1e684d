"""Skips the plans of all ranks, which Megatron-core appends after everything that is read.

``save_state_dict_async_plan`` (``megatron/core/dist_checkpointing/strategies/state_dict_saver.py``) gives the metadata
the attribute ``all_local_plans``: the chunks once more, as objects that refer to those in the tables before it. It is
the last attribute, so nothing refers to its content.
"""

from __future__ import annotations

import re

from fsdpckpt.formats.pickle.opcodes import opcode_end
from fsdpckpt.formats.pickle.operands import NotScannedError

_END = b"ub."  # the ends of the attributes, of the object and of the pickle

# Opcodes of one length that neither open nor close a mark, many at a time.
_PLAIN = re.compile(rb"(?:[\x94)\x81}\]NbaR\x93\x85-\x89s0]|[hK].|j.{4}|M..|J.{4}|G.{8}){1,64}", re.DOTALL)
_MARK, _CLOSING, _COUNTED = ord("("), b"uet", b"\x8cX\x8a"


class Plans:
    """The list of plans, from its mark on. ``ended``: it was skipped, and nothing followed it."""

    key = b"\x8c\x0fall_local_plans\x94"
    begin = b"]\x94("  # memoised, then several elements
    end = _END

    def __init__(self) -> None:
        self.ended = False
        self._depth = 1  # open marks; 0 between batches of the list, and after it

    def past(self, data: bytes, at: int, limit: int) -> int:
        """Skip from ``at`` at least to ``limit``; return where an opcode begins.

        Raises NotScannedError for anything but a list of plans in the last place.
        """
        while at < limit and not self.ended:
            opcode = data[at]
            if self._depth == 0:
                self.ended = data.startswith(_END, at)
                if not self.ended and opcode != _MARK:
                    raise NotScannedError("an attribute behind the plans")
                at += len(_END) if self.ended else 1
                self._depth = 1
                continue
            plain = _PLAIN.match(data, at)
            if plain is not None:
                at = plain.end()
            elif opcode == _MARK or opcode in _CLOSING:
                self._depth += 1 if opcode == _MARK else -1
                at += 1
            elif opcode in _COUNTED:
                at = opcode_end(data, at)
            else:
                raise NotScannedError(f"opcode {opcode:#x}")
        if at > len(data):
            raise NotScannedError("a long text")
        return at
