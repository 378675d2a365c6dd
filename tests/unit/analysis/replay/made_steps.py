"""Traces of made-up steps whose time is known: a host that launches kernels, streams that run them; and a host without
a device, whose threads transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rankscope.analysis.traces.trace import Category, Device, Trace
from tests.unit.analysis.traces.trace_builder import Event, make_trace

LATENCY_US, BETWEEN_US, CALL_US = 6.0, 1.5, 4.0


@dataclass
class Machine:
    """Records what a host and a device do, in µs. A launch blocks while the queue is full."""

    queue_limit: int = 1 << 30
    rank: int = 0
    device: str = "NVIDIA H200"
    now: float = 100.0
    events: list[Event] = field(default_factory=list)
    stream_end: dict[int, float] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    correlation: int = 0

    def work(self, microseconds: float) -> None:
        """The host's own."""
        self.now += microseconds

    def wait_for_input(self, microseconds: float) -> None:
        self._host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", microseconds)

    def _host(self, name: str, microseconds: float) -> None:
        self.events.append((name, Category.USER_ANNOTATION, self.now, microseconds))
        self.now += microseconds

    def launch(self, name: str, microseconds: float, *, stream: int = 7, after: float = 0.0, **options: Any) -> float:
        """Returns the end of the kernel, which does not begin before `after`."""
        begun = self.now
        if len(self.starts) >= self.queue_limit:
            self.now = max(self.now, self.starts[-self.queue_limit])
        self.correlation += 1
        start = max(self.now + LATENCY_US, self.stream_end.get(stream, 0.0) + BETWEEN_US, after + BETWEEN_US)
        self.now += CALL_US
        self.events.append(
            ("cudaLaunchKernel", Category.RUNTIME, begun, self.now - begun, {"correlation": self.correlation})
        )
        self.events.append(
            (name, Category.KERNEL, start, microseconds, {"correlation": self.correlation, "stream": stream, **options})
        )
        self.starts.append(start)
        self.stream_end[stream] = start + microseconds
        return start + microseconds

    def let_stream_wait(self) -> None:
        self.events.append(("cudaStreamWaitEvent", Category.RUNTIME, self.now, 1.0))
        self.now += 1.0

    def synchronize(self) -> None:
        end = max(self.now + 2.0, max(self.stream_end.values()) + 3.0)
        self.events.append(("cudaStreamSynchronize", Category.RUNTIME, self.now, end - self.now))
        self.now = end

    def annotate(self, name: str, since: float) -> None:
        self.events.append((name, Category.USER_ANNOTATION, since, self.now - since))

    def operator(self, name: str, since: float) -> None:
        self.events.append((name, Category.CPU_OP, since, self.now - since))

    def trace(self) -> Trace:
        return make_trace(self.events, rank=self.rank, devices=(Device(0, self.device, None),))


def launch_bound() -> Trace:
    """A host that takes 46 µs + 4 µs a launch, of kernels of 10 µs: 2.5 ms a step."""
    return launching(host_us=46.0, kernel_us=10.0)


def device_bound(steps: int = 5, queue_limit: int = 1 << 30) -> Trace:
    """Kernels of 98.5 µs, 1.5 µs between them: 5 ms a step, while the host needs 0.5 ms."""
    return launching(host_us=6.0, kernel_us=98.5, steps=steps, queue_limit=queue_limit)


def launching(host_us: float, kernel_us: float, steps: int = 5, queue_limit: int = 1 << 30) -> Trace:
    """Steps of 50 kernels."""
    machine = Machine(queue_limit)
    for step in range(steps):
        began = machine.now
        for _ in range(50):
            machine.work(host_us)
            machine.launch("gemm", kernel_us)
        machine.annotate(f"ProfilerStep#{step}", began)
    return machine.trace()


@dataclass
class Host:
    """Records what a host without a device does, in µs. A transfer begins 10 µs after its call."""

    rank: int = 0
    now: float = 100.0
    events: list[Event] = field(default_factory=list)

    def compute(self, microseconds: float, name: str = "aten::mm") -> None:
        self.events.append((name, Category.CPU_OP, self.now, microseconds))
        self.now += microseconds

    def sleep(self, microseconds: float) -> None:
        self.now += microseconds

    def read(self, microseconds: float) -> None:
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self.events.append((name, Category.USER_ANNOTATION, self.now, microseconds))
        self.now += microseconds

    def start(
        self, microseconds: float, *, until: float | None = None, lane: int = 2, event_ends_late: float = 0.0
    ) -> float:
        """Starts an all-reduce, and returns its end."""
        begins = self.now + 10.0
        ends = begins + microseconds if until is None else until
        self.events.append(("c10d::allreduce_", Category.CPU_OP, self.now, 8.0))
        described = {"thread": lane, "group": "0", "group_size": 4, "in_elements": 1000, "element_type": "Float"}
        lasts = ends - begins + event_ends_late
        self.events.append(("gloo:all_reduce", Category.USER_ANNOTATION, begins, lasts, described))
        self.now += 8.0
        return ends

    def wait(self, end: float) -> None:
        self.now = max(self.now, end) + 5.0

    def annotate(self, name: str, since: float) -> None:
        self.events.append((name, Category.USER_ANNOTATION, since, self.now - since))

    def trace(self) -> Trace:
        return make_trace(self.events, rank=self.rank, backend="gloo")
