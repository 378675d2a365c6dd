"""Behind `mfu`."""
