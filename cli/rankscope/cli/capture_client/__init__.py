"""Behind `capture` and `captures`."""
