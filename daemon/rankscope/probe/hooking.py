"""Installs the probe's hooks into torch once it has been imported, part by part."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict

import rankscope.probe as api

from .session import Session
from .stepping import install_optimizer_hooks
from .timing import hide_from_dynamo, time_blocking_communication, time_checkpoints, time_input


def install(torch: Any) -> Dict[str, Callable[[Any], None]]:
    """Hooks what is there. Returns, by module name, what to do with parts of torch that are not imported yet."""
    session = Session(torch)
    tally = session.tally
    mark = install_optimizer_hooks(sys.modules["torch.optim.optimizer"], tally, session.flush)
    time_checkpoints(torch, tally)

    def explicit_step() -> None:
        session.mark_explicit()
        mark()

    api._marker = hide_from_dynamo(explicit_step)

    parts: Dict[str, Callable[[Any], None]] = {
        "torch.utils.data.dataloader": lambda module: time_input(module, tally),
    }
    if torch.distributed.is_available():
        bindings = torch._C._distributed_c10d
        time_blocking_communication(bindings, tally)
        parts["torch.nn.parallel.distributed"] = lambda module: session.sampler.watch(module.DistributedDataParallel)
        parts["torch.distributed.device_mesh"] = session.facts.watch_meshes
    for name in [name for name in parts if name in sys.modules]:
        parts.pop(name)(sys.modules[name])
    return parts
