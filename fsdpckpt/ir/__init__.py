"""Holds the IR: one description of a checkpoint that every reader fills and every writer consumes.

Imports nothing of this package but itself and ``errors``; the standard library and numpy only.
"""
