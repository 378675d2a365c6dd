"""The network of the node: ports and their counters, and how they compare with their own past."""
