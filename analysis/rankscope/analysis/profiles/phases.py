"""The phase of training that a stack is in: a table of places in libraries, and three rules on which wins.

1. The phases of ALWAYS win wherever they stand on the stack, in the order of the table: a barrier inside a checkpoint
   is checkpoint, a collective in a backward hook is communication, a transform that is a module is input.
2. Otherwise the innermost frame that names a phase decides: a closure's forward inside `optimizer.step` is forward,
   an optimizer that steps in a gradient hook is optimizer.
3. Inside a backward, Python code that autograd calls (a custom function's backward, a hook, a recomputed forward) is
   BACKWARD_CODE, which is this rank's own work. The rest is BACKWARD: the engine's kernels, but also its waiting for
   the gradients of other ranks, which a Python stack cannot tell apart. Library code without the program's own code in
   it stays BACKWARD, because FSDP and DeepSpeed wait in their hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from rankscope.analysis.profiles.frames import DEVICE_WAIT, Frame, is_user_code

INPUT: Final = "input"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
BACKWARD_CODE: Final = "backward_code"
OPTIMIZER: Final = "optimizer"
COMMUNICATION: Final = "communication"
DEVICE_SYNC: Final = "device_sync"
CHECKPOINT: Final = "checkpoint"
COMPILE: Final = "compile"
OTHER: Final = "other"
PHASES: Final = (
    *(INPUT, FORWARD, BACKWARD, BACKWARD_CODE, OPTIMIZER, COMMUNICATION, DEVICE_SYNC, CHECKPOINT, COMPILE, OTHER),
)
# Where a rank may be waiting for others. DDP waits for its buckets inside backward, where a Python stack cannot see it.
WAITING_PHASES: Final = frozenset({COMMUNICATION, DEVICE_SYNC, BACKWARD})


@dataclass(frozen=True)
class Rule:
    """A place: part of a file's path that starts at a folder, and functions in it (none: all but those of the class
    `not_of`)."""

    phase: str
    path: str
    functions: frozenset[str] = frozenset()
    only_innermost: bool = False
    not_of: str = ""

    def matches(self, path: str, function: str, is_innermost: bool) -> bool:
        owner, _, bare_function = function.rpartition(".")  # py-spy names methods "Class.method" from Python 3.11 on
        is_place = self.path in path and (not self.functions or bare_function in self.functions)
        is_other_class = bool(self.not_of) and owner.startswith(self.not_of)
        return is_place and not is_other_class and (is_innermost or not self.only_innermost)


def _rule(phase: str, path: str, functions: str = "", *, only_innermost: bool = False, not_of: str = "") -> Rule:
    return Rule(phase, "/" + path, frozenset(functions.split()), only_innermost, not_of)


ALWAYS: Final = (
    _rule(CHECKPOINT, "torch/distributed/checkpoint/"),
    _rule(CHECKPOINT, "torch/distributed/fsdp/_state_dict_utils.py"),
    _rule(CHECKPOINT, "torch/serialization.py"),
    _rule(CHECKPOINT, "safetensors/torch.py"),
    # torch/_dynamo/eval_frame.py and much of torch/_inductor are on the stack of every compiled step; these are not.
    _rule(COMPILE, "torch/_dynamo/convert_frame.py"),
    _rule(COMPILE, "torch/_inductor/compile_fx.py", "compile_fx compile_fx_inner compile_fx_backward bw_compiler"),
    _rule(COMPILE, "torch/_inductor/async_compile.py"),
    _rule(
        COMPILE,
        "torch/_inductor/runtime/triton_heuristics.py",
        "autotune_to_one_config benchmark_all_configs precompile",
    ),
    _rule(COMPILE, "torch/utils/cpp_extension.py"),
    _rule(COMPILE, "triton/compiler/"),
    _rule(COMMUNICATION, "torch/distributed/distributed_c10d.py"),
    _rule(COMMUNICATION, "torch/distributed/_functional_collectives.py"),
    _rule(
        COMMUNICATION,
        "torch/distributed/tensor/_collective_utils.py",
        "shard_dim_alltoall mesh_scatter mesh_broadcast",
    ),
    _rule(COMMUNICATION, "torch/distributed/nn/functional.py"),
    _rule(COMMUNICATION, "torch/distributed/rendezvous.py"),
    _rule(COMMUNICATION, "torch/distributed/algorithms/ddp_comm_hooks/"),
    # As innermost frame, the probe's wrappers call C functions: collectives and Work.wait.
    _rule(COMMUNICATION, "rankscope/probe/torch_timers.py", "wrapper", only_innermost=True),
    _rule(COMMUNICATION, "rankscope/probe/collective_spans.py", "wrapper", only_innermost=True),
    # FSDP2 waits for its collectives here, without a frame of torch.distributed around the wait.
    _rule(
        COMMUNICATION,
        "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
        "foreach_all_gather foreach_all_gather_copy_out foreach_reduce",
        only_innermost=True,
    ),
    _rule(
        COMMUNICATION,
        "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
        "wait_for_unshard _reset_iter_state finalize_backward _wait_for_post_backward",
        only_innermost=True,
    ),
    _rule(COMMUNICATION, "torch/distributed/pipelining/schedules.py", "_batch_p2p _wait_batch_p2p"),
    _rule(COMMUNICATION, "megatron/core/pipeline_parallel/p2p_communication.py"),
    _rule(COMMUNICATION, "deepspeed/comm/"),
    _rule(COMMUNICATION, "horovod/torch/mpi_ops.py"),
    _rule(DEVICE_SYNC, DEVICE_WAIT.file),
    _rule(DEVICE_SYNC, "torch/cuda/__init__.py", "synchronize"),
    _rule(DEVICE_SYNC, "torch/cuda/streams.py", "synchronize"),
    _rule(DEVICE_SYNC, "torch/accelerator/__init__.py", "synchronize"),
    _rule(DEVICE_SYNC, "torch/xpu/__init__.py", "synchronize"),
    _rule(INPUT, "torch/utils/data/"),
    _rule(INPUT, "torchdata/"),
    _rule(INPUT, "webdataset/"),
    _rule(INPUT, "nvidia/dali/"),
)

INNERMOST: Final = (
    _rule(OPTIMIZER, "torch/optim/"),
    _rule(OPTIMIZER, "torch/amp/grad_scaler.py", "step unscale_ update"),
    _rule(OPTIMIZER, "torch/nn/utils/clip_grad.py"),
    _rule(OPTIMIZER, "torch/distributed/optim/"),
    _rule(OPTIMIZER, "apex/optimizers/"),
    _rule(OPTIMIZER, "bitsandbytes/optim/"),
    _rule(OPTIMIZER, "deepspeed/ops/adam/"),
    _rule(BACKWARD, "torch/_tensor.py", "backward"),
    _rule(BACKWARD, "torch/autograd/__init__.py", "backward grad"),
    _rule(BACKWARD, "torch/autograd/graph.py", "_engine_run_backward"),
    _rule(BACKWARD, "megatron/core/pipeline_parallel/schedules.py", "custom_backward"),
    _rule(FORWARD, "torch/nn/modules/module.py", "_call_impl _wrapped_call_impl"),
    _rule(FORWARD, "torch/nn/parallel/distributed.py", "forward _run_ddp_forward"),
    _rule(FORWARD, "torch/nn/functional.py"),
    # DisableContext wraps what is never compiled: FSDP2's hooks, and operators of DTensor in an optimizer.
    _rule(FORWARD, "torch/_dynamo/eval_frame.py", not_of="DisableContext"),
    _rule(FORWARD, "torch/fx/graph_module.py", "call_wrapped __call__"),
)

_IMPORT: Final = "<frozen importlib._bootstrap>"
_USER_CODE: Final = "user code"
MAX_MARKS: Final = 16384
_ORDER_OF_ALWAYS: Final = tuple(dict.fromkeys(rule.phase for rule in ALWAYS))


def phase_of(innermost_first: Sequence[Frame]) -> str:
    named: list[str] = []
    has_code_in_backward = has_user_code = False
    innermost = [_mark(frame, True) for frame in innermost_first[:1]]
    for mark in filter(None, (*innermost, *map(_CALLERS.__getitem__, innermost_first[1:]))):
        if mark == _IMPORT:
            # Code that runs inside an import is set-up, whichever file it is in.
            named.clear()
            has_code_in_backward = has_user_code = False
        elif mark == _USER_CODE:
            has_user_code = True
        else:
            if mark == BACKWARD:
                has_code_in_backward = has_user_code or FORWARD in named
            named.append(mark)
    for phase in _ORDER_OF_ALWAYS:
        if phase in named:
            return phase
    if not named:
        return OTHER
    if BACKWARD in named and named[0] in (FORWARD, BACKWARD):
        return BACKWARD_CODE if has_code_in_backward else BACKWARD
    return named[0]


def is_engine(frame: Frame) -> bool:
    """Whether a stack with this innermost frame is in autograd's engine, which may call Python on another thread."""
    return _mark(frame, True) == BACKWARD


def names_phase(frame: Frame, phase: str) -> bool:
    """Whether this frame, called by others, is a place of that phase."""
    return _CALLERS[frame] == phase


def _mark(frame: Frame, is_innermost: bool) -> str | None:
    """What a frame says about the phase of its stack: a phase, _IMPORT, _USER_CODE or nothing."""
    if frame.file == _IMPORT:
        return _IMPORT
    return _named_phase(frame.function, frame.file, is_innermost) or (_USER_CODE if is_user_code(frame) else None)


class _Marks(dict[Frame, str | None]):
    """Of frames that called others. Every new stack is looked up here, and a dict is faster than lru_cache."""

    def __missing__(self, frame: Frame) -> str | None:
        if len(self) >= MAX_MARKS:
            self.clear()
        self[frame] = mark = _mark(frame, False)
        return mark


_CALLERS: Final = _Marks()


@lru_cache(maxsize=8192)
def _named_phase(function: str, file: str, is_innermost: bool) -> str | None:
    path = "/" + file
    for rule in (*ALWAYS, *INNERMOST):
        if rule.matches(path, function, is_innermost):
            return rule.phase
    return None
