"""Pure analysis: numbers in, verdicts out. No I/O, no clock, no torch, nothing else of ours."""
