"""Pickles, read without executing anything of them, and written."""

from fsdpckpt.formats.pickle.loader import ARGUMENTS, StubInstance, as_object, instance_class, load, stub_for

__all__ = ["ARGUMENTS", "StubInstance", "as_object", "instance_class", "load", "stub_for"]
