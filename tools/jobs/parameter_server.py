"""An asynchronous parameter server: rank 0 applies each worker's gradients as they come and answers with its weights.

Arguments: how messages travel (`messages` for send and receive, `rpc` for torch.distributed.rpc), and whether workers
step an optimizer of their own (`own_optimizer`)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from cpu_frameworks import SleepingSetup, progress
from frameworks import loss_of
from parts import set_up, set_up_torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# What the server takes for one update.
UPDATE_SECONDS = 0.002
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Server:
    def __init__(self) -> None:
        self.model = SleepingSetup().network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.weights = list(self.model.parameters())
        self._lock = threading.Lock()

    def apply(self, gradients: torch.Tensor) -> torch.Tensor:
        with self._lock:
            start = 0
            for weight in self.weights:
                weight.grad = gradients[start : start + weight.numel()].view_as(weight)
                start += weight.numel()
            time.sleep(UPDATE_SECONDS)
            time.sleep(progress.delay("server"))  # FAULT server
            self.optimizer.step()
            progress.step_ended()
            return parameters_to_vector(self.weights).detach()


def serve_messages() -> None:
    server = Server()
    gradients = torch.zeros_like(parameters_to_vector(server.weights))
    while True:
        worker = dist.recv(gradients)
        dist.send(server.apply(gradients), worker)


def work(exchange: Callable[[torch.Tensor], torch.Tensor], own_optimizer: bool) -> None:
    setup = SleepingSetup()
    model = setup.network()
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.01) if own_optimizer else None
    for batch in setup.batches():
        model.zero_grad()
        loss_of(model(batch)).backward()
        gradients = torch.cat([weight.grad.flatten() for weight in weights])
        if optimizer is not None:
            optimizer.step()
        vector_to_parameters(exchange(gradients), weights)
        progress.step_ended()


def exchange_messages(gradients: torch.Tensor) -> torch.Tensor:
    dist.send(gradients, 0)
    answer = torch.empty_like(gradients)
    dist.recv(answer, 0)
    return answer


def main(how: str, own_optimizer: bool) -> None:
    if how == "messages":
        set_up(cpu=True)
        serve_messages() if RANK == 0 else work(exchange_messages, own_optimizer)
        return
    from torch.distributed import rpc

    set_up_torch(cpu=True)
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=600, init_method="env://")
    rpc.init_rpc(f"rank{RANK}", rank=RANK, world_size=WORLD_SIZE, rpc_backend_options=options)
    if RANK == 0:
        threading.Event().wait()
    work(lambda gradients: rpc.rpc_sync("rank0", update, args=(gradients,)), own_optimizer)


_server: Server | None = None
_making = threading.Lock()


def update(gradients: torch.Tensor) -> torch.Tensor:
    """Called by workers, on the server."""
    global _server
    with _making:
        _server = _server or Server()
    return _server.apply(gradients)


main(sys.argv[1], "own_optimizer" in sys.argv[2:])
