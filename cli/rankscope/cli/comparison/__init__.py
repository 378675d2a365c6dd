"""Behind `compare`."""
