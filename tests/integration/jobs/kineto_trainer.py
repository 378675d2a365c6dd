"""A training process without profiler code of its own, until it is told on stdin: `profile` starts torch.profiler,
`stop` stops it. It ends when stdin does."""

import select
import sys

import torch


def told() -> str | None:
    """A word, or None; the empty word is the end."""
    return sys.stdin.readline() if select.select([sys.stdin], [], [], 0.005)[0] else None


model = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
profiler = None
print("training", flush=True)
while (word := told()) != "":
    optimizer.zero_grad()
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    if word == "profile\n":
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        profiler.start()
        print("profiling", flush=True)
    if word == "stop\n":
        assert profiler is not None
        profiler.stop()
        print("stopped", flush=True)
