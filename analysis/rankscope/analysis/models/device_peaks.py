"""Peak FLOP/s of devices by number format, their memory, and the lookup of a device by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")
_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "tfloat32": "tf32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "fp8e4m3": "fp8",
    "fp8e5m2": "fp8",
    "float8e4m3fn": "fp8",
    "float8e5m2": "fp8",
    "mxfp8": "fp8",
    "float4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
}
# TFLOP/s (TOP/s for int8) of one device as the framework sees it, without sparsity, from the vendors' data sheets; half
# the sparse number if a sheet gives only that. fp64 is the matrix unit's if there is one, fp32 is true fp32. None: not
# in the sheet.
_PEAKS: dict[str, tuple[float | None, ...]] = {
    #            fp64    fp32    tf32    fp16    bf16    fp8     int8    fp4
    "V100 SXM": (7.8, 15.7, None, 125.0, None, None, None, None),
    "V100 PCIe": (7.0, 14.0, None, 112.0, None, None, None, None),
    "T4": (None, 8.1, None, 65.0, None, None, 130.0, None),
    "A10": (None, 31.2, 62.5, 125.0, 125.0, None, 250.0, None),
    "A10G": (None, 35.0, 35.0, 70.0, 70.0, None, 140.0, None),
    "A30": (10.3, 10.3, 82.0, 165.0, 165.0, None, 330.0, None),
    "A40": (None, 37.4, 74.8, 149.7, 149.7, None, 299.3, None),
    "A100": (19.5, 19.5, 156.0, 312.0, 312.0, None, 624.0, None),
    "L4": (None, 30.3, 60.0, 121.0, 121.0, 242.5, 242.5, None),
    "L40": (None, 90.5, 90.5, 181.05, 181.05, 362.0, 362.0, None),
    "L40S": (None, 91.6, 183.0, 362.05, 362.05, 733.0, 733.0, None),
    "H20": (1.0, 44.0, 74.0, 148.0, 148.0, 296.0, 296.0, None),
    "H100 SXM": (67.0, 67.0, 494.5, 989.0, 989.0, 1979.0, 1979.0, None),
    "H100 PCIe": (51.0, 51.0, 378.0, 756.0, 756.0, 1513.0, 1513.0, None),
    "H100 NVL": (60.0, 60.0, 417.5, 835.0, 835.0, 1671.0, 1671.0, None),
    "H200 SXM": (67.0, 67.0, 494.5, 989.0, 989.0, 1979.0, 1979.0, None),
    "H200 NVL": (60.0, 60.0, 417.5, 835.0, 835.0, 1671.0, 1671.0, None),
    "GH200": (67.0, 67.0, 494.5, 989.0, 989.0, 1979.0, 1979.0, None),
    "B200": (37.0, 75.0, 1125.0, 2250.0, 2250.0, 4500.0, 4500.0, 9000.0),
    "GB200": (40.0, 80.0, 1250.0, 2500.0, 2500.0, 5000.0, 5000.0, 10000.0),
    "B300": (1.25, 75.0, 1125.0, 2250.0, 2250.0, 4500.0, None, 13500.0),
    "GB300": (1.3, 80.0, 1250.0, 2500.0, 2500.0, 5000.0, None, 15000.0),
    "MI250X": (47.85, 47.85, None, 191.5, 191.5, None, 191.5, None),
    "MI300X": (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9, 2614.9, None),
    "MI325X": (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9, 2614.9, None),
    "MI350X": (72.1, 144.2, None, 2306.9, 2306.9, 4613.7, 4613.7, 9227.5),
    "MI355X": (78.6, 157.3, None, 2516.6, 2516.6, 5033.2, 5033.2, 10066.3),
}
# Bandwidth in GB/s and size in GB of the memory, as vendors publish them. Those of systems are divided by their
# devices: DGX B200 (1,440 GB, 64 TB/s; HGX B200 says 7.7 TB/s each), HGX B300 (2.1 TB), GB200 and GB300 NVL72 (13.4 and
# 20 TB, 576 TB/s). A10G: AWS's G5 instances.
_MEMORY: dict[str, tuple[float, float]] = {
    "V100 SXM": (900.0, 32.0),
    "V100 PCIe": (900.0, 32.0),
    "T4": (320.0, 16.0),
    "A10": (600.0, 24.0),
    "A10G": (600.0, 24.0),
    "A30": (933.0, 24.0),
    "A40": (696.0, 48.0),
    "A100": (2039.0, 80.0),
    "L4": (300.0, 24.0),
    "L40": (864.0, 48.0),
    "L40S": (864.0, 48.0),
    "H20": (4000.0, 96.0),
    "H100 SXM": (3350.0, 80.0),
    "H100 PCIe": (2000.0, 80.0),
    "H100 NVL": (3900.0, 94.0),
    "H200 SXM": (4800.0, 141.0),
    "H200 NVL": (4800.0, 141.0),
    "GH200": (4000.0, 96.0),
    "B200": (8000.0, 180.0),
    "GB200": (8000.0, 186.0),
    "B300": (8000.0, 270.0),
    "GB300": (8000.0, 279.0),
    "MI250X": (1638.4, 64.0),
    "MI300X": (5300.0, 192.0),
    "MI325X": (6000.0, 256.0),
    "MI350X": (8000.0, 288.0),
    "MI355X": (8000.0, 288.0),
}
# Devices that are sold with another memory too: a word of the name that tells it, its bandwidth and size.
_OTHER_MEMORY: dict[str, tuple[tuple[str, float, float], ...]] = {
    "V100 SXM": (("16GB", 900.0, 16.0),),
    "V100 PCIe": (("16GB", 900.0, 16.0),),
    "A100": (("40GB", 1555.0, 40.0), ("PCIE", 1935.0, 80.0)),
    "GH200": (("144G", 4900.0, 144.0),),
}
_NOTES = {"MI250X": "one of the two dies of an MI250X, which a rank uses; the card has twice that"}
# Names without a form factor, and the form factor assumed for them.
_DEFAULT_FORM = {"V100": "SXM", "H100": "SXM", "H200": "SXM"}
_CHIPS = sorted({name.split()[0] for name in _PEAKS}, key=len, reverse=True)
_WORD = re.compile(rf"(?:\d+X)?({'|'.join(_CHIPS)})(SXM\d?|PCIE|NVL)?")


class PeakError(ValueError):
    """No peak for this device or number format; the message lists the known ones."""


@dataclass(frozen=True)
class Peak:
    device: str
    dtype: str
    tflops: float
    note: str  # the assumption made; empty if none

    @property
    def flops_per_second(self) -> float:
        return self.tflops * 1e12


@dataclass(frozen=True)
class DeviceSpec:
    """What limits a kernel on a device, and what fits into it."""

    name: str
    tflops: Mapping[str, float | None]  # by number format
    gb_per_second: float
    memory_gb: float
    note: str  # the assumption made; empty if none


def find_device(device_name: str) -> DeviceSpec:
    """By the driver's name or a short one. Raises PeakError."""
    device, note = _find_device(device_name)
    gb_per_second, memory_gb = _MEMORY[device]
    words = re.split(r"[^A-Z0-9]+", device_name.upper())
    for word, other_gb_per_second, other_gb in _OTHER_MEMORY.get(device, ()):
        if word in words:
            # The form that a name gives otherwise is part of `device`.
            name = f"{device} {'80GB PCIe' if word == 'PCIE' else f'{other_gb:g}GB'}"
            return DeviceSpec(name, peaks_of(device), other_gb_per_second, other_gb, note)
    if device in _OTHER_MEMORY and f"{memory_gb:g}GB" not in words:
        note = "; ".join(
            filter(None, (note, f"{device} is assumed to have {memory_gb:g} GB at {gb_per_second:g} GB/s"))
        )
    return DeviceSpec(device, peaks_of(device), gb_per_second, memory_gb, note)


