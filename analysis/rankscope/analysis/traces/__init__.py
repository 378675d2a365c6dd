"""Analysis of torch-profiler traces: of one rank and of many ranks together. Works on columns; nothing here opens a
file."""
