"""Behind `analyze trace`."""
