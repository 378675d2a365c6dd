"""Profiles of stacks: frames, phases, the columns of a profile, its export formats, and the comparison of two."""
