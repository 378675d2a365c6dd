"""Statistics over columns of numbers. Imports nothing of Rankscope."""
