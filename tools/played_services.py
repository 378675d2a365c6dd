"""Captures, profiles, hangs and fleet reports of made-up runs: real gRPC servers, for consoles of played runs.

Image decoding is slow on one rank: its stacks, a capture of eight ranks of its pipeline stage, and the report of a hang
two hours before."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import msgspec
from starlette.requests import Request

from rankscope.analysis.collectives.hang_report import CollectiveRow, HangReport, Place
from rankscope.analysis.profiles.comparison import compare
from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.analysis.profiles.pprof import pprof
from rankscope.analysis.profiles.profile import Profile, SampledStack
from rankscope.operator.console.endpoints import Channels
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.v1 import capture_service_pb2 as captures_pb
from rankscope.v1 import job_service_pb2 as jobs_pb
from rankscope.v1 import profile_service_pb2 as profiles_pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceServicer, add_CaptureServiceServicer_to_server
from rankscope.v1.job_service_pb2_grpc import JobServiceServicer, add_JobServiceServicer_to_server
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceServicer, add_ProfileServiceServicer_to_server

CAPTURE_ID, HANG_ID = "c-20261116-102203-7e04b1", "h-20261116-082203-4be1a0"
COHORT = range(32, 40)
PERIOD_NANOS = 100_000_000
SITE = "/opt/venv/lib/python3.12/site-packages"
_LOOP = ("<module> /app/train.py:212", "main /app/train.py:196")
_EPOCH = (*_LOOP, "train_epoch /app/train.py:131")
_INPUT = (
    *(*_LOOP, "train_epoch /app/train.py:124", "__next__ ~/torch/utils/data/dataloader.py:734"),
    *("_next_data ~/torch/utils/data/dataloader.py:790", "fetch ~/torch/utils/data/_utils/fetch.py:52"),
    "__getitem__ /app/dataset.py:64",
)
_IMAGE = (*_INPUT, "load_image /app/dataset.py:88")
_MODULE = "_call_impl ~/torch/nn/modules/module.py:1786"
_FORWARD = (
    *(*_EPOCH, _MODULE, "forward ~/torch/nn/parallel/distributed.py:1661"),
    *(_MODULE, "forward /app/model.py:72"),
)
_BLOCK = (*_FORWARD, _MODULE, "forward /app/model.py:41")
_BACKWARD = (*(*_LOOP, "train_epoch /app/train.py:133"), "backward ~/torch/_tensor.py:625")
_ENGINE = (
    *_BACKWARD,
    "backward ~/torch/autograd/__init__.py:354",
    "_engine_run_backward ~/torch/autograd/graph.py:841",
)
_STEP = (
    *(*_LOOP, "train_epoch /app/train.py:136"),
    "step ~/torch/optim/adamw.py:243",
    "adamw ~/torch/optim/adamw.py:911",
)
# Samples of the slow rank, and of each of its peers.
_SAMPLES: tuple[tuple[tuple[str, ...], str, int, int], ...] = (
    ((*_IMAGE, "open ~/PIL/Image.py:3465"), "input", 1490, 40),
    ((*_IMAGE, "convert ~/PIL/Image.py:981", "load ~/PIL/ImageFile.py:300"), "input", 830, 70),
    (_IMAGE, "input", 140, 10),
    ((*_INPUT[:-1], "__getitem__ /app/dataset.py:66", "augment /app/dataset.py:103"), "input", 220, 230),
    ((*_BLOCK, _MODULE, "forward ~/torch/nn/modules/linear.py:134"), "forward", 610, 640),
    ((*_BLOCK, "attention /app/model.py:58"), "forward", 420, 430),
    ((*_BLOCK, _MODULE, "forward ~/torch/nn/modules/normalization.py:229"), "forward", 160, 150),
    ((*_FORWARD, "embed /app/model.py:80"), "forward", 130, 120),
    (
        (*_EPOCH[:-1], "train_epoch /app/train.py:132", "cross_entropy ~/torch/nn/functional.py:3462"),
        "forward",
        90,
        100,
    ),
    (_ENGINE, "backward", 1390, 3660),
    ((*_STEP, "_multi_tensor_adamw ~/torch/optim/adamw.py:733"), "optimizer", 300, 310),
    (
        (*_EPOCH[:-1], "train_epoch /app/train.py:135", "clip_grad_norm_ ~/torch/nn/utils/clip_grad.py:221"),
        "optimizer",
        150,
        160,
    ),
    ((*_LOOP, "train_epoch /app/train.py:139", "log_metrics /app/train.py:88"), "other", 70, 80),
)


def profile(slow_rank: int, ranks: Collection[int]) -> Profile:
    """Of ten minutes at 10 Hz."""
    return Profile.of(
        SampledStack(_stack(*places), count, count * PERIOD_NANOS, rank, "MainThread", phase)
        for places, phase, slow, usual in _SAMPLES
        for rank in ranks
        if (count := slow if rank == slow_rank else usual)
    )


def _stack(*places: str) -> Stack:
    """Outermost first, as `function file:line`."""
    parts = (place.replace("~", SITE).split() for place in places)
    frames = [Frame(function, file, int(line)) for function, file, line in ((f, *p.split(":")) for f, p in parts)]
    return tuple(reversed(frames))


class PlayedProfiles(ProfileServiceServicer):
    def __init__(self, slow_rank: int) -> None:
        self._slow_rank = slow_rank

    def QueryProfile(
        self, request: profiles_pb.QueryProfileRequest, context: grpc.ServicerContext
    ) -> Iterator[profiles_pb.QueryProfileResponse]:
        made = profile(self._slow_rank, request.selection.ranks or COHORT)
        yield profiles_pb.QueryProfileResponse(pprof=pprof(made))

    def CompareProfiles(
        self, request: profiles_pb.CompareProfilesRequest, context: grpc.ServicerContext
    ) -> profiles_pb.CompareProfilesResponse:
        ranks = set(request.selection.ranks)
        here, there = (profile(self._slow_rank, chosen) for chosen in (ranks, set(COHORT) - ranks))
        return profiles_pb.CompareProfilesResponse(
            excesses=[profiles_pb.FrameExcess(**one.fields()) for one in compare(here, there).excesses],
            samples=here.samples_total,
            reference_samples=there.samples_total,
        )


class PlayedCaptures(CaptureServiceServicer):
    def __init__(self, run: str, slow_rank: int) -> None:
        self._capture = _capture(run, slow_rank)

    def ListCaptures(
        self, request: captures_pb.ListCapturesRequest, context: grpc.ServicerContext
    ) -> captures_pb.ListCapturesResponse:
        shown = [self._capture] if request.job in ("", self._capture.job) else []
        return captures_pb.ListCapturesResponse(captures=shown)

    def GetCapture(
        self, request: captures_pb.GetCaptureRequest, context: grpc.ServicerContext
    ) -> captures_pb.GetCaptureResponse:
        return captures_pb.GetCaptureResponse(capture=self._capture)


def _capture(run: str, slow_rank: int) -> captures_pb.Capture:
    """Of three steps."""
    analysed = captures_pb.CAPTURE_STATE_ANALYSED
    millis = round(1000 * (time.time() - 150))
    made = captures_pb.Capture(id=CAPTURE_ID, job=run, state=analysed, requested_unix_millis=millis)
    made.requested_by, made.reason, made.start_skew_millis = "ana@example.org", "who is late?", 1.8
    join = captures_pb.JoinSummary(clock_residual_micros=14.0, collectives_matched=246, verdict="slow_rank")
    join.culprits.append(slow_rank)
    join.reason, join.impact_ratio = "it arrives 211 ms after the others", 0.25
    for rank, count in {**dict.fromkeys(COHORT, 2), 33: 5, 38: 4, slow_rank: 231}.items():
        join.last_arrivals[rank] = count
    made.join.CopyFrom(join)
    for rank in COHORT:
        late = 0.62 if rank == slow_rank else 0.0
        summary = captures_pb.TraceSummary(span_seconds=2.5, compute_seconds=1.65 + 0.001 * (rank % 5), events=184_211)
        summary.exposed_communication_seconds = 0.72 - late
        summary.communication_seconds, summary.memory_copy_seconds = 0.98 - late, 0.02
        summary.idle_seconds = 2.5 - summary.compute_seconds - summary.exposed_communication_seconds - 0.01
        summary.collectives.update({"all_reduce": 96, "all_gather": 72, "reduce_scatter": 72, "send": 6, "recv": 6})
        summary.top_kernels.extend(
            [
                "sm90_xmma_gemm_bf16bf16_bf16f32_tn_n_tilesize128x256x64",
                "flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
                "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel",
                "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
                "vectorized_layer_norm_kernel<c10::BFloat16, float>",
            ]
        )
        if late:
            summary.findings.append("the GPU is idle for 25 % of the time, while the host is in load_image")
        entry = made.ranks.add(rank=rank, node=f"gpu-{rank // 8 + 11}", backend="kineto", state=analysed, steps=3)
        entry.artifact, entry.bytes, entry.pid = f"rank{rank}.json.gz", 3_300_000 + 9_700 * (rank % 7), 4100 + rank
        entry.start_unix_millis = millis + 5_210 + rank % 3
        entry.step_times.before_seconds, entry.step_times.during_seconds = 0.834, 0.871
        entry.step_times.after_seconds = 0.834
        entry.summary.CopyFrom(summary)
    return made


class PlayedJobs(JobServiceServicer):
    def __init__(self, run: str, reports: FleetReports) -> None:
        self._report = _report(run)
        self._reports = reports

    def GetFleetReport(
        self, request: jobs_pb.GetFleetReportRequest, context: grpc.ServicerContext
    ) -> jobs_pb.GetFleetReportResponse:
        return self._reports.get(request.since)

    def ListHangs(self, request: jobs_pb.ListHangsRequest, context: grpc.ServicerContext) -> jobs_pb.ListHangsResponse:
        report = self._report
        shown = jobs_pb.HangSummary(id=report.id, run=report.run, headline=report.headline)
        shown.began_unix_nanos = round(report.began_unix_seconds * 1e9)
        shown.made_unix_nanos = round(report.made_unix_seconds * 1e9)
        shown.ended_unix_nanos = round((report.ended_unix_seconds or 0) * 1e9)
        return jobs_pb.ListHangsResponse(hangs=[shown] if request.run in ("", report.run) else [])

    def GetHang(self, request: jobs_pb.GetHangRequest, context: grpc.ServicerContext) -> jobs_pb.GetHangResponse:
        return jobs_pb.GetHangResponse(report=msgspec.json.encode(self._report))


def _report(run: str) -> HangReport:
    began = time.time() - 7200
    saving, waiting = "save_checkpoint (ckpt.py:51)", "all_reduce (train.py:140)"
    collective = "all_reduce seq 1041 of group dp0"
    return HangReport(
        id=HANG_ID,
        run=run,
        headline=f"63 ranks in {collective}, rank 17 in {saving}",
        verdict="no rank has finished a step for 35 s",
        world_size=64,
        began_unix_seconds=began,
        made_unix_seconds=began + 35,
        ended_unix_seconds=began + 412,
        culprits="17",
        places=(
            Place("17", 1, saving, "checkpoint", ("write (/app/storage.py:33)", "save_checkpoint (/app/ckpt.py:51)")),
            Place(
                "0-16,18-63",
                63,
                waiting,
                "communication",
                ("all_reduce (~/torch/distributed/distributed_c10d.py:2810)", "train_epoch (/app/train.py:140)"),
            ),
        ),
        collectives=(
            CollectiveRow(collective, "0-16,18-63", "waits", "[8388608] BFloat16"),
            CollectiveRow(collective, "17", "never entered", "last in all_reduce seq 1040"),
        ),
    )


@contextmanager
def played_services(run: str, slow_rank: int, reports: FleetReports) -> Iterator[Channels]:
    """Channels to them, for a console."""
    with tempfile.TemporaryDirectory() as folder:
        server = grpc.server(ThreadPoolExecutor(4))
        add_CaptureServiceServicer_to_server(PlayedCaptures(run, slow_rank), server)
        add_ProfileServiceServicer_to_server(PlayedProfiles(slow_rank), server)
        add_JobServiceServicer_to_server(PlayedJobs(run, reports), server)
        target = f"unix:{folder}/served.sock"
        server.add_insecure_port(target)
        server.start()

        def channel(request: Request) -> grpc.Channel:
            return grpc.insecure_channel(target)

        try:
            yield channel
        finally:
            server.stop(None).wait()
