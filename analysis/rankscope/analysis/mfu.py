"""Model FLOPs and the peaks they are held against."""

from __future__ import annotations

# Dense bf16 (fp16 where the device has no bf16) in TFLOP/s, by words of the device name. First match wins, so that the
# narrower names stand before the wider ones.
_PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB200",), 2500.0),
    (("B200",), 2250.0),
    (("H100", "PCIE"), 756.0),
    (("H100", "NVL"), 835.0),
    (("H200", "NVL"), 835.0),
    (("H200",), 989.0),
    (("H100",), 989.0),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("V100",), 125.0),
    (("L40S",), 362.0),
    (("L4",), 121.0),
    (("A10",), 125.0),
    (("T4",), 65.0),
    (("MI250X",), 191.5),
    (("MI300X",), 1307.0),
    (("MI355X",), 2500.0),
)


def peak_flops_per_second(device_name: str) -> float | None:
    """Dense bf16 peak of one device by the name the driver gives it, or None for a device not in the table."""
    words = device_name.upper().replace("-", " ").replace("_", " ").split()
    for needed, tflops in _PEAK_TFLOPS:
        if all(word in words for word in needed):
            return tflops * 1e12
    return None


def palm_flops_per_token(parameters: float, layers: float, width: float, sequence: float) -> float:
    """Forward and backward of one token: 6N + 12·L·H·Q·T, where heads × head size is the width."""
    return 6 * parameters + 12 * layers * width * sequence
