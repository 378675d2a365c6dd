"""Correlation: the job table and the verdicts over streamed windows. Free of Kubernetes: a laptop runs it too."""
