"""What bounds a job, and what to try next."""
