"""The operator: correlates the ranks of many nodes. Must not import the daemon or the probe."""
