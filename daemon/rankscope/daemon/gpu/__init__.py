"""GPU counters per rank, from NVML and GPM or from a dcgm-exporter."""
