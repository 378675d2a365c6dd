"""Admission webhooks: probe injection, validation and audit of captures."""
