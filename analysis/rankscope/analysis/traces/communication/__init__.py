"""The collectives of one rank: what they moved, how fast, how well hidden, and what other settings would do."""
