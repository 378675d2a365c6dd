"""Capture objects: from a request to traces."""
