"""A small job that trains, and after STEPS steps does what `--cause` says on its last rank: most of that never returns,
some of it only takes long. Ends by itself, so that a test that loses it leaves nothing behind."""

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from parts import set_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--cause", required=True)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--cpu", action="store_true", help="over gloo; otherwise over NCCL, all ranks on one GPU")
parser.add_argument("--read-loss", action="store_true", help="in each step, so that the host waits for the device")
ASKED = parser.parse_args()
CAUSE, FOLDER = ASKED.cause, ASKED.folder
DEVICE = torch.device("cpu" if ASKED.cpu else "cuda:0")
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IS_LAST = RANK == WORLD_SIZE - 1
STEPS = 60
BATCH = 8
LONG_SECONDS = 12.0
DUMP_SECONDS = 4.0
LIFE_SECONDS = 600
FEATURES = 64
LARGE = 4096 if ASKED.cpu else 4 << 20  # NCCL sends little before it waits


def read_shard(index: int) -> torch.Tensor:
    if CAUSE == "data loader" and IS_LAST and index >= STEPS * BATCH:
        (FOLDER / "shard").open("rb").read()  # a shard that never arrives
    return torch.randn(FEATURES)


class Shards(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return read_shard(index)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        output: torch.Tensor = self.linear(batch)
        return output


def wait_for_schedule() -> None:
    threading.Event().wait()  # never entered: the others are in the collective after it


def update_cache() -> None:
    lock = threading.Lock()
    holder = threading.Thread(target=hold, args=(lock,), daemon=True)
    holder.start()
    while not lock.locked():
        time.sleep(0.01)
    with lock:  # another thread holds it and waits itself
        raise AssertionError


def hold(lock: threading.Lock) -> None:
    with lock:
        threading.Event().wait()


def save_checkpoint(path: Path, model: nn.Module) -> None:
    torch.save(model.state_dict(), path)


def is_before(end: float) -> bool:
    """Or the test has not yet seen that it takes long: on a machine that pauses it looks seldom."""
    return time.monotonic() < end or not (FOLDER / "long enough").exists()


def save_slowly(model: nn.Module) -> None:
    """A checkpoint of many files: slow, but each look finds it writing."""
    end = time.monotonic() + LONG_SECONDS
    while is_before(end):
        torch.save(torch.zeros(1 << 18), FOLDER / "large.pt")


def evaluate(model: nn.Module) -> None:
    """Computes all the time, as the thread of a CPU or the host of a GPU does."""
    end = time.monotonic() + LONG_SECONDS
    with torch.no_grad():
        while is_before(end):
            model(torch.randn(BATCH, FEATURES))
            for _ in range(10):
                torch.randn(400, 400) @ torch.randn(400, 400)


def compile_slowly(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
    end = time.monotonic() + LONG_SECONDS
    while is_before(end):
        time.sleep(0.1)  # as if workers compiled
    compiled: Callable[..., object] = graph.forward
    return compiled


def reduce_metrics(size: int) -> None:
    dist.all_reduce(torch.zeros(size, device=DEVICE))


def wait_after_an_error(size: int) -> None:
    """As a program does whose error handling hangs: the recorder still holds what went wrong."""
    with suppress(RuntimeError):
        reduce_metrics(size)
    wait_for_schedule()


def dump_when_it_hangs() -> None:
    """As NCCL's watchdog does on a timeout; gloo has none."""
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    if prefix is not None:
        time.sleep(DUMP_SECONDS)
        draft = FOLDER / f"draft-{RANK}"
        draft.write_bytes(torch._C._distributed_c10d._dump_fr_trace())
        draft.rename(f"{prefix}{RANK}")


def keep_sockets_open() -> None:
    """As a worker that was forked does: the peers of a rank that dies do not notice."""
    if os.fork() == 0:
        signal.alarm(LIFE_SECONDS)
        while True:
            signal.pause()


def change(model: nn.Module) -> None:
    """What goes wrong once."""
    if CAUSE == "collective of another size":
        reduce_metrics(LARGE if IS_LAST else 16)
    elif CAUSE == "error after another size":
        wait_after_an_error(LARGE if IS_LAST else 16)
    elif not IS_LAST:
        return
    elif CAUSE == "collective never entered":
        wait_for_schedule()
    elif CAUSE == "another collective":
        dist.barrier()
    elif CAUSE == "lock":
        update_cache()
    elif CAUSE == "stuck checkpoint":
        save_checkpoint(FOLDER / "stuck.pt", model)
    elif CAUSE == "long checkpoint":
        save_slowly(model)
    elif CAUSE == "long evaluation":
        evaluate(model)
    elif CAUSE == "long compile":
        torch.compile(nn.Linear(FEATURES, FEATURES), backend=compile_slowly)(torch.randn(BATCH, FEATURES))
    elif CAUSE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif CAUSE == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


def end_by_itself(*_: object) -> None:
    """A worker that is forked does not inherit the alarm of its parent."""
    signal.alarm(LIFE_SECONDS)


def main() -> None:
    end_by_itself()
    rendezvous = f"file://{FOLDER / 'rendezvous'}"
    set_up(ASKED.cpu, init_method=rendezvous, timeout=timedelta(hours=1), rank=RANK, world_size=WORLD_SIZE)
    own_model = Model().to(DEVICE)
    if CAUSE == "killed" and IS_LAST:
        keep_sockets_open()
    model = DistributedDataParallel(own_model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    workers = 1 if CAUSE == "data loader" else 0
    context = "fork" if workers else None
    loader = DataLoader(
        Shards(), BATCH, num_workers=workers, multiprocessing_context=context, worker_init_fn=end_by_itself
    )
    for steps, batch in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = model(batch.to(DEVICE, non_blocking=True)).square().mean()
        loss.backward()
        optimizer.step()
        if ASKED.read_loss:
            loss.item()
        if steps == STEPS:
            threading.Thread(target=dump_when_it_hangs, daemon=True).start()
            (FOLDER / f"changing-{RANK}").touch()
            change(own_model)
            (FOLDER / f"proceeded-{RANK}").touch()


if __name__ == "__main__":
    main()
