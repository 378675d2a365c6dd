"""Behind `analyze alphabeta`."""
