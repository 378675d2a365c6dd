"""Behind `capture` and `captures`: asking, following, fetching, and saying how it went."""
