"""Dashboards as code, made into json/ by `make dashboards`. Imports nothing of Rankscope: what ties them to it is the
names of metrics, which tests hold against the exporters."""
