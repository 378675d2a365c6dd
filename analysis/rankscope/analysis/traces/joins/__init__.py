"""Joins the traces of many ranks: clock alignment, arrivals at collectives, slow ranks, and one merged trace for
Perfetto."""
