"""Where the output is written, how it becomes visible, and what an interrupted run left."""

from fsdpckpt.converters.output.publisher import Publisher, Request
from fsdpckpt.converters.output.publishers import attach_leftovers, publisher_of

__all__ = ["Publisher", "Request", "attach_leftovers", "publisher_of"]
