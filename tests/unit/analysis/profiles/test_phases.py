from __future__ import annotations

import pytest

from rankscope.analysis.profiles.frames import Frame, is_user_code
from rankscope.analysis.profiles.phases import PHASES, phase_of
from rankscope.probe.torch_timers import Tally, timed

LIBRARY = "/opt/venv/lib/python3.11/site-packages/"
FSDP2 = "torch/distributed/fsdp/_fully_shard/"
PLACES = {
    "loop": ("main", "/home/me/train.py"),
    "user forward": ("Net.forward", "/home/me/model.py"),
    "user backward": ("MyFunction.backward", "/home/me/ops.py"),
    "user hook": ("compress", "/home/me/hooks.py"),
    "dataset": ("Images.__getitem__", "/home/me/dataset.py"),
    "module": ("Module._call_impl", LIBRARY + "torch/nn/modules/module.py"),
    "module on 3.10": ("_call_impl", LIBRARY + "torch/nn/modules/module.py"),
    "ddp": ("DistributedDataParallel.forward", LIBRARY + "torch/nn/parallel/distributed.py"),
    "backward": ("Tensor.backward", LIBRARY + "torch/_tensor.py"),
    "engine": ("_engine_run_backward", LIBRARY + "torch/autograd/graph.py"),
    "apply": ("BackwardCFunction.apply", LIBRARY + "torch/autograd/function.py"),
    "queue": ("Queue.get", "/usr/lib/python3.11/queue.py"),
    "inductor code": ("call", "/tmp/torchinductor_me/ab/cab.py"),
    "fsdp hook": ("FSDPParamGroup.post_backward", LIBRARY + FSDP2 + "_fsdp_param_group.py"),
    "fsdp wait": ("foreach_all_gather_copy_out", LIBRARY + FSDP2 + "_fsdp_collectives.py"),
    "megatron backward": ("custom_backward", LIBRARY + "megatron/core/pipeline_parallel/schedules.py"),
    "recompute": ("checkpoint", LIBRARY + "torch/utils/checkpoint.py"),
    "step": ("Adam.step", LIBRARY + "torch/optim/adam.py"),
    "next": ("_BaseDataLoaderIter.__next__", LIBRARY + "torch/utils/data/dataloader.py"),
    "all_reduce": ("all_reduce", LIBRARY + "torch/distributed/distributed_c10d.py"),
    "synchronize": ("synchronize", LIBRARY + "torch/cuda/__init__.py"),
    "set_device": ("set_device", LIBRARY + "torch/cuda/__init__.py"),
    "save": ("save", LIBRARY + "torch/serialization.py"),
    "dcp": ("save", LIBRARY + "torch/distributed/checkpoint/state_dict_saver.py"),
    "compiled": ("_TorchDynamoContext.__call__.<locals>._fn", LIBRARY + "torch/_dynamo/eval_frame.py"),
    "disabled": ("DisableContext.__call__.<locals>._fn", LIBRARY + "torch/_dynamo/eval_frame.py"),
    "record exit": ("record_function.__exit__", LIBRARY + "torch/autograd/profiler.py"),
    "op": ("TorchBindOpOverload.__call__", LIBRARY + "torch/_ops.py"),
    "dtensor": ("OpDispatcher.dispatch", LIBRARY + "torch/distributed/tensor/_dispatch.py"),
    "alltoall": ("shard_dim_alltoall", LIBRARY + "torch/distributed/tensor/_collective_utils.py"),
    "functional": ("wait_tensor", LIBRARY + "torch/distributed/_functional_collectives.py"),
    "convert": ("ConvertFrame.__call__", LIBRARY + "torch/_dynamo/convert_frame.py"),
    "inductor": ("compile_fx_inner", LIBRARY + "torch/_inductor/compile_fx.py"),
    "inductor run": ("cudagraphify.<locals>.run", LIBRARY + "torch/_inductor/compile_fx.py"),
    "import": ("_find_and_load", "<frozen importlib._bootstrap>"),
    "stopwatch": ("timed.<locals>.wrapper", LIBRARY + "rankscope/probe/torch_timers.py"),
    "span": ("spanned.<locals>.wrapper", LIBRARY + "rankscope/probe/collective_spans.py"),
    "probe hook": ("after", LIBRARY + "rankscope/probe/step_boundary.py"),
}


