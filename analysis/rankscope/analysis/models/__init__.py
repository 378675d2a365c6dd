"""What a model needs: FLOPs, memory, MFU and the peaks of devices."""
