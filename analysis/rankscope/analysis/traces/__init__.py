"""What one torch-profiler trace says, and what the traces of many ranks say together. Columns only; nothing here opens
a file."""
