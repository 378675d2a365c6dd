"""Correlation: the job table and the verdicts over streamed windows. Works without Kubernetes."""
