"""Step records of the probe: the ring's reader and the collector."""
