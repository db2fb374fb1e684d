"""Logical compare, digests, statistics and integrity. Reads through ``readers``; shares nothing with ``execute``.

``fsdpckpt.verify`` is this package and, in the Python API, a function (``fsdpckpt.callable_verify``).
"""
