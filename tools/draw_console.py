"""Draws the console's pages into docs/images: pages of a real server in Chromium, of made runs and a recorded one.

.venv/bin/python -m tools.draw_console [FOLDER]"""

from __future__ import annotations

import base64
import random
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from rankscope.analysis.step_graph.path_windows import PathFinder
from rankscope.analysis.step_graph.recording import read_recording
from rankscope.analysis.step_graph.step_picture import draw_step
from rankscope.analysis.verdicts.verdict import HOST, Cause, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.operator.console.server import ConsoleServer
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.v1.identity_pb2 import ParallelCoordinates, RankIdentity
from rankscope.v1.window_pb2 import GpuUsage, Memory, ProcessUsage, RankWindow, StepStatistics
from tools.chromium import Page, browser
from tools.played_runs import HEALTHY, TICK_SECONDS, Figures, Played
from tools.played_services import CAPTURE_ID, HANG_ID, played_services

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 1280
SECONDS, FAULT_SECONDS = 900, 340  # of history, and how much of it has the fault
SLOW, SLOW_RANK = "vision/vit-22b", 37
STEP_SECONDS = 0.62
CAUSE = Cause(
    "input",
    (FrameSeen("load_image", "/app/dataset.py", 88, 0.41, 0.39, "input"),),
    "214 ms a step more input than its peers of pipeline stage 2",
)
VERDICT = Verdict(Kind.SLOW_RANK, "rank 37", Severity.ALARM, culprits=(SLOW_RANK,), impact_ratio=0.26, cause=CAUSE)
# Runs beside it: ranks, step, MFU, exposed communication, verdict.
OTHERS: Mapping[str, tuple[int, float, float, float, Verdict]] = {
    "research/llama-70b": (128, 1.31, 0.46, 0.06, HEALTHY),
    "research/mixtral-8x7b": (32, 0.48, 0.43, 0.08, HEALTHY),
    "speech/whisper-large": (
        *(16, 0.21, 0.37, 0.31),
        Verdict(Kind.SLOW_COMMUNICATION, "", Severity.WARNING, impact_ratio=0.11, lost_gpu_seconds=1500.0),
    ),
    "vision/vit-h14": (
        *(8, 0.33, 0.22, 0.05),
        Verdict(Kind.INPUT_BOUND, "", Severity.WARNING, impact_ratio=0.18, lost_gpu_seconds=900.0),
    ),
    "vision/sam-finetune": (8, 0.17, 0.39, 0.07, HEALTHY),
    "research/ablation-7": (4, 0.09, 0.34, 0.12, Verdict(Kind.INSUFFICIENT_DATA, "only 3 of 8 windows are known")),
}


