"""FSDP1: FullyShardedDataParallel with a unit for every block."""

from __future__ import annotations

import functools

import torch
from parts import Block, Model, loader, set_up, train
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

set_up()
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
model = FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
train(model, torch.optim.AdamW(model.parameters()), loader())
