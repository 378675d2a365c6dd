"""Certificates that the operator issues, stores in Secrets and renews."""
