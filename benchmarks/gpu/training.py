"""One rank of a DDP job on a GPU, as a user would write it: no Rankscope in it. Prints what it measured as JSON."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# name: layers, width, sequence, batch
SHAPES = {"launch-bound": (12, 256, 128, 8), "compute-bound": (8, 4096, 2048, 4)}


class Block(nn.Module):
    def __init__(self, width: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, sequence, 3, -1, 64).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def main() -> None:
    shape, backend, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    layers, width, sequence, batch = SHAPES[shape]
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    model = nn.Sequential(*(Block(width) for _ in range(layers))).to("cuda", torch.bfloat16)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    data = torch.randn(batch, sequence, width, device="cuda", dtype=torch.bfloat16)
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < 50:
        start = time.perf_counter()
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()  # so that a step is a step, not the time to enqueue one
        times.append(time.perf_counter() - start)
    kept = sorted(times[30:])
    parameters = sum(p.numel() for p in model.parameters())
    result = {
        "steps": len(kept),
        "median_seconds": kept[len(kept) // 2],
        "p90_seconds": kept[len(kept) * 9 // 10],
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "flops_per_step": (6 * parameters + 6 * layers * width * sequence) * sequence * batch,
    }
    print(json.dumps(result), flush=True)
    sys.stdin.readline()  # stays, with its ring, until it has been read
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
