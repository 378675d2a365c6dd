"""The probe taken out of a training process and put back, in blocks of steps that are the same on all ranks.

Blocks in one job are compared, not jobs: two jobs of the same kind differ by more than the probe may cost."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Iterator
from inspect import isbuiltin
from pathlib import Path
from types import FunctionType
from typing import Any

# Where the probe may have put something in place of what was there.
MODULES = ("torch", "torch.autograd", "torch.serialization", "torch.distributed._functional_collectives")
CLASSES = (
    ("torch._C._distributed_c10d", "ProcessGroup"),
    ("torch._C._distributed_c10d", "Work"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
)
DDP_OWN_SAMPLE_RATE = 100
# How far ahead blocks are announced: no rank may have enqueued so many steps more than rank 0.
AHEAD_STEPS = 128
MIN_BLOCK_STEPS = 8
PROBES_MODULES = "rankscope.probe."


_instance_method = ctypes.pythonapi.PyInstanceMethod_New
_instance_method.argtypes, _instance_method.restype = [ctypes.py_object], ctypes.py_object


class PluginSwitch:
    """NCCL's events, which the probe asks for in the plugin's memory."""

    def __init__(self, plugin: Any) -> None:
        self.turns = plugin.turns
        self._memory = plugin._memory
        self._layout = sys.modules[f"{PROBES_MODULES}nccl_layout"]
        self._asked_for = b""

    def set(self, is_on: bool) -> None:
        if self._memory is None:
            return
        wanted, begin = self._layout.WANTED, self._layout.WANTED_OFFSET
        place = slice(begin, begin + wanted.size)
        if is_on:
            self._memory[place] = self._asked_for
        else:
            self._asked_for = self._memory[place]
            self._memory[place] = wanted.pack(self._layout.WANT_NOTHING)


class ProbeSwitch:
    """All that the probe has put into torch, found by where its code comes from."""

    def __init__(self) -> None:
        from torch.nn.parallel.distributed import DistributedDataParallel
        from torch.optim import optimizer

        owners = [sys.modules[name] for name in MODULES if name in sys.modules]
        owners += [getattr(sys.modules[module], name) for module, name in CLASSES if module in sys.modules]
        self._wrapped = [(owner, name, value) for owner in owners for name, value in _wrappers(owner)]
        self._hooks = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
        self._kept = [dict(hooks) for hooks in self._hooks]
        self._others = [
            {key: hook for key, hook in kept.items() if not hook.__module__.startswith(PROBES_MODULES)}
            for kept in self._kept
        ]
        self._models = [one for one in _live(DistributedDataParallel) if getattr(one, "logger", None) is not None]
        self._rates = [DDP_OWN_SAMPLE_RATE] * len(self._models)
        for place, model in enumerate(self._models):
            self._follow_rate(place, model)
        self._sessions = [one for one in gc.get_objects() if _is_probes(getattr(type(one), "look_at_device", None))]
        self._plugins = [PluginSwitch(one) for one in gc.get_objects() if type(one).__name__ == "NcclPlugin"]
        self._is_on = True
        if self._kept == self._others or not self._sessions:
            raise RuntimeError("the probe is not in this process")

    def _follow_rate(self, place: int, model: Any) -> None:
        """DDP times itself as often as the probe asks for: that is part of what the probe costs."""
        original = model._set_ddp_runtime_logging_sample_rate

        def chosen(rate: int) -> None:
            self._rates[place] = rate
            original(rate)

        model._set_ddp_runtime_logging_sample_rate = chosen
        self._models[place] = original

    def set(self, is_on: bool) -> None:
        if is_on == self._is_on:
            return
        self._is_on = is_on
        for hooks, kept, others in zip(self._hooks, self._kept, self._others, strict=True):
            hooks.clear()
            hooks.update(kept if is_on else others)
        for plugin in self._plugins:
            plugin.set(is_on)
        for owner, name, wrapper in self._wrapped:
            setattr(owner, name, wrapper if is_on else _original(owner, wrapper))
        for set_rate, rate in zip(self._models, self._rates, strict=True):
            set_rate(rate if is_on else DDP_OWN_SAMPLE_RATE)
        for session in self._sessions:
            # Or it takes the time without it for one long step, and has DDP time itself too often for a second.
            session._refreshed = (0, 0)

    @property
    def nccl_turns(self) -> str:
        turns = [one.turns for one in self._plugins]
        asked = [f"NCCL in one block of {one.every}, a cost of {one.cost_ratio:.2%} was measured" for one in turns]
        return "; ".join(asked) or "no NCCL"

    @property
    def names(self) -> list[str]:
        return [f"{owner.__name__}.{name}" for owner, name, _ in self._wrapped]


def _wrappers(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(owner).items()):
        if _is_probes(value) and hasattr(value, "__wrapped__"):
            yield name, value


def _is_probes(value: Any) -> bool:
    return isinstance(value, FunctionType) and f"rankscope{os.sep}probe" in value.__code__.co_filename


def _original(owner: Any, wrapper: Any) -> Any:
    """As it was in its owner: pybind keeps C functions in classes as instance methods, or they would not get a self."""
    while _is_probes(wrapper) and hasattr(wrapper, "__wrapped__"):
        wrapper = wrapper.__wrapped__
    return _instance_method(wrapper) if isinstance(owner, type) and isbuiltin(wrapper) else wrapper


def _live(kind: type) -> list[Any]:
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


class Alternation:
    """Rank 0 announces the blocks once it knows how long a step takes; all ranks switch at the same steps."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        pairs: int,
        block_seconds: float,
        after_seconds: float,
        keeps_probe: bool = False,
        ahead_steps: int = AHEAD_STEPS,
    ) -> None:
        self._ahead_steps = ahead_steps
        self._path = folder / "plan.json"
        self._is_first = rank == 0
        self._keeps_probe = keeps_probe
        self._pairs, self._block_seconds, self._after_seconds = pairs, block_seconds, after_seconds
        self._plan: dict[str, int] | None = None
        self._switch: ProbeSwitch | None = None
        self._began: tuple[int, float] | None = None

    def at_border(self, steps: int, now: float) -> bool:
        """Whether the last block is over. `steps` are done, and the next one is about to be enqueued."""
        if self._plan is None:
            if self._began is None:
                self._began = (steps, now)
            elif self._is_first and now - self._began[1] > self._after_seconds:
                self._announce(steps, (now - self._began[1]) / (steps - self._began[0]))
            if not self._path.exists():
                return False
            self._plan = json.loads(self._path.read_text())
            assert self._plan is not None
            if steps >= self._plan["first_step"]:
                raise RuntimeError(f"step {steps} is past the announced {self._plan['first_step']}")
        number = (steps - self._plan["first_step"]) // self._plan["steps_per_block"]
        if number < 0:
            return False
        if self._switch is None:
            self._switch = ProbeSwitch()
            if self._is_first:
                print(f"switched on and off: {', '.join(self._switch.names)}; {self._switch.nccl_turns}", flush=True)
        self._switch.set(self._keeps_probe or number >= 2 * self._pairs or is_on(number))
        return number >= 2 * self._pairs

    def _announce(self, steps: int, step_seconds: float) -> None:
        plan = {
            "first_step": steps + self._ahead_steps,
            "steps_per_block": max(MIN_BLOCK_STEPS, round(self._block_seconds / step_seconds)),
            "blocks": 2 * self._pairs,
        }
        self._path.with_suffix(".new").write_text(json.dumps(plan))
        self._path.with_suffix(".new").replace(self._path)


def is_on(block: int) -> bool:
    """off on, on off, off on, …: a drift of the machine favours neither."""
    return bool(block % 2) != bool(block // 2 % 2)
