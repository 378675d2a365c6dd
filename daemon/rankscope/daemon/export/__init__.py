"""The daemon's Prometheus metrics."""
