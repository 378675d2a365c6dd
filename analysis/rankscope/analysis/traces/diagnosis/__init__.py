"""What bounds a job, in words, and what to try next."""
