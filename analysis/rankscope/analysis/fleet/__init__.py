"""Where the GPU-hours of a fleet went: usage, bad hardware, runs below their target, runs to pack."""
