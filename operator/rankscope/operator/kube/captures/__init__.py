"""Capture objects: from what somebody, a policy or an alert asks for to traces and findings in a status."""