@pytest.mark.parametrize(
    ("outermost_first", "phase"),
    [
        ("loop", "other"),
        ("loop / module / user forward", "forward"),
        ("loop / module on 3.10 / user forward", "forward"),
        ("loop / ddp / module / user forward", "forward"),
        ("loop / backward / engine", "backward"),
        ("loop / backward / engine / apply", "backward"),
        ("loop / backward / engine / apply / user backward", "backward_code"),
        ("loop / backward / engine / user hook", "backward_code"),
        ("loop / backward / engine / user hook / queue", "backward_code"),
        ("loop / backward / engine / user hook / engine", "backward_code"),
        ("loop / backward / engine / fsdp hook", "backward"),
        ("loop / backward / engine / disabled / fsdp hook / record exit / op", "backward"),
        ("loop / backward / engine / disabled / user hook", "backward_code"),
        ("loop / module / disabled / fsdp hook / record exit / op", "forward"),
        ("loop / step / disabled / dtensor", "optimizer"),
        ("loop / module / user forward / disabled / dtensor / alltoall / op", "communication"),
        ("loop / module / user forward / functional / op", "communication"),
        ("loop / backward / engine / fsdp hook / fsdp wait", "communication"),
        ("loop / backward / engine / apply / inductor code", "backward"),
        ("loop / backward / engine / recompute / module / user forward", "backward_code"),
        ("loop / backward / engine / recompute / module / fsdp hook / fsdp wait", "communication"),
        ("loop / megatron backward / user hook", "backward_code"),
        ("loop / backward / engine / user hook / all_reduce", "communication"),
        ("loop / backward / engine / step", "optimizer"),
        ("loop / step", "optimizer"),
        ("loop / step / module / user forward", "forward"),
        ("loop / step / backward / engine", "backward"),
        ("loop / next / dataset", "input"),
        ("loop / next / dataset / module", "input"),
        ("loop / all_reduce", "communication"),
        ("loop / module / user forward / synchronize", "device_sync"),
        ("loop / set_device", "other"),
        ("loop / save", "checkpoint"),
        ("loop / dcp / all_reduce", "checkpoint"),
        ("loop / module / compiled / convert", "compile"),
        ("loop / backward / engine / inductor", "compile"),
        ("loop / compiled / inductor run", "forward"),
        ("loop / module / compiled / user forward", "forward"),
        ("loop / import / step / convert", "other"),
        ("loop / module / user forward / import / convert", "forward"),
        ("loop / stopwatch", "communication"),
        ("loop / stopwatch / next / dataset", "input"),
        ("loop / stopwatch / save", "checkpoint"),
        ("loop / backward / engine / user hook / span", "communication"),
        ("loop / span / next / dataset", "input"),
        ("loop / step / probe hook", "optimizer"),
        ("", "other"),
    ],
)
def test_a_stack_is_in_one_phase(outermost_first: str, phase: str) -> None:
    names = [name for name in outermost_first.split(" / ") if name]
    assert phase_of([Frame(*PLACES[name], 1) for name in reversed(names)]) == phase
    assert phase in PHASES


def test_a_file_that_only_sounds_like_torch_names_no_phase() -> None:
    assert phase_of([Frame("step", "/home/me/mytorch/optim/adam.py", 1)]) == "other"


def test_shortened_file_names_name_the_same_phase() -> None:
    assert phase_of([Frame("Adam.step", "torch/optim/adam.py", 1)]) == "optimizer"


def test_the_probes_timer_is_recognised_by_its_actual_name() -> None:
    code = timed(len, Tally(), 0).__code__
    assert phase_of([Frame(code.co_name, code.co_filename, 1)]) == "communication"


def test_user_code_is_what_its_author_can_change() -> None:
    assert is_user_code(Frame("f", "/home/me/train.py", 1))
    assert not is_user_code(Frame("f", LIBRARY + "torch/_tensor.py", 1))
    assert not is_user_code(Frame("f", "/usr/lib/python3.11/threading.py", 1))
    assert not is_user_code(Frame("f", "<frozen importlib._bootstrap>", 1))
    assert not is_user_code(Frame("f", "/home/me/rankscope/daemon/rankscope/probe/torch_timers.py", 1))
    assert is_user_code(Frame("f", LIBRARY + "rankscope/cli/demo_job/model.py", 1))  # of the installed demo
