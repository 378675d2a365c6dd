"""The store of profiles on the node."""
