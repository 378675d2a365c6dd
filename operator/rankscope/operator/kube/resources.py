"""Our own kinds, `rankscope.dev/v1alpha1`: the types that the code reads and writes, and that the CRDs are made from.

Times are RFC 3339 texts, as everywhere in Kubernetes; ratios go from 0 to 1; what was not measured is left out."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field, json

from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity

GROUP = "rankscope.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

RANKS_PATTERN = r"^(all|straggler|straggler\+peer|[0-9]{1,7}(-[0-9]{1,7})?(,[0-9]{1,7}(-[0-9]{1,7})?)*)$"
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"

Ranks = Annotated[str, Meta(min_length=1, max_length=4096, pattern=RANKS_PATTERN)]
Text = Annotated[str, Meta(max_length=1024)]
Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Ratio = Annotated[float, Meta(ge=0, le=1)]
ConditionStatus = Literal["True", "False", "Unknown"]
RunPhase = Literal["Pending", "Running", "Ended"]
CapturePhase = Literal["Pending", "Running", "Succeeded", "Failed", "Cancelled"]


class Condition(Struct, rename="camel", kw_only=True):
    type: Annotated[str, Meta(max_length=316)]
    status: ConditionStatus
    reason: Annotated[str, Meta(min_length=1, max_length=1024, pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, Meta(max_length=32768)]
    last_transition_time: Moment
    observed_generation: Annotated[int, Meta(ge=0)] | UnsetType = UNSET


# --- TrainingRun ---------------------------------------------------------------------------------------------------


class Workload(Struct, rename="camel", kw_only=True):
    """What the pods belong to."""

    api_version: Text | UnsetType = UNSET
    kind: Annotated[str, Meta(min_length=1, max_length=63)]
    name: Annotated[str, Meta(min_length=1, max_length=253)]
    uid: Text | UnsetType = UNSET


class TrainingRunSpec(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    workload: Annotated[Workload, Meta(description="What the run's pods belong to.")]
    mfu_target: Annotated[Ratio, Meta(description="Raise low_mfu below this.")] | UnsetType = UNSET


class RankCount(Struct, rename="camel", kw_only=True):
    expected: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    seen: Annotated[int, Meta(ge=0)]
    summary: Annotated[str, Meta(max_length=32, description="seen/expected")]


class Culprit(Struct, rename="camel", kw_only=True):
    rank: Annotated[int, Meta(ge=0)]
    node: Text | UnsetType = UNSET
    pod: Text | UnsetType = UNSET
    gpu: Text | UnsetType = UNSET


class RunVerdict(Struct, rename="camel", kw_only=True):
    kind: Kind
    severity: Severity
    confidence: Confidence
    reason: Annotated[str, Meta(max_length=1024, description="One sentence for people.")]
    since: Moment
    culprits: Annotated[list[Culprit], Meta(max_length=64)] = field(default_factory=list)
    culprit_count: Annotated[int, Meta(ge=0)] = 0
    stage: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    group: Text | UnsetType = UNSET
    phase: Text | UnsetType = UNSET
    bound: (
        Annotated[str, Meta(max_length=16, description="host or device, where steps are timed on a GPU")] | UnsetType
    ) = UNSET
    stalls: (
        Annotated[str, Meta(max_length=64, description="How often and how long, where the loss sits in few steps.")]
        | UnsetType
    ) = UNSET
    source: Annotated[str, Meta(max_length=512, description="file:line (function)")] | UnsetType = UNSET
    evidence: Text | UnsetType = UNSET
    impact_ratio: float | UnsetType = UNSET
    lost_gpu_hours: float | UnsetType = UNSET


class TrainingRunStatus(Struct, rename="camel", kw_only=True):
    observed_generation: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    phase: RunPhase | UnsetType = UNSET
    job: Annotated[str, Meta(max_length=256, description="The job's name in metrics.")] | UnsetType = UNSET
    attempt: Annotated[int, Meta(ge=0, le=1_000_000, description="How often the run was restarted.")] | UnsetType = (
        UNSET
    )
    attempt_pod: (
        Annotated[str, Meta(max_length=64, description="The pod by which restarts are counted: its uid and restarts.")]
        | UnsetType
    ) = UNSET
    ranks: RankCount | UnsetType = UNSET
    step_seconds: float | UnsetType = UNSET
    mfu_ratio: float | UnsetType = UNSET
    exposed_communication_ratio: float | UnsetType = UNSET
    # The same three as people read them: `kubectl get` does not format.
    step: Annotated[str, Meta(max_length=32)] | UnsetType = UNSET
    mfu: Annotated[str, Meta(max_length=32)] | UnsetType = UNSET
    exposed: Annotated[str, Meta(max_length=32)] | UnsetType = UNSET
    verdict: RunVerdict | UnsetType = UNSET
    last_capture: Text | UnsetType = UNSET
    last_hang: Text | UnsetType = UNSET
    conditions: Annotated[list[Condition], Meta(max_length=16)] = field(default_factory=list)


# --- Capture -------------------------------------------------------------------------------------------------------


class CaptureOptions(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    shapes: bool = False
    stacks: bool = False
    memory: bool = False
    flops: bool = False
    modules: bool = False
    allow_slowdown: Annotated[
        bool, Meta(description="Accept that a CUDA process started without TEARDOWN_CUPTI=1 may stay slower.")
    ] = False


class CaptureSpec(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    # A name outside Kubernetes has other characters, too.
    run: Annotated[
        str, Meta(min_length=1, max_length=253, pattern="^[^/]+$", description="The TrainingRun, in this namespace.")
    ]
    job_number: (
        Annotated[int, Meta(ge=1, le=16, description="Of several jobs in the run: the number behind # in metrics.")]
        | UnsetType
    ) = UNSET
    ranks: Annotated[Ranks, Meta(description="all, straggler, straggler+peer, or a list as in 0,3-5.")] = (
        "straggler+peer"
    )
    steps: (
        Annotated[int, Meta(ge=1, le=100, description="Without steps and seconds: as many as tell a slow rank.")]
        | UnsetType
    ) = UNSET
    seconds: Annotated[float, Meta(gt=0, le=60)] | UnsetType = UNSET
    options: CaptureOptions = field(default_factory=CaptureOptions)
    patience_seconds: Annotated[float, Meta(ge=0, le=600)] = 60.0
    ttl_seconds_after_finished: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    delete_artifacts: Annotated[
        bool, Meta(description="Remove the traces from the nodes when this object is deleted.")
    ] = False
    reason: Text | UnsetType = UNSET


class CapturedRank(Struct, rename="camel", kw_only=True):
    rank: Annotated[int, Meta(ge=0)]
    node: Text | UnsetType = UNSET
    pod: Text | UnsetType = UNSET
    backend: Text | UnsetType = UNSET
    state: Text
    error: Annotated[str, Meta(max_length=1024, description="The real cause.")] | UnsetType = UNSET
    uri: Text | UnsetType = UNSET
    bytes: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    steps: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    start_unix_ms: int | UnsetType = UNSET


class CaptureStatus(Struct, rename="camel", kw_only=True):
    observed_generation: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    phase: CapturePhase | UnsetType = UNSET
    message: Text | UnsetType = UNSET
    # Written before any daemon is asked, so that a restarted operator follows the same capture. Job and id are for
    # people: the operator derives them itself, because users may be able to write here.
    job: Annotated[str, Meta(max_length=256)] | UnsetType = UNSET
    capture_id: Text | UnsetType = UNSET
    start_unix_ms: int | UnsetType = UNSET
    # Where the spec has no length, so that the daemons of all nodes record the same.
    steps: Annotated[int, Meta(ge=1, le=100, description="Chosen, if the spec has none.")] | UnsetType = UNSET
    seconds: Annotated[float, Meta(gt=0, le=60, description="The same.")] | UnsetType = UNSET
    started_at: Moment | UnsetType = UNSET
    finished_at: Moment | UnsetType = UNSET
    delivered: Annotated[str, Meta(max_length=32, description="delivered/asked")] | UnsetType = UNSET
    ranks: Annotated[list[CapturedRank], Meta(max_length=4096)] = field(default_factory=list)
    start_skew_ms: float | UnsetType = UNSET
    findings: Annotated[list[Text], Meta(max_length=32)] = field(default_factory=list)
    conditions: Annotated[list[Condition], Meta(max_length=16)] = field(default_factory=list)


# --- ProfilingPolicy -----------------------------------------------------------------------------------------------


class Selector(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """Which runs of this namespace: those whose pods have all these labels; all runs if empty."""

    match_labels: Annotated[dict[str, str], Meta(max_length=64)] = field(default_factory=dict)


class Sampling(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    stack_rate_hertz: Annotated[float, Meta(ge=0, le=100)] | UnsetType = UNSET


class Thresholds(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    ratio: Annotated[float, Meta(gt=1, le=10)] | UnsetType = UNSET
    score: Annotated[float, Meta(ge=1, le=100)] | UnsetType = UNSET
    impact_ratio: Ratio | UnsetType = UNSET
    mfu_target: Ratio | UnsetType = UNSET


class AutomaticCaptures(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    on: Annotated[list[Kind], Meta(min_length=1, max_length=len(Kind))] = field(
        default_factory=lambda: [Kind.SLOW_RANK]
    )
    steps: Annotated[int, Meta(ge=1, le=100, description="By default as many as tell the slow rank.")] | UnsetType = (
        UNSET
    )
    cooldown_seconds: Annotated[int, Meta(ge=60)] = 3600
    per_day: Annotated[int, Meta(ge=1, le=1000)] = 10
    concurrent: Annotated[int, Meta(ge=1, le=100)] = 1
    ttl_seconds_after_finished: Annotated[int, Meta(ge=0)] = 7 * 86400


class DutyCycle(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    steps: Annotated[int, Meta(ge=1, le=100)]
    every_seconds: Annotated[int, Meta(ge=60)]


class ProfilingPolicySpec(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    selector: Selector = field(default_factory=Selector)
    priority: Annotated[int, Meta(ge=-1000, le=1000, description="The highest that selects a run holds.")] = 0
    sampling: Sampling | UnsetType = UNSET
    thresholds: Thresholds | UnsetType = UNSET
    automatic_captures: AutomaticCaptures | UnsetType = UNSET
    duty_cycle: DutyCycle | UnsetType = UNSET


class ProfilingPolicyStatus(Struct, rename="camel", kw_only=True):
    observed_generation: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    runs: Annotated[int, Meta(ge=0, description="Runs that it holds for.")] | UnsetType = UNSET
    captures_today: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    conditions: Annotated[list[Condition], Meta(max_length=16)] = field(default_factory=list)


# msgspec reads the annotations of a Struct when the first one is decoded. Two threads that do so at the same time crash
# the process, and every watch has a thread: here there is one.
for _spec in (TrainingRunSpec, CaptureSpec, ProfilingPolicySpec):
    json.Decoder(_spec)
for _status in (TrainingRunStatus, CaptureStatus, ProfilingPolicyStatus):
    json.Decoder(_status)
