"""Certificates that the operator makes, keeps in Secrets and renews: for webhooks, for the fleet."""
