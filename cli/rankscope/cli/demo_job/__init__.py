"""The demo's training job: real ranks over gloo, faults that begin while it trains, and the launcher of both.

`train.py` and `pipeline.py` run as scripts, like a user's own; they and the modules that they import (`model`,
`dataset`, `model_size`, `faults`, `board`) do not use Rankscope. `launcher`, `cpu_limit` and `tether` belong to the
launcher and never import torch."""
