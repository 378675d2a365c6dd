"""Reads the bytes of a trace file into columns: any formatting, any size. Damage is repaired, or rejected with its
position."""
