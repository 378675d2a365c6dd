"""Plots as SVG text and self-contained HTML pages."""
