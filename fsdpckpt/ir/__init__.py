"""The IR: one description of a checkpoint that every reader fills and every writer consumes.

Level 1: imports nothing of this package but itself; stdlib and numpy only.
"""
