"""Latency and bandwidth of collectives from timed calls (the alpha-beta model)."""
