"""Rates that the operator asks this node for."""
