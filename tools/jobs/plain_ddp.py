"""A plain DDP job over gloo, as a user would write it. It imports neither Rankscope nor other files of this
folder, so it can be copied. Environment variables:

JOB_FOLDER    The job creates READY there after 20 steps and ends when STOP exists. While OWN_PROFILER exists, rank 0
              runs a torch.profiler and creates PROFILING. The last rank raises an exception when FAIL exists.
SLOW_RANK     this rank sleeps for SLOW_SECONDS in every step, in a separate function
JOB_WORKERS   forked workers of each data loader; 0: batches are made in the training loop

The job has a time limit, so that a test that fails leaves no process."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(os.environ["JOB_FOLDER"])
SLOW_RANK = int(os.environ.get("SLOW_RANK", "-1"))
SLOW_SECONDS = float(os.environ.get("SLOW_SECONDS", "0.06"))
WORKERS = int(os.environ.get("JOB_WORKERS", "0"))
LIFE_SECONDS = 1800.0
FEATURES, BATCH = 128, 32


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(FEATURES, FEATURES) for _ in range(4)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)  # SLOW LINE of all ranks
        return self.layers(batch)


def slow_augmentation(batch: torch.Tensor) -> torch.Tensor:
    time.sleep(SLOW_SECONDS)  # SLOW LINE of one rank
    return batch


def check_batch(batch: torch.Tensor) -> torch.Tensor:
    if (FOLDER / "FAIL").exists() and dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("bad sample")  # FAILING LINE
    return batch


def batches() -> Iterator[torch.Tensor]:
    while not WORKERS:
        yield torch.randn(BATCH, FEATURES)
    loader = DataLoader(
        TensorDataset(torch.randn(128 * BATCH, FEATURES)),
        batch_size=BATCH,
        num_workers=WORKERS,
        multiprocessing_context="fork",
        persistent_workers=True,  # at every moment there is one
    )
    while True:
        for (batch,) in loader:
            yield batch


def main() -> None:
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:  # as users of Slurm write it
        for name, of_slurm in {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "NTASKS"}.items():
            os.environ[name] = os.environ[f"SLURM_{of_slurm}"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    is_over = torch.zeros(1)
    give_up_at = time.monotonic() + LIFE_SECONDS
    profiler = None
    for steps, batch in enumerate(batches(), 1):
        if rank == SLOW_RANK:
            batch = slow_augmentation(batch)
        optimizer.zero_grad()
        model(check_batch(batch)).sum().backward()
        optimizer.step()
        is_over[0] = float((FOLDER / "STOP").exists() or time.monotonic() > give_up_at)
        dist.all_reduce(is_over)
        if is_over.item():
            break
        if steps == 20 and rank == 0:
            (FOLDER / "READY").touch()
        if rank == 0 and steps % 5 == 0:
            wanted = (FOLDER / "OWN_PROFILER").exists()
            if wanted and profiler is None:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                profiler.start()
                (FOLDER / "PROFILING").touch()
            elif not wanted and profiler is not None:
                profiler.stop()
                profiler = None
    if rank == 0:
        print("trained", flush=True)
    # gloo's thread keeps it for a moment. If the interpreter ends meanwhile, torch aborts the process.
    while is_over._use_count() > 1:
        time.sleep(0.001)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
