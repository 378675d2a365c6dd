"""Models of training: FLOPs, memory, MFU and device peaks."""
