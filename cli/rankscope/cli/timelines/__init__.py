"""Behind `analyze timeline`."""
