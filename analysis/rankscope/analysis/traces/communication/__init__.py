"""The communication of one rank: collectives with their size, speed and overlap, and the effect of other settings."""
