"""Behind `analyze trace`: files of ranks in, findings, tables and a page out."""
