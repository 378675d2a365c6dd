"""The demo's training job: real ranks over gloo, faults that begin while it trains, and the launcher of both.

`train.py` and `pipeline.py` are run as scripts, the way a user runs his own; they and the modules beside them that they
import (`model`, `dataset`, `model_size`, `faults`, `board`) know nothing of Rankscope. `launcher`, `cpu_limit` and
`tether` belong to the launcher and never import torch.
"""
