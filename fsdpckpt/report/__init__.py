"""Draws a checkpoint as one self-contained HTML page: ``inspect --report``."""
