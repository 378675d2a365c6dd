"""A tiny real DDP job over gloo: one forked data-loader worker per rank, and a model with a slow line.

Prints `step 20` once it is under way. Ends by itself, so that a test that loses it leaves nothing behind.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SMALL_DDP_SECONDS", "600"))
FEATURES = 256


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)  # SLOW LINE: the tests look for this one
        return self.linear(batch)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(
        TensorDataset(torch.randn(4096, FEATURES)),
        batch_size=8,
        num_workers=1,
        multiprocessing_context="fork",
        persistent_workers=True,  # at every moment there is one
    )
    give_up_at = time.monotonic() + SECONDS
    steps = 0
    while time.monotonic() < give_up_at:
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            steps += 1
            if steps == 20 and dist.get_rank() == 0:
                print("step 20", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
