"""Traces as the profilers of different makers shape them: Blackwell, Instinct and MTIA beside what H100s write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankscope.analysis.traces.breakdown import Breakdown, break_down, measure_launches
from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.idle_time import split_idle
from rankscope.analysis.traces.kernels import tensor_core, top_kernels
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.summary import summarize
from rankscope.analysis.traces.trace import Category, Trace

Event = dict[str, Any]
HOST = 6583


def event(
    category: str, name: str, start: float, duration: float, pid: int = HOST, tid: int = HOST, **args: Any
) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def read(events: list[Event], devices: list[dict[str, Any]], **head: Any) -> tuple[Trace, Breakdown]:
    content = {"schemaVersion": 1, "deviceProperties": devices, "baseTimeNanoseconds": 1767189312000000000, **head}
    trace = read_trace(json.dumps({**content, "traceEvents": events}).encode())
    assert trace.repairs == ()
    found = break_down(trace)
    assert found is not None and not found.on_host
    return trace, found


def test_mtia_kernels_copies_and_waits_are_distinguished_by_name() -> None:
    """Its stream is no thread's number, copies say their size as `size`, and waits may last as long as a step."""
    device, queue = {"pid": 17, "tid": 3774}, {"pid": 17, "tid": 3772}
    where = {"stream": 108, "packet_ptr": 5}
    events = [
        event("mtia_runtime", "enqueueCommand memcpyHtoDAsync", 100.0, 0.641, correlation=1, device=17, stream_id=108),
        event("mtia_ccp_events", "dma_request", 110.5, 4.496, **device, **where, correlation=1, size=1024, sqid=14),
        event("mtia_runtime", "runFunction - job_prep_and_submit_for_execution", 101.0, 4.6, correlation=2, device=17),
        event("mtia_ccp_events", "job_exe", 119.0, 12.0, **device, **where),
        event(
            "mtia_ccp_events", "fc-dtype_Float", 120.0, 10.008, **device, **where, correlation=2, row="0", column="0"
        ),
        event("mtia_ccp_events", "event_wait", 111.0, 5000.0, **device, **where, wait_on_stream=104, seq_num=7),
        event("mtia_ccp_events", "event_record", 131.0, 1.144, **device, **where, seq_num=8),
        event("mtia_ccp_events", "hccl_allreduce", 132.0, 8.0, **device, **where, correlation=3),
        # Launched before the recording: neither a name nor a launch.
        event("mtia_ccp_events", "pe_exe", 90.0, 10.0, **device, **where, row="0", column="0"),
        event("mtia_runtime", "synchronizeStream", 105.6, 40.0, correlation=4, device=17, stream_id=108),
        event("mtia_runtime", "synchronize", 105.9, 39.0, **queue, correlation=4, device=17, stream_id=108),
    ]
    trace, found = read(events, [{"id": 17, "name": "ARTEMIS", "maxGridHeight": 8}], distributedInfo={"rank": 0})
    categories = {trace.named(name): Category(int(kind)) for name, kind in zip(trace.name, trace.category, strict=True)}
    assert categories["dma_request"] is Category.MEMCPY
    assert categories["event_wait"] is categories["event_record"] is Category.SYNC
    assert categories["fc-dtype_Float"] is categories["pe_exe"] is Category.KERNEL
    assert categories["job_exe"] is Category.OTHER
    assert (found.span_ns, found.compute_ns) == (50_000, 20_008)
    assert (found.communication_ns, found.exposed_communication_ns, found.memory_ns) == (8_000, 8_000, 4_496)
    assert set(trace.stream[trace.of(Category.KERNEL)].tolist()) == {108}
    launches = measure_launches(trace)
    assert launches is not None and launches.kernel_count == 2
    idle = split_idle(trace, found)
    assert idle.host_bound_ns > 0  # 100 to 110.5: the copy was launched at 100
    assert summarize(trace, found, find_collectives(trace), rank=0, file="").device == "ARTEMIS"


