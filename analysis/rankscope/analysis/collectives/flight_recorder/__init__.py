"""Dumps of torch's flight recorder: which ranks are in which collective, and who is missing."""
