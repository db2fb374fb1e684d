"""Pickles, read without executing anything of them, and written."""

from fsdpckpt.formats.pickle.loader import load
from fsdpckpt.formats.pickle.stubs import (
    StubInstance,
    arguments_of,
    as_object,
    instance_class,
    state_of,
    stub_for,
)

__all__ = ["StubInstance", "arguments_of", "as_object", "instance_class", "load", "state_of", "stub_for"]
