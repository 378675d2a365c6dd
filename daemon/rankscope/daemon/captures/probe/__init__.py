"""Captures by the probe: commands through the ring, traces out of memory files."""