def test_a_mtia_copy_without_a_stream_runs_on_its_thread() -> None:
    events = [
        event("mtia_ccp_events", "dma_request", 10.0, 8.0, pid=9, tid=801, direction="DEVICE_TO_HOST", size=16, sqid=1),
        event("mtia_ccp_events", "add-dtype_Float", 20.0, 5.0, pid=9, tid=4, stream=1, correlation=7),
        event("user_annotation", "hccl:all_reduce", 0.0, 1.0),
    ]
    trace, found = read(events, [], distributedInfo={"rank": 0, "backend": "mtia:hccl,cpu:gloo"})
    assert (found.memory_ns, found.compute_ns, found.idle_ns) == (8_000, 5_000, 2_000)
    assert trace.stream[trace.of(Category.MEMCPY)].tolist() == [801]


def test_blackwell_kernels_are_driver_launched_and_use_tensor_cores() -> None:
    names = (
        "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_transOut_sm100f",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT",
        "void moe::dev::routing::routingIndicesHistogramKernel<moe::dev::routing::KernelParams>()",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
    )
    events = []
    for number, name in enumerate(names):
        args = {"device": 0, "stream": 7, "correlation": number, "context": 1, "External id": 12, "queued": 0}
        events += [
            event("cuda_driver", "cuLaunchKernelEx", 1365627867378.308 + number, 0.5, cbid=652, correlation=number),
            event("kernel", name, 1365627867400.001 + 10 * number, 9.999, 0, 7, **args),
        ]
    events.append(event("gpu_user_annotation", "execute_context_1(888)_generation_0(0)", 1365627867400.0, 60.0, 0, 7))
    events.append(event("overhead", "Activity Buffer Request", 1365627863811.705, 1526.826, -1, 0))
    properties = {"id": 0, "name": "NVIDIA B200", "totalGlobalMem": 191503138816, "computeMajor": 10, "numSms": 148}
    trace, found = read(events, [properties], distributedInfo={"backend": "nccl", "rank": 0, "world_size": 8})
    assert (found.span_ns, found.compute_ns, found.idle_ns) == (49_999, 4 * 9_999, 4)
    assert found.exposed_communication_ns == 9_999
    kernels = trace.of(Category.KERNEL)
    assert tensor_core(trace)[kernels].tolist() == [True, True, True, False, False]
    launches = measure_launches(trace)
    assert launches is not None and launches.count == len(names)
    assert trace.devices[0].name == "NVIDIA B200"


@pytest.mark.parametrize("with_host", [True, False])
def test_instinct_traces_name_the_device_by_number_even_without_host(with_host: bool) -> None:
    launch = event("cuda_runtime", "hipExtModuleLaunchKernel", 5.0, 3.0, correlation=2, cid=206, stream="0x0")
    copied = {"device": 2, "stream": 0, "correlation": 3, "kind": "DtoD", "bytes": 1}
    events = [
        *([event("cpu_op", "aten::mm", 4.0, 6.0, **{"External id": 9}), launch] if with_host else []),
        event("kernel", "Cijk_Ailk_Bljk_BBS_BH_MT64x64x32_MI32x32x8x1", 12.0, 3.086, 2, 0, device=2, stream=0)
        | {"args": {"device": 2, "stream": 0, "correlation": 2, "kind": "Dispatch Kernel", "grid": [65536, 1, 1]}},
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 15.086, 2.404, 2, 0, **copied),
        event("kernel", "__amd_rocclr_copyBuffer.kd", 20.0, 1.5, 2, 0, device=2, stream=0, correlation=4),
    ]
    devices = [{"id": number, "name": f"AMD Instinct {number}", "warpSize": 64} for number in range(4)]
    trace, found = read(events, devices)
    assert (found.span_ns, found.compute_ns, found.memory_ns, found.idle_ns) == (9_500, 3_086, 3_904, 2_510)
    assert top_kernels(trace, 1)[0].tensor_core
    assert summarize(trace, found, find_collectives(trace), rank=None, file="").device == "AMD Instinct 2"
    assert (measure_launches(trace) is not None) == with_host
