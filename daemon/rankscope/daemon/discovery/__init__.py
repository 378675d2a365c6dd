"""Finds the training ranks of this node."""
