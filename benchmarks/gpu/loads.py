"""Known work on a GPU, one kind after the other, each for a while: what it was, when, and how fast, as a JSON line.

    python3 loads.py KIND:SECONDS …

KIND: bf16-N, fp16-N, fp32-N (TF32 off), tf32-N, fp64-N, int8-N (matrix products of N × N), idle (a context and nothing
else). Work is counted in chunks of about 0.2 s, so that others can take the speed of any stretch of it."""

from __future__ import annotations

import json
import sys
import time

import torch

CHUNK_SECONDS = 0.2
KINDS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
    "int8": torch.int8,
}

# Without a GPU it can be tried, on less work.
DEVICE, SHRINK = ("cuda", 1) if torch.cuda.is_available() else ("cpu", 64)
if DEVICE == "cpu":
    torch.set_num_threads(1)
    KINDS |= dict.fromkeys(("bf16", "fp16"), torch.float32)  # half formats may take a CPU minutes


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def tell(**said: object) -> None:
    print(json.dumps(said), flush=True)


def run(kind: str, seconds: float) -> None:
    format_name, _, text = kind.partition("-")
    size = int(text) // SHRINK
    torch.backends.cuda.matmul.allow_tf32 = format_name == "tf32"
    dtype = KINDS[format_name]
    if dtype is torch.int8:
        left, right = (torch.randint(-8, 8, (size, size), device=DEVICE, dtype=dtype) for _ in range(2))
        right = right.t()  # the layout that int8 kernels take

        def once() -> None:
            torch._int_mm(left, right)
    else:
        left, right = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
        out = torch.empty(size, size, device=DEVICE, dtype=dtype)

        def once() -> None:
            torch.mm(left, right, out=out)

    for _ in range(3):
        once()
    synchronize()
    began = time.perf_counter()
    for _ in range(10):
        once()
    synchronize()
    rounds = max(1, round(CHUNK_SECONDS / ((time.perf_counter() - began) / 10)))
    tell(event="start", kind=kind, unix=time.time())
    chunks, ends_at = [], time.time() + seconds
    while time.time() < ends_at:
        began_unix = time.time()
        for _ in range(rounds):
            once()
        synchronize()
        chunks.append((began_unix, time.time(), 2.0 * size**3 * rounds))
    tell(event="end", kind=kind, unix=time.time(), chunks=chunks)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    torch.zeros(1, device=DEVICE)
    synchronize()
    for one in sys.argv[1:]:
        kind, _, seconds = one.partition(":")
        try:
            if kind == "idle":
                tell(event="start", kind=kind, unix=time.time())
                time.sleep(float(seconds))
                tell(event="end", kind=kind, unix=time.time(), chunks=[])
            else:
                run(kind, float(seconds))
        except (RuntimeError, KeyError, ValueError) as error:
            tell(event="failed", kind=kind, unix=time.time(), why=str(error)[-300:])


if __name__ == "__main__":
    main()
