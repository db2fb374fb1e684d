"""The IR: one description of a checkpoint for all readers and writers.

The package imports nothing of fsdpckpt but itself, ``errors``, ``text`` and ``version``.
"""

from fsdpckpt.ir.terms import Container, IdRule, KeyType, Layout, Section, SectionName, Strategy, section_of

__all__ = ["Container", "IdRule", "KeyType", "Layout", "Section", "SectionName", "Strategy", "section_of"]
