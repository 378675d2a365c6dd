"""Fuzzing what reads a container's bytes: one `target_<name>.py` for each parser, and a small coverage-guided engine.

See docs/fuzzing.md."""