def memory_of(device: str) -> tuple[float, float]:
    """GB/s and GB of a device of `known_devices()`; of its usual memory if it is sold with several."""
    return _MEMORY[device]


def known_devices() -> tuple[str, ...]:
    return tuple(_PEAKS)


def peaks_of(device: str) -> dict[str, float | None]:
    """TFLOP/s by number format of a device of `known_devices()`."""
    return dict(zip(DTYPES, _PEAKS[device], strict=True))


def find_peak(device_name: str, dtype: str | None = None) -> Peak:
    """By the driver's name ("NVIDIA A100-SXM4-80GB") or a short one ("h100"). Without a dtype: bf16, or fp16 if the
    device has no bf16."""
    device, note = _find_device(device_name)
    peaks = peaks_of(device)
    if dtype is None:
        chosen = "bf16" if peaks["bf16"] is not None else "fp16"
        if chosen == "fp16":
            note = "; ".join(filter(None, (note, f"{device} has no bf16; its fp16 peak is used")))
    else:
        chosen = _find_dtype(dtype)
    tflops = peaks[chosen]
    if tflops is None:
        known = ", ".join(name for name, value in peaks.items() if value is not None)
        raise PeakError(f"{device} has no published dense {chosen} peak; it has {known}")
    return Peak(device, chosen, tflops, note)


def peak_flops_per_second(device_name: str, dtype: str | None = None) -> float | None:
    """Like `find_peak`, for names from a driver: None for an unknown device."""
    try:
        return find_peak(device_name, dtype).flops_per_second
    except PeakError:
        return None


def _find_dtype(text: str) -> str:
    plain = text.lower().removeprefix("torch.").replace("_", "").replace("-", "")
    dtype = _ALIASES.get(plain, plain)
    if dtype not in DTYPES:
        raise PeakError(f"{text[:40]!r} is not a known number format; known: {', '.join(DTYPES)}")
    return dtype


def _find_device(text: str) -> tuple[str, str]:
    words = re.split(r"[^A-Z0-9]+", text.upper())
    if "MIG" in words:
        raise PeakError(f"{text[:60]!r} is a slice of a device; give its peak in TFLOP/s")
    matches = [match for match in map(_WORD.fullmatch, words) if match]
    chips = {match[1] for match in matches}
    if len(chips) != 1:
        why = "names several devices" if chips else "is not a known device"
        raise PeakError(f"{text[:60]!r} {why}; known: {', '.join(known_devices())}")
    chip = chips.pop()
    usual = _DEFAULT_FORM.get(chip)
    if usual is None:
        return chip, _NOTES.get(chip, "")
    forms = [re.sub(r"\d", "", word) for word in words] + [re.sub(r"\d", "", match[2] or "") for match in matches]
    for form in ("PCIe", "NVL", "SXM"):
        if form.upper() in forms and f"{chip} {form}" in _PEAKS:
            return f"{chip} {form}", ""
    # Drivers omit SXM for these: only the SXM form of an H100 has HBM3, and an H200 without NVL is SXM.
    sure = "HBM3" in words or (chip == "H200" and "NVIDIA" in words)
    return f"{chip} {usual}", "" if sure else f"{chip} is assumed to be {chip} {usual}"
