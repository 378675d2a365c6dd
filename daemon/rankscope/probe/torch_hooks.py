"""Installs the probe's hooks into torch once it has been imported, part by part."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict

import rankscope.probe as api

from .nvtx_ranges import watch_ranges
from .session import Session
from .step_boundary import BackwardSteps, install_optimizer_hooks
from .torch_timers import hide_from_dynamo, time_checkpoints


def install(torch: Any) -> Dict[str, Callable[[Any], None]]:
    """Hooks what is there. Returns, by module name, what to do with parts of torch that are not imported yet."""
    session = Session(torch)
    tally = session.tally
    scaler_class = getattr(sys.modules.get("torch.amp.grad_scaler"), "GradScaler", None)
    optimizers = sys.modules["torch.optim.optimizer"]
    mark, mark_implicitly = install_optimizer_hooks(
        optimizers,
        tally,
        session.flush,
        torch.compiler.is_dynamo_compiling,
        scaler_class,
        torch.cuda,
    )
    time_checkpoints(torch, tally)
    watch_ranges(torch, session.ranges)
    backward_steps = BackwardSteps(mark_implicitly)
    backward_steps.watch(optimizers.Optimizer)
    session.spans.install_backward(
        torch.autograd, session.look_at_device, hide_from_dynamo(lambda: backward_steps.passed())
    )

    def explicit_step() -> None:
        session.mark_explicit()
        mark()

    api._marker = hide_from_dynamo(explicit_step)

    parts: Dict[str, Callable[[Any], None]] = {
        "torch.utils.data.dataloader": lambda module: session.spans.install_input(module, session.look_at_device),
    }
    if torch.distributed.is_available():
        session.spans.install(torch._C._distributed_c10d)
        session.facts.nccl.watch(torch._C._distributed_c10d)
        parts["torch.distributed._functional_collectives"] = session.spans.install_functional
        parts["torch.nn.parallel.distributed"] = lambda module: session.sampler.watch(module.DistributedDataParallel)
        parts["torch.distributed.rpc.api"] = lambda module: session.spans.install_rpc(
            torch._C.Future, module._is_current_rpc_agent_set
        )
        parts["torch.distributed.device_mesh"] = session.facts.watch_meshes
    for name in [name for name in parts if name in sys.modules]:
        parts.pop(name)(sys.modules[name])
    return parts
