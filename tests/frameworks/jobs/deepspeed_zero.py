"""DeepSpeed ZeRO on the CPU over gloo. The stage is the first argument."""

from __future__ import annotations

import sys

import deepspeed
import torch
from parts import BATCH, Model, endless, loader, loss_of, progress, set_up

# An operator for inference that would be compiled for two minutes and is not used here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

set_up()
deepspeed.init_distributed(dist_backend="gloo")
model = Model()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": int(sys.argv[1])},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    },
)
for tokens, targets in endless(loader()):
    loss = loss_of(engine(tokens), targets)
    engine.backward(loss)
    engine.step()
    progress.next_step()