def identity(run: str, rank: int, size: int) -> RankIdentity:
    """A pipeline of 4 stages, 4 ways of data and of tensor parallelism."""
    place = ParallelCoordinates(pipeline=rank // 16, data=rank // 4 % 4, tensor=rank % 4) if run == SLOW else None
    node, pod = f"gpu-{rank // 8 + 11:02}", f"{run.rpartition('/')[2]}-worker-{rank // 8}"
    who = RankIdentity(job=run, rank=rank, world_size=size, node=node, pid=4100 + rank, coordinates=place)
    who.pod_name, who.gpu_model, who.gpu_uuid = pod, "NVIDIA H200", f"GPU-{run}-{rank}"
    return who


def figures(chosen: random.Random, step: float, mfu: float, wait: float, slow: float | None) -> Figures:
    """Of one tick. `slow` seconds are added to the input of the slow rank, and its peers wait for them."""

    noise = chosen.gauss(1.0, 0.006)

    def of_rank(rank: int) -> Mapping[str, float]:
        late = slow if slow is not None and rank == SLOW_RANK else 0.0
        work = (step * (1 - wait) + 0.02 * (rank // 16)) * chosen.gauss(1.0, 0.008)
        total = (step + (slow or 0.0)) * noise
        busy = min(1.0, (work + 0.05) / total)
        return {
            "steps": 3.0,
            "step_seconds": total,
            "self_seconds": work + late,
            "wait_seconds": max(0.004, total - work - late),
            "input_seconds": 0.012 + late + abs(chosen.gauss(0, 0.001)),
            "forward_seconds": 0.31 * work,
            "backward_seconds": 0.59 * work,
            "optimizer_seconds": 0.06 * work,
            "other_seconds": max(0.0, 0.04 * work - 0.012),
            "mfu_ratio": mfu * step / total * chosen.gauss(1.0, 0.01),
            "cpu_ratio": (1.9 if late else 1.1) * chosen.gauss(1.0, 0.03),
            "gpu_utilization_ratio": busy,
            "gpu_sm_clock_hertz": 1.755e9 * chosen.gauss(1.0, 0.002),
            "gpu_power_watts": 180 + 480 * busy * chosen.gauss(1.0, 0.01),
            "gpu_temperature_celsius": 48 + 16 * busy,
            "memory_allocated_bytes": 118 * 2.0**30,
        }

    return of_rank


def window(step: float, mfu: float) -> RankWindow:
    return RankWindow(
        start_unix_nanos=time.time_ns() - 2 * 10**9,
        end_unix_nanos=time.time_ns(),
        steps=3,
        step_seconds=StepStatistics(p50=step),
        self_seconds=StepStatistics(mean=step - 0.011),
        wait_seconds=StepStatistics(mean=0.011),
        figures={
            "input_seconds": 0.226,
            "mfu_ratio": mfu,
            "forward_seconds": 0.31 * step,
            "host_seconds": step,
            "run_ahead_seconds": 0.004,
        },
        wait_source="collective spans",
        process=ProcessUsage(cpu_seconds=2.4, threads=61),
        memory=Memory(allocated_bytes=118 << 30),
        gpu=GpuUsage(gpus=1, utilization_ratio=0.69, power_watts=512.0, sm_clock_hertz=1.755e9),
    )


def played_fleet() -> Played:
    """Seven runs; rank 37 of the largest has slow input for the last minutes."""
    end = time.time()
    played = Played(begin=end - SECONDS, identities=identity)
    chosen = random.Random(37)
    for at in range(0, SECONDS, int(TICK_SECONDS)):
        with_fault = at - (SECONDS - FAULT_SECONDS)
        slow = 0.214 if with_fault >= 0 else None
        is_found = with_fault > 8
        verdict = replace(VERDICT, lost_gpu_seconds=64 * 0.26 * with_fault) if is_found else HEALTHY
        step = STEP_SECONDS + (slow or 0)
        played.tick(
            figures(chosen, STEP_SECONDS, 0.41, 0.09, slow),
            run=SLOW,
            ranks=64,
            verdict=verdict,
            window=window(step, 0.41 * STEP_SECONDS / step),
            pace=(step, 0.41 * STEP_SECONDS / step, 0.31 if slow else 0.09),
        )
        for run, (ranks, usual_step, mfu, wait, judged) in OTHERS.items():
            step = usual_step * chosen.gauss(1.0, 0.01)
            of_tick = figures(chosen, step, mfu, wait, None)
            played.tick(of_tick, run=run, ranks=ranks, verdict=judged, pace=(step, mfu, wait), seconds=0.0)
    return played


@contextmanager
def served_fleet() -> Iterator[str]:
    """The address of a console with these runs, and with captures, profiles and a hang of the slow one."""
    played = played_fleet()
    with played_services(SLOW, SLOW_RANK, FleetReports(played.usage)) as channels:
        console = ConsoleServer(played.history, "127.0.0.1", 0, channels=channels)
        console.start()
        try:
            yield console.url
        finally:
            console.stop()


STEP_RUN = "research/gpt-pp2-dp2"
RECORDING = Path(__file__).resolve().parents[1] / "tests" / "data" / "nccl" / "pp2_dp2_late_host.npz"


@contextmanager
def served_step() -> Iterator[str]:
    """The address of a console with one run: Megatron-LM on four ranks, recorded while the host of rank 2 was late."""
    finder = PathFinder()
    for _ in finder.find_all(read_recording(RECORDING).operations):
        pass
    assert finder.judged is not None
    picture = draw_step(finder.judged, [2])
    cause = Cause(bound=HOST, evidence="its host issues operations 250 ms late in a step")
    impact = picture.lost_ns / picture.step_ns
    verdict = Verdict(Kind.SLOW_RANK, "", Severity.ALARM, culprits=(2,), impact_ratio=impact, cause=cause)
    played = Played(begin=time.time() - 60)
    for _ in range(5):
        pace = (picture.step_ns / 1e9, 0.11, 0.7)
        played.tick(run=STEP_RUN, verdict=verdict, picture=picture, pace=pace)
    console = ConsoleServer(played.history, "127.0.0.1", 0)
    console.start()
    try:
        yield console.url
    finally:
        console.stop()


# Pages by name: their address, and what is there when they are complete.
PAGES = {
    "fleet": ("", "document.querySelectorAll('tbody tr').length > 1"),
    "run": (f"?run={quote(SLOW)}", "document.querySelectorAll('.heatmap canvas, .u-wrap').length === 2"),
    "rank": (
        f"?run={quote(SLOW)}&rank={SLOW_RANK}&flame=cohort",
        "document.querySelectorAll('.u-wrap').length > 5 "
        "&& performance.getEntriesByType('resource').some(({ name }) => name.includes('/flame?'))",
    ),
    "capture": (f"?view=captures&capture={CAPTURE_ID}", "document.querySelectorAll('.phases').length > 2"),
    "report": ("?view=report", "document.querySelectorAll('h2').length > 5"),
    "hang": (f"?view=hangs&hang={HANG_ID}", "document.querySelectorAll('details').length > 1"),
}
# The same of the run that `served_step` serves.
STEP_PAGES = {"step": (f"?run={quote(STEP_RUN)}", "document.querySelector('.step canvas')?.width > 300")}
# Those of the documentation: whether it is dark, and its height.
PICTURES = {
    "fleet": (False, 540),
    "run": (False, 900),
    "step": (False, 725),
    "rank": (True, 1160),
    "capture": (False, 800),
}


def open_page(page: Page, url: str, name: str, width: int, height: int, is_dark: bool = False) -> None:
    address, is_complete = (PAGES | STEP_PAGES)[name]
    page.call("Emulation.setScrollbarsHidden", hidden=True)
    page.open(url + address, width, height, is_dark)
    page.wait_for(is_complete)
    # Two frames: the first shows what the effects have drawn.
    page.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else IMAGES
    with (
        tempfile.TemporaryDirectory() as profile,
        served_fleet() as fleet,
        served_step() as step,
        browser(Path(profile)) as chromium,
    ):
        for name, (is_dark, height) in PICTURES.items():
            page = chromium.page()
            open_page(page, step if name in STEP_PAGES else fleet, name, WIDTH, height, is_dark)
            page.screenshot(folder / f"console-{name}.png")
            _shrink(chromium.page(), folder / f"console-{name}.png")
    return 0


# The pixels of a picture, base64.
PIXELS = """(async () => {
  const image = new Image();
  image.src = 'data:image/png;base64,%s';
  await image.decode();
  const context = new OffscreenCanvas(image.width, image.height).getContext('2d');
  context.drawImage(image, 0, 0);
  const reader = new FileReader();
  reader.readAsDataURL(new Blob([context.getImageData(0, 0, image.width, image.height).data]));
  await new Promise((done) => { reader.onload = done; });
  return reader.result.split(',')[1];
})()"""


def _shrink(page: Page, path: Path) -> None:
    """Writes it again without PNG's filters: of text on plain colours, a quarter is saved."""
    content = path.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    pixels = np.frombuffer(base64.b64decode(page.value(PIXELS % base64.b64encode(content).decode())), dtype=np.uint8)
    rows = pixels.reshape(height, width, 4)[:, :, :3].reshape(height, -1)
    data = zlib.compress(np.pad(rows, ((0, 0), (1, 0))).tobytes(), 9)  # each row begins with its filter: none
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    ]
    path.write_bytes(content[:8] + b"".join(chunks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
