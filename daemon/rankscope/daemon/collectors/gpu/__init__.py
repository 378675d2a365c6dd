"""GPU counters per rank: what NVML and GPM say, or an existing dcgm-exporter, and whose GPU it is."""
