"""A trace reduced to its numbers: a few kilobytes that reports are made of."""
