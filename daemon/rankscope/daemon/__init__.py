"""The node daemon: finds training ranks on this machine, samples them, and serves windows and metrics.

It must not import torch, kubernetes or the operator, must not keep data of other nodes, and treats everything a
training process says (environment, ring, stacks) as hostile input."""
