"""Plots as SVG text and self-contained pages."""
