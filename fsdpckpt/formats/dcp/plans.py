"""Goes past the plans of all ranks, which Megatron-core leaves in ``.metadata`` behind everything that is read.

``save_state_dict_async_plan`` (``megatron/core/dist_checkpointing/strategies/state_dict_saver.py``) gives the metadata
the attribute ``all_local_plans``: the chunks once more, as objects that refer to those in the tables before it. It is
the last attribute, so nothing refers to what is in it.
"""

from __future__ import annotations

import re

from fsdpckpt.formats.dcp.fields import UnusualError

PLANS = b"all_local_plans"
END = b"ub."  # of the attributes, of the object, of the pickle

# Opcodes of one length that neither open nor close what stands between marks, many at a time.
_PLAIN = re.compile(rb"(?:[\x94)\x81}\]NbaR\x93\x85-\x89s0]|[hK].|j.{4}|M..|J.{4}|G.{8}){1,64}", re.DOTALL)
_MARK, _CLOSING, _TEXT, _LONG_TEXT, _LONG = ord("("), b"uet", 0x8C, ord("X"), 0x8A


class Plans:
    """The list of plans, from behind its mark on. ``ended``: it was gone past, and nothing came after it."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 1  # marks that are open; 0 between batches of the list, and behind it

    def past(self, data: bytes, at: int, limit: int) -> int:
        """Go from ``at`` at least to ``limit``; returns where an opcode begins. Raises UnusualError for anything that
        is no list of plans in the last place."""
        while at < limit and not self.ended:
            opcode = data[at]
            if self._depth == 0:
                self.ended = data.startswith(END, at)
                if not self.ended and opcode != _MARK:
                    raise UnusualError("an attribute behind the plans")
                at += len(END) if self.ended else 1
                self._depth = 1
                continue
            plain = _PLAIN.match(data, at)
            if plain is not None:
                at = plain.end()
            elif opcode == _MARK or opcode in _CLOSING:
                self._depth += 1 if opcode == _MARK else -1
                at += 1
            elif opcode == _TEXT:
                at += 2 + data[at + 1]
            elif opcode == _LONG_TEXT:
                at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            elif opcode == _LONG:
                at += 2 + data[at + 1]
            else:
                raise UnusualError(f"opcode {opcode:#x}")
        if at > len(data):
            raise UnusualError("a long text")
        return at
