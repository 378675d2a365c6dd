"""A training loop whose backward spends its time in Python code, in one of several ways. The slow line is marked, and
takes far longer than the rest of a step, on a busy machine too.

Prints `step 3` once it is under way. Ends by itself, so that a test that loses it leaves nothing behind.
"""

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.checkpoint import checkpoint

SECONDS = 600.0
FEATURES = 64


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)  # SLOW: function
        return gradient * 2


def slow_tensor_hook(gradient: torch.Tensor) -> torch.Tensor:
    time.sleep(0.1)  # SLOW: tensor_hook
    return gradient


def slow_module_hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
    time.sleep(0.1)  # SLOW: module_hook


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)  # SLOW: recompute
        return self.linear(values)


class Device(torch.Tensor):
    """A tensor of a device other than the CPU, so that autograd runs its backward on a thread of the device, as it does
    for GPUs. The values are on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor, requires_grad: bool = False) -> "Device":
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=torch.device("pretended:0"), requires_grad=requires_grad
        )
        made.values_on_cpu = values
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _pytree.tree_map_only(Device, lambda tensor: tensor.values_on_cpu, (args, kwargs or {}))
        result = function(*args, **{name: value for name, value in kwargs.items() if name != "device"})
        return _pytree.tree_map_only(torch.Tensor, Device, result)


def main(kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "device":
        _setup_privateuseone_for_python_backend("pretended")
    block, linear = Block(), nn.Linear(FEATURES, FEATURES)
    if kind == "module_hook":
        linear.register_full_backward_hook(slow_module_hook)
    give_up_at = time.monotonic() + SECONDS
    step = 0
    while time.monotonic() < give_up_at:
        batch = torch.randn(8, FEATURES)
        if kind == "device":
            loss = Scale.apply(Device(batch, requires_grad=True)).sum()
        elif kind == "recompute":
            loss = checkpoint(block, linear(batch), use_reentrant=False).square().mean()
        else:
            outputs = linear(batch.requires_grad_())
            if kind == "tensor_hook":
                outputs.register_hook(slow_tensor_hook)
            loss = (Scale.apply(outputs) if kind == "function" else outputs).square().mean()
        loss.backward()
        step += 1
        if step == 3:
            print("step 3", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
