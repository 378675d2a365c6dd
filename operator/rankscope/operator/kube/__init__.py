"""The operator in a cluster: pods become runs, verdicts become status and events, Capture objects become captures."""
