"""Prometheus and Alertmanager for `up --prometheus`: found, configured, started and stopped."""
