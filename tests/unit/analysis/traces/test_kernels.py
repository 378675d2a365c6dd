"""Kinds of kernels by names seen in the wild."""

from __future__ import annotations

import pytest

from rankscope.analysis.traces.kernels import Kind, classify, tensor_core
from rankscope.analysis.traces.trace import Category
from tests.unit.analysis.traces.trace_builder import make_trace

COMMUNICATION = (
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "rccl_AllReduceKernel",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
    "nvshmemi_transfer_kernel",
    "void c10d::symmetric_memory::two_shot_all_reduce_kernel<float>()",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>()",
)
TENSOR_CORE = (
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn",
    "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32",
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_32x6_nt_align1>(…)",
    "volta_h884gemm_64x128_ldg8_nt",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>()",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26",
    "Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN",
)
ORDINARY = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>()",
    "ampere_sgemm_128x64_tn",
    "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>()",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel",
    "triton_poi_fused_add_0",
    "void at::native::digamma_kernel_cuda()",
)


@pytest.mark.parametrize("name", COMMUNICATION)
def test_kernels_that_talk_to_other_devices_are_communication(name: str) -> None:
    trace = make_trace([(name, Category.KERNEL, 0, 1)])
    assert classify(trace).tolist() == [Kind.COMMUNICATION]


@pytest.mark.parametrize("name", (*TENSOR_CORE, *ORDINARY))
def test_everything_else_computes_and_some_of_it_on_tensor_cores(name: str) -> None:
    trace = make_trace([(name, Category.KERNEL, 0, 1)])
    assert classify(trace).tolist() == [Kind.COMPUTE]
    assert tensor_core(trace).tolist() == [name in TENSOR_CORE]


def test_a_host_call_is_communication_only_if_the_host_transfers() -> None:
    annotation = Category.USER_ANNOTATION
    trace = make_trace([("gloo:all_reduce", annotation, 0, 1), ("nccl:all_reduce", annotation, 1, 1)])
    assert classify(trace).tolist() == [Kind.COMMUNICATION, Kind.NONE]


def test_copies_are_memory_memsets_compute_and_device_marks_nothing() -> None:
    trace = make_trace(
        [
            ("Memcpy DtoH (Device -> Pinned)", Category.MEMCPY, 0, 1),
            ("Memset (Device)", Category.MEMSET, 1, 1),
            ("gloo:all_reduce", Category.GPU_ANNOTATION, 2, 1),
            ("Stream Wait Event", Category.SYNC, 3, 1),
        ]
    )
    assert classify(trace).tolist() == [Kind.MEMORY, Kind.COMPUTE, Kind.NONE, Kind.NONE]


def test_copy_kernels_of_the_rocm_runtime_are_copies() -> None:
    names = ("__amd_rocclr_copyBuffer.kd", "MEMORY_COPY_HOST_TO_DEVICE", "__amd_rocclr_fillBufferAligned.kd")
    trace = make_trace([(name, Category.KERNEL, number, 1) for number, name in enumerate(names)])
    assert classify(trace).tolist() == [Kind.MEMORY, Kind.MEMORY, Kind.COMPUTE]
