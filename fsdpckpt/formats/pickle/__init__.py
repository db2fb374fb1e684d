"""Pickles, read without executing anything of them, and written."""

from fsdpckpt.formats.pickle.loader import (
    StubInstance,
    arguments_of,
    as_object,
    instance_class,
    load,
    state_of,
    stub_for,
)

__all__ = ["StubInstance", "arguments_of", "as_object", "instance_class", "load", "state_of", "stub_for"]
