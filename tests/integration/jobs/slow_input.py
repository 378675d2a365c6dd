"""A job of torchrun's whose ranks meet in every step: the named ranks sleep in a function of their own. Creates the
first file once all ranks train, and ends when the second exists."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def load_image() -> torch.Tensor:
    time.sleep(0.2)  # here
    return torch.ones(8)


def main(begun: Path, end: Path, slow_ranks: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_over = torch.zeros(1)
    while not is_over.item():
        if dist.get_rank() in slow_ranks:
            load_image()
        is_over[0] = float(end.exists())
        dist.all_reduce(is_over)
        begun.touch()
    # gloo's thread keeps it for a moment. If the interpreter ends meanwhile, torch aborts the process.
    while is_over._use_count() > 1:
        time.sleep(0.001)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(rank) for rank in sys.argv[3:]])
