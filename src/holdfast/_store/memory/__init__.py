"""Shared memory: the arena with its slots, and the control page."""
