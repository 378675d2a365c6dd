"""What the probe costs a training step: its hook pair around an optimizer step that does nothing, on and off in
turn."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

BLOCKS = 61
STEPS_PER_BLOCK = 2_000


def measure() -> dict[str, float]:
    """Nanoseconds per step, in an interpreter of its own: the probe stays for the life of a process."""
    command = [sys.executable, "-m", "benchmarks.probe_step", "--inner"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _measure_here() -> dict[str, float]:
    import rankscope.probe.bootstrap  # noqa: F401, I001 – must come before torch, as it does in a training process
    import torch
    from torch.optim import optimizer as hooks

    class Nothing(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]  # torch calls it without a closure
            pass

    optimizer = Nothing([torch.nn.Parameter(torch.zeros(1))], {})
    before, after = dict(hooks._global_optimizer_pre_hooks), dict(hooks._global_optimizer_post_hooks)

    def block(on: bool) -> float:
        hooks._global_optimizer_pre_hooks.clear()
        hooks._global_optimizer_post_hooks.clear()
        if on:
            hooks._global_optimizer_pre_hooks.update(before)
            hooks._global_optimizer_post_hooks.update(after)
        step = optimizer.step
        start_ns = time.thread_time_ns()
        for _ in range(STEPS_PER_BLOCK):
            step()
        return (time.thread_time_ns() - start_ns) / STEPS_PER_BLOCK

    block(True)
    extra, off = [], []
    for _ in range(BLOCKS):
        off_ns = block(False)
        extra.append(block(True) - off_ns)
        off.append(off_ns)
    quartiles = statistics.quantiles(extra, n=4)
    return {
        "probe_ns_per_step": statistics.median(extra),
        "probe_ns_per_step_q1": quartiles[0],
        "probe_ns_per_step_q3": quartiles[2],
        "optimizer_step_off_ns": statistics.median(off),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--inner"]:
        print(json.dumps(_measure_here()))
    else:
        result = measure()
        quartiles = "{probe_ns_per_step_q1:.0f}–{probe_ns_per_step_q3:.0f}".format(**result)
        print(
            f"probe: {result['probe_ns_per_step']:.0f} ns a step (quartiles {quartiles}) on top of "
            f"{result['optimizer_step_off_ns']:.0f} ns for an optimizer step that does nothing"
        )
