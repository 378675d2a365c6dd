"""Plots as SVG text and self-contained pages. Numbers in, text out: no plotting library, no network, no file."""
