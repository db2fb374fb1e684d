"""Where the output is written, how it becomes visible, and what an interrupted run left."""

from fsdpckpt.converters.output.publisher import Holders, Publisher, Request
from fsdpckpt.converters.output.streamed import publisher_of
from fsdpckpt.converters.output.upload import attach_leftovers

__all__ = ["Holders", "Publisher", "Request", "attach_leftovers", "publisher_of"]
