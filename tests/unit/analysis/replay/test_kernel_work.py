"""Which operator's work a kernel does, and in which number format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.models.device_peaks import DTYPES
from rankscope.analysis.replay.kernel_work import KernelWork, kernel_work
from rankscope.analysis.traces.kernels import classify_kernels
from rankscope.analysis.traces.trace import ABSENT, Category, OperatorColumns, Trace
from tests.unit.analysis.traces.trace_builder import Event, make_trace

SGEMM, ADD, SPLIT = "ampere_sgemm_128x64_tn", "vectorized_elementwise_kernel<add>", "splitKreduce_kernel"


def with_work(trace: Trace, work: dict[str, tuple[int, int]], element_type: str = "float") -> Trace:
    """FLOPs and bytes by the name of the operator."""
    rows = [row for row in range(len(trace)) if trace.names[trace.name[row]] in work]
    columns = np.array([[row, *work[trace.names[trace.name[row]]], len(trace.names)] for row in rows], dtype=np.int64)
    return replace(trace, names=(*trace.names, element_type), operators=OperatorColumns(*columns.reshape(-1, 4).T))


def launches(*kernels: tuple[str, float], start: float = 2.0) -> list[Event]:
    made: list[Event] = []
    for number, (name, microseconds) in enumerate(kernels):
        tie = {"correlation": int(start * 10) + number + 1}
        made.append(("cudaLaunchKernel", Category.RUNTIME, start + number, 0.5, tie))
        made.append((name, Category.KERNEL, 1000 + 100 * (start + number), microseconds, tie))
    return made


def found(trace: Trace) -> KernelWork:
    rows = np.flatnonzero(trace.of(Category.KERNEL))
    return kernel_work(trace, rows, classify_kernels(trace, rows))


def operator(name: str, *kernels: tuple[str, float], inside: str = "") -> Trace:
    events: list[Event] = [(name, Category.CPU_OP, 0, 20), *launches(*kernels)]
    if inside:
        events.append((inside, Category.CPU_OP, 1, 18))
    return make_trace(events)


def test_the_longest_kernel_does_the_work() -> None:
    work = found(with_work(operator("aten::mm", (SGEMM, 50), (SPLIT, 5)), {"aten::mm": (1000, 300)}))
    assert (work.flops.tolist(), work.size_bytes.tolist()) == ([1000, ABSENT], [300, ABSENT])


def test_equal_kernels_share_a_work_nobody_knows() -> None:
    trace = operator("aten::convolution_backward", ("dgrad", 50), ("wgrad", 50))
    assert found(with_work(trace, {"aten::convolution_backward": (1000, 300)})).flops.tolist() == [ABSENT, ABSENT]


def test_a_dense_kernel_has_the_flops_of_the_operator_around() -> None:
    trace = operator("aten::convolution", ("xmma_fprop", 50), inside="aten::cudnn_convolution")
    assert found(with_work(trace, {"aten::convolution": (1000, 300)})).flops.tolist() == [1000]


def test_a_kernel_that_moves_data_has_no_flops_of_others() -> None:
    trace = operator("aten::convolution", (ADD, 50), inside="aten::add_")
    work = found(with_work(trace, {"aten::convolution": (1000, 300), "aten::add_": (ABSENT, 60)}))
    assert (work.flops.tolist(), work.size_bytes.tolist()) == ([ABSENT], [60])


def test_kernels_without_launch_or_shapes_have_no_work() -> None:
    lonely = make_trace([("aten::mm", Category.CPU_OP, 0, 20), (SGEMM, Category.KERNEL, 5, 5)])
    assert found(with_work(lonely, {"aten::mm": (1000, 300)})).flops.tolist() == [ABSENT]
    assert found(operator("aten::mm", (SGEMM, 50))).operator.tolist() == [ABSENT]
    assert len(found(make_trace([])).flops) == 0


@pytest.mark.parametrize(
    ("kernel", "element_type", "expected"),
    [
        (SGEMM, "float", "fp32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4", "float", "fp32"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32", "float", "tf32"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", "c10::BFloat16", "bf16"),
        ("nvjet_sm90_hsh_256x128_64x4_1x2_h_bz_coopA_bias_TNT", "c10::Half", "fp16"),
        ("nvjet_qqtst_128x128_128x6_1x2_h_bz_TNT", "c10::Float8_e4m3fn", "fp8"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn", "", "bf16"),
        ("volta_h884gemm_64x128_ldg8_nt", "", "fp16"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>()", "", "bf16"),
        (SGEMM, "", "fp32"),
    ],
)
def test_formats_come_from_the_operator_or_the_name(kernel: str, element_type: str, expected: str) -> None:
    trace = with_work(operator("aten::mm", (kernel, 50)), {"aten::mm": (1000, 300)}, element_type)
    assert DTYPES[int(found(trace).number_format[0])] == expected
