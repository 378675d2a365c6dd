"""JobService: the correlation's answers over gRPC."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator

import grpc

from rankscope.operator.correlation.correlator import Correlator, JobState
from rankscope.operator.correlation.messages import job_status
from rankscope.v1 import job_service_pb2, job_service_pb2_grpc


class JobServicer(job_service_pb2_grpc.JobServiceServicer):
    def __init__(self, correlator: Correlator) -> None:
        self._correlator = correlator

    def ListJobs(
        self, request: job_service_pb2.ListJobsRequest, context: grpc.ServicerContext
    ) -> job_service_pb2.ListJobsResponse:
        return job_service_pb2.ListJobsResponse(jobs=[job_status(state) for state in self._correlator.states])

    def WatchJobs(
        self, request: job_service_pb2.WatchJobsRequest, context: grpc.ServicerContext
    ) -> Iterator[job_service_pb2.WatchJobsResponse]:
        # A reader that is slow sees the newest state, not all of them.
        newest: queue.Queue[tuple[JobState, ...] | None] = queue.Queue(maxsize=1)

        def offer(states: tuple[JobState, ...] | None) -> None:
            while True:
                try:
                    newest.put_nowait(states)
                    return
                except queue.Full:
                    with contextlib.suppress(queue.Empty):
                        newest.get_nowait()

        stop = self._correlator.listen(offer)
        context.add_callback(lambda: offer(None))
        try:
            states: tuple[JobState, ...] | None = self._correlator.states
            while states is not None and context.is_active():
                yield job_service_pb2.WatchJobsResponse(jobs=[job_status(state) for state in states])
                states = newest.get()
        finally:
            stop()
