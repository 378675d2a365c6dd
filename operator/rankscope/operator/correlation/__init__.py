"""Correlation: the job table and the verdicts over streamed windows. Free of Kubernetes, so that a laptop runs it too."""
