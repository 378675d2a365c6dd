"""ProfilingPolicy objects: which runs one selects, and what it changes."""
