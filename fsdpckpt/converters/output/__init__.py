"""Where the output is written, how it becomes visible, and what an interrupted run left."""

from fsdpckpt.converters.output.publisher import Holders, Publisher, Request
from fsdpckpt.converters.output.rename import Rename
from fsdpckpt.converters.output.upload import Spooled, attach_leftovers

__all__ = ["Holders", "Publisher", "Rename", "Request", "Spooled", "attach_leftovers"]
