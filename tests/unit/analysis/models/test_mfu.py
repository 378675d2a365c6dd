from __future__ import annotations

import csv

import pytest

from rankscope.analysis.models.device_peaks import (
    DTYPES,
    PeakError,
    find_device,
    find_peak,
    known_devices,
    memory_of,
    peak_flops_per_second,
    peaks_of,
)
from rankscope.analysis.models.mfu import (
    Recompute,
    declared_token_flops,
    palm_token_flops,
    utilisation,
)
from tests.shared_data import shared


def test_every_published_row_comes_out_to_its_last_digit() -> None:
    """Within one of it: the rows give parameters and tokens per second rounded to three digits, and 70.6e9 for what is
    70,553,706,496 moves Llama 3 70B from 51.7 to 51.8 (the exact count is tested in test_model_flops)."""
    with shared("mfu_golden.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 4
    exact = 0
    for row in rows:
        flops = palm_token_flops(float(row["parameters"]), int(row["layers"]), int(row["width"]), int(row["sequence"]))
        peak = float(row["peak_tflops"]) * 1e12
        used = utilisation(flops, float(row["tokens_per_second"]), int(row["gpus"]), peak, Recompute.NONE)
        assert abs(100 * used.mfu_ratio - float(row["mfu_percent"])) < 0.1, row["source"]
        exact += f"{100 * used.mfu_ratio:.1f}" == row["mfu_percent"]
    assert exact >= 3


def test_recomputing_counts_for_the_hardware_and_not_for_the_model() -> None:
    flops = palm_token_flops(1e9, 10, 1000, 2000)
    assert flops.model == 6e9 + 12 * 10 * 1000 * 2000
    assert flops.hardware(Recompute.NONE) == flops.model
    assert flops.hardware(Recompute.FULL) == pytest.approx(flops.model * 4 / 3, rel=1e-15)
    assert flops.hardware(Recompute.SELECTIVE) == flops.model + 4 * 10 * 1000 * 2000
    assert declared_token_flops(7e9).hardware(Recompute.SELECTIVE) is None


def test_a_causal_mask_halves_the_attention_only() -> None:
    assert palm_token_flops(1e9, 10, 1000, 2000, causal=True).model == 6e9 + 6 * 10 * 1000 * 2000


@pytest.mark.parametrize(
    ("name", "device", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756),
        ("h100-nvl", "H100 NVL", 835),
        ("H100SXM5", "H100 SXM", 989),
        ("NVIDIA H200", "H200 SXM", 989),
        ("NVIDIA H200 NVL", "H200 NVL", 835),
        ("NVIDIA GH200 480GB", "GH200", 989),
        ("NVIDIA H20", "H20", 148),
        ("NVIDIA A100-SXM4-80GB", "A100", 312),
        ("NVIDIA A10", "A10", 125),
        ("NVIDIA A10G", "A10G", 70),
        ("NVIDIA L4", "L4", 121),
        ("NVIDIA L40S", "L40S", 362.05),
        ("NVIDIA GB200", "GB200", 2500),
        ("NVIDIA B200", "B200", 2250),
        ("NVIDIA B300 SXM6 AC", "B300", 2250),
        ("AMD Instinct MI300X", "MI300X", 1307.4),
        ("AMD Instinct MI325X", "MI325X", 1307.4),
        ("AMD Instinct MI355X", "MI355X", 2516.6),
        ("AMD Instinct MI250X", "MI250X", 191.5),
    ],
)
def test_a_name_from_the_driver_finds_its_own_peak(name: str, device: str, bf16: float) -> None:
    peak = find_peak(name, "bfloat16")
    assert (peak.device, peak.tflops) == (device, bf16)
    assert peak_flops_per_second(name) == pytest.approx(bf16 * 1e12)


def test_an_open_form_is_guessed_aloud() -> None:
    assert find_peak("h100").note == "H100 is assumed to be H100 SXM"
    assert find_peak("h100 sxm").note == find_peak("A100").note == ""


def test_a_device_without_bf16_uses_fp16_unless_bf16_is_requested() -> None:
    assert find_peak("Tesla T4").dtype == "fp16"
    assert peak_flops_per_second("Tesla V100-SXM2-32GB") == 125e12
    with pytest.raises(PeakError, match="T4 has no published dense bf16 peak; it has fp32, fp16, int8"):
        find_peak("T4", "bf16")


@pytest.mark.parametrize(
    "name", ["", "RTX 9090", "V100S", "A100 MIG 3g.40gb", "H100 and A100", "XH100", "H1000", "\0" * 99]
)
def test_no_peak_is_better_than_that_of_another_device(name: str) -> None:
    with pytest.raises(PeakError):
        find_peak(name)
    assert peak_flops_per_second(name) is None


def test_an_unknown_device_or_format_is_told_what_is_known() -> None:
    with pytest.raises(PeakError, match=r"known: V100 SXM, .*MI355X"):
        find_peak("TPU v4")
    with pytest.raises(PeakError, match=r"known: fp64, .*fp4"):
        find_peak("A100", "posit")


@pytest.mark.parametrize(
    ("name", "device", "gb_per_second", "gb"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", 2039, 80),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 1555, 40),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB", 1555, 40),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe", 1935, 80),
        ("Tesla V100-SXM2-16GB", "V100 SXM 16GB", 900, 16),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 3350, 80),
        ("NVIDIA H100 NVL", "H100 NVL", 3900, 94),
        ("NVIDIA H200", "H200 SXM", 4800, 141),
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB", 4900, 144),
        ("AMD Instinct MI300X", "MI300X", 5300, 192),
    ],
)
def test_a_name_from_the_driver_finds_its_memory(name: str, device: str, gb_per_second: float, gb: float) -> None:
    found = find_device(name)
    assert (found.name, found.gb_per_second, found.memory_gb, found.note) == (device, gb_per_second, gb, "")


def test_a_memory_that_the_name_leaves_open_is_guessed_aloud() -> None:
    assert find_device("a100").note == "A100 is assumed to have 80 GB at 2039 GB/s"
    with pytest.raises(PeakError, match="is not a known device; known: V100 SXM"):
        find_device("TPU v4")


def test_every_device_has_a_memory_of_its_kind() -> None:
    """HBM moves more than GDDR; no device reads all its memory faster than in 10 ms, or slower than in 0.1 s."""
    for name in known_devices():
        gb_per_second, gb = memory_of(name)
        assert 0.01 < gb / gb_per_second < 0.1, name


def test_no_peak_counts_sparsity() -> None:
    """Dense rates halve from fp8 to fp16 to tf32 on every device that has all three; a sparse one would stand out."""
    for name in known_devices():
        peaks = peaks_of(name)
        assert list(peaks) == list(DTYPES)
        for wide, narrow in (("tf32", "fp16"), ("bf16", "fp8"), ("fp16", "int8")):
            slow, fast = peaks[wide], peaks[narrow]
            if slow and fast and (name, narrow) != ("MI250X", "int8"):
                assert fast / slow == pytest.approx(2, rel=0.03), (name, wide, narrow)
