// The answers of the console's API. Made by `make console` from its OpenAPI document: do not edit.
/** Where a step goes: the seconds of all parts are those of the step. */
export interface BreakdownAnswer {
  readonly step_seconds: number;
  readonly steps: number;
  readonly parts: readonly StepPartAnswer[];
  readonly traffic: readonly TrafficAnswer[];
}

export interface CancelCapture {
  readonly id: string;
}

export interface CaptureAnswer {
  readonly id: string;
  readonly job: string;
  readonly state: string;
  readonly is_final: boolean;
  readonly reason: string;
  readonly requested_unix_ms: number;
  readonly requested_by: string;
  readonly ranks: readonly CapturedRank[];
  readonly start_skew_ms: number | null;
  readonly summary: CaptureSummary;
  readonly notes: readonly string[];
}

export interface CaptureCost {
  readonly sentences: readonly string[];
  readonly duration_seconds: number;
  readonly recording_seconds: number | null;
  readonly slowdown_ratio: number | null;
  readonly bytes_per_rank: number | null;
}

/** As in capture_service.proto. */
export interface CaptureOptions {
  readonly shapes: boolean;
  readonly stacks: boolean;
  readonly memory: boolean;
  readonly flops: boolean;
  readonly modules: boolean;
  readonly allow_slowdown: boolean;
  readonly wait_steps: number;
  readonly warmup_steps: number | null;
  readonly repeat: number;
}

/** Of the list. */
export interface CaptureRow {
  readonly id: string;
  readonly run: string;
  readonly state: string;
  readonly is_final: boolean;
  readonly ranks: string;
  readonly ranks_selected: number;
  readonly ranks_delivered: number;
  readonly requested_unix_ms: number;
  readonly requested_by: string;
  readonly reason: string;
  readonly sentence: string;
}

export interface CaptureSummary {
  readonly sentence: string;
  readonly verdict: string | null;
  readonly judgement: string | null;
  readonly findings: readonly string[];
  readonly join: JoinSummary | null;
  readonly ranks: readonly RankTraceSummary[];
}

export interface CapturedRank {
  readonly rank: number;
  readonly node: string;
  readonly pid: number | null;
  readonly backend: string | null;
  readonly state: string;
  readonly progress: string;
  readonly error: string | null;
  readonly file: string | null;
  readonly more_files: readonly string[];
  readonly bytes: number;
  readonly uri: string | null;
  readonly start_unix_ms: number | null;
  readonly steps: number | null;
  readonly step_times: StepTimes | null;
  readonly notes: readonly string[];
  readonly summary: TraceSummary | null;
}

export interface CapturesAnswer {
  readonly captures: readonly CaptureRow[];
}

export interface CollectiveRow {
  readonly collective: string;
  readonly ranks: string;
  readonly finding: string;
  readonly detail: string;
}

/** The frames in which a rank spends more of its time than its peers do, the line to look at first. */
export interface ExcessAnswer {
  readonly sentence: string;
  readonly reason: string;
  readonly samples: number;
  readonly reference_samples: number;
  readonly frames: readonly ExcessFrame[];
  readonly problems: readonly string[];
}

export interface ExcessFrame {
  readonly function: string;
  readonly file: string;
  readonly line: number;
  readonly phase: string;
  readonly share_ratio: number;
  readonly reference_share_ratio: number;
}

/** `making` says how far the report is; it is empty once the report is there. `definitions` are of columns. In a table, `left` are the columns of words, `said` are sentences below it, and `empty` is shown in place of no rows. */
export interface FleetReportAnswer {
  readonly making: string;
  readonly made_unix_seconds: number;
  readonly span: string;
  readonly headline: string;
  readonly notes: readonly string[];
  readonly tables: readonly ReportTable[];
  readonly definitions: Readonly<Record<string, string>>;
}

/** What could not be read of these ranks. */
export interface Gap {
  readonly ranks: string;
  readonly what: string;
  readonly reason: string;
}

export interface HangReport {
  readonly id: string;
  readonly run: string;
  readonly headline: string;
  readonly verdict: string;
  readonly world_size: number;
  readonly began_unix_seconds: number;
  readonly made_unix_seconds: number;
  readonly seen_unix_seconds: number | null;
  readonly ended_unix_seconds: number | null;
  readonly culprits: string;
  readonly left: string;
  readonly places: readonly Place[];
  readonly collectives: readonly CollectiveRow[];
  readonly gaps: readonly Gap[];
  readonly problems: readonly string[];
}

/** Of the list. */
export interface HangRow {
  readonly id: string;
  readonly run: string;
  readonly headline: string;
  readonly began_unix_seconds: number;
  readonly until_unix_seconds: number;
  readonly ended_unix_seconds: number | null;
}

export interface HangsAnswer {
  readonly hangs: readonly HangRow[];
}

/** Followed by a matrix of little-endian float32: a row per rank, a column per time, NaN where it is not known. */
export interface HeatmapHeader {
  readonly run: string;
  readonly signal: string;
  readonly unit: string;
  readonly ranks: readonly number[];
  readonly starts: readonly number[];
  readonly ends: readonly number[];
  readonly medians: readonly (number | null)[];
  readonly note: string;
}

/** Step times of all ranks in the latest ticks; `edges` has one more than `counts`. The last bin has all above. */
export interface Histogram {
  readonly edges: readonly number[];
  readonly counts: readonly number[];
}

export interface JoinSummary {
  readonly clock_residual_micros: number;
  readonly collectives_matched: number;
  readonly last_arrivals: Readonly<Record<string, number>>;
  readonly verdict: string;
  readonly culprits: readonly number[];
  readonly reason: string;
  readonly confidence: string;
  readonly impact_ratio: number | null;
  readonly excesses: readonly RankExcess[];
}

/** Ranks in the order of pipeline, data and tensor coordinates; -1 where one is not known. `node` is an index into `nodes`. */
export interface Layout {
  readonly ranks: readonly number[];
  readonly pipeline: readonly number[];
  readonly data: readonly number[];
  readonly tensor: readonly number[];
  readonly node: readonly number[];
  readonly nodes: readonly string[];
  readonly axes: Readonly<Record<string, number>>;
}

/** A moment on a run's time axis. */
export interface Mark {
  readonly unix_seconds: number;
  readonly kind: string;
  readonly text: string;
  readonly verdict: string;
  readonly severity: string;
}

/** Operations, as columns. `row` is an index into the ranks of the picture, `operation` into its operations. Before `start_us` the rank has worked for `own_us`; until `arrived_us` it waits for the rank `awaited`, -1 for nobody. */
export interface PictureBars {
  readonly row: readonly number[];
  readonly operation: readonly number[];
  readonly own_us: readonly number[];
  readonly start_us: readonly number[];
  readonly arrived_us: readonly number[];
  readonly stop_us: readonly number[];
  readonly bytes: readonly number[];
  readonly awaited: readonly number[];
}

/** The late operation: a rank works from `start_us` to `stop_us`, where the operation starts that ends at `end_us`. `late_…` is all work on the path that exceeds that of the peers. */
export interface PictureFocus {
  readonly rank: number;
  readonly operation: string;
  readonly start_us: number;
  readonly stop_us: number;
  readonly end_us: number;
  readonly excess_us: number;
  readonly waiting: readonly number[];
  readonly late_start_us: readonly number[];
  readonly late_stop_us: readonly number[];
}

/** The critical path, as columns in the order of time: own work of a rank, or the transfer of an operation. `row` is -1 for a rank that is not drawn. */
export interface PicturePath {
  readonly row: readonly number[];
  readonly start_us: readonly number[];
  readonly stop_us: readonly number[];
  readonly is_own: readonly boolean[];
}

/** Ranks with the same stack. */
export interface Place {
  readonly ranks: string;
  readonly count: number;
  readonly place: string;
  readonly phase: string;
  readonly stack: readonly string[];
}

export interface Problem {
  readonly error: string;
  readonly next: string;
}

export interface RankDetail {
  readonly rank: number;
  readonly node: string;
  readonly pid: number;
  readonly step_seconds: number | null;
  readonly self_seconds: number | null;
  readonly wait_seconds: number | null;
  readonly input_seconds: number | null;
  readonly mfu_ratio: number | null;
  readonly cpu_ratio: number | null;
  readonly gpu_utilization_ratio: number | null;
  readonly range_seconds: Readonly<Record<string, number>>;
  readonly problems: readonly string[];
  readonly run: string;
  readonly pod: string;
  readonly gpu_model: string;
  readonly attempt: number;
  readonly coordinates: Readonly<Record<string, number>>;
  readonly window_end_unix_seconds: number;
  readonly steps: number | null;
  readonly wait_source: string;
  readonly seconds_since_step: number | null;
  readonly host_seconds: number | null;
  readonly run_ahead_seconds: number | null;
  readonly phase_seconds: Readonly<Record<string, number>>;
  readonly phase_shares: Readonly<Record<string, number>>;
  readonly gpu: Readonly<Record<string, number>>;
  readonly throttled_seconds: Readonly<Record<string, number>>;
  readonly memory: Readonly<Record<string, number>>;
  readonly process: Readonly<Record<string, number>>;
}

/** The self time of a rank less that of the median of the other recorded ranks: mean per step, with its interval. */
export interface RankExcess {
  readonly rank: number;
  readonly steps: number;
  readonly excess_seconds: number;
  readonly low_seconds: number;
  readonly high_seconds: number;
}

export interface RankHistory {
  readonly run: string;
  readonly rank: number;
  readonly latest: RankDetail | null;
  readonly history: TimeSeries;
}

export interface RankTraceSummary {
  readonly span_seconds: number;
  readonly compute_seconds: number;
  readonly communication_seconds: number;
  readonly exposed_communication_seconds: number;
  readonly memory_copy_seconds: number;
  readonly idle_seconds: number;
  readonly step_seconds: number | null;
  readonly overlap_ratio: number | null;
  readonly mfu_ratio: number | null;
  readonly collectives: Readonly<Record<string, number>>;
  readonly top_kernels: readonly string[];
  readonly findings: readonly string[];
  readonly advice: readonly string[];
  readonly each_step_seconds: readonly number[];
  readonly each_communication_seconds: readonly number[];
  readonly each_exposed_communication_seconds: readonly number[];
  readonly events: number;
  readonly rank: number;
}

/** `left` are the columns of words. */
export interface ReportTable {
  readonly title: string;
  readonly columns: readonly string[];
  readonly rows: readonly (readonly string[])[];
  readonly left: readonly string[];
  readonly said: readonly string[];
  readonly empty: string;
}

export interface RunDetail {
  readonly run: string;
  readonly namespace: string;
  readonly world_size: number;
  readonly ranks_seen: number;
  readonly step_seconds: number | null;
  readonly mfu_ratio: number | null;
  readonly exposed_communication_ratio: number | null;
  readonly verdict: VerdictAnswer;
  readonly evaluated_unix_seconds: number;
  readonly ended_unix_seconds: number | null;
  readonly restarts: number;
  readonly lost_today_gpu_seconds: number;
  readonly recent_step_seconds: readonly (number | null)[];
  readonly breakdown: BreakdownAnswer | null;
  readonly layout: Layout;
  readonly phase_seconds: Readonly<Record<string, readonly (number | null)[]>>;
  readonly step_histogram: Histogram | null;
  readonly pace: TimeSeries;
  readonly marks: readonly Mark[];
  readonly signals: readonly string[];
}

export interface RunSummary {
  readonly run: string;
  readonly namespace: string;
  readonly world_size: number;
  readonly ranks_seen: number;
  readonly step_seconds: number | null;
  readonly mfu_ratio: number | null;
  readonly exposed_communication_ratio: number | null;
  readonly verdict: VerdictAnswer;
  readonly evaluated_unix_seconds: number;
  readonly ended_unix_seconds: number | null;
  readonly restarts: number;
  readonly lost_today_gpu_seconds: number;
  readonly recent_step_seconds: readonly (number | null)[];
}

/** `version` grows with every change. An event that is not complete has the runs that changed. */
export interface RunsAnswer {
  readonly version: number;
  readonly is_complete: boolean;
  readonly runs: readonly RunSummary[];
  readonly left_out: number;
  readonly elsewhere: Readonly<Record<string, string>>;
}

export interface Series {
  readonly signal: string;
  readonly values: readonly (number | null)[];
  readonly cohort_median: readonly (number | null)[];
}

/** `promql` is the same from Prometheus: $run stands for the matchers of a run, $window for a duration. Empty where it has none. */
export interface Signal {
  readonly name: string;
  readonly scope: string;
  readonly unit: string;
  readonly promql: string;
  readonly definition: string;
}

export interface SignalsAnswer {
  readonly signals: readonly Signal[];
}

/** Ranks: all, 0,3-5, straggler, or straggler+peer. */
export interface StartCapture {
  readonly run: string;
  readonly steps: number | null;
  readonly seconds: number | null;
  readonly ranks: string;
  readonly options: CaptureOptions;
  readonly reason: string;
}

/** `picture` is null where the run is not judged by its critical path. */
export interface StepAnswer {
  readonly run: string;
  readonly picture: StepPictureAnswer | null;
}

export interface StepPartAnswer {
  readonly part: string;
  readonly text: string;
  readonly seconds: number;
  readonly ratio: number;
  readonly stage: number | null;
  readonly group_kind: string;
  readonly details: string;
}

/** Times are from the beginning of the step. */
export interface StepPictureAnswer {
  readonly step: number;
  readonly step_us: number;
  readonly sentence: string;
  readonly detail: string;
  readonly ranks: readonly number[];
  readonly stages: readonly number[];
  readonly operations: readonly string[];
  readonly bars: PictureBars;
  readonly path: PicturePath;
  readonly focus: PictureFocus | null;
  readonly note: string;
}

export interface StepTimes {
  readonly before_seconds: number | null;
  readonly during_seconds: number | null;
  readonly after_seconds: number | null;
}

/** Point n is the mean from start n to end n. Nothing is known before `begins_unix_seconds`; it is null where Prometheus is asked for the time before. `note` says why something is missing. */
export interface TimeSeries {
  readonly starts: readonly number[];
  readonly ends: readonly number[];
  readonly series: readonly Series[];
  readonly begins_unix_seconds: number | null;
  readonly note: string;
}

export interface TraceSummary {
  readonly span_seconds: number;
  readonly compute_seconds: number;
  readonly communication_seconds: number;
  readonly exposed_communication_seconds: number;
  readonly memory_copy_seconds: number;
  readonly idle_seconds: number;
  readonly step_seconds: number | null;
  readonly overlap_ratio: number | null;
  readonly mfu_ratio: number | null;
  readonly collectives: Readonly<Record<string, number>>;
  readonly top_kernels: readonly string[];
  readonly findings: readonly string[];
  readonly advice: readonly string[];
  readonly each_step_seconds: readonly number[];
  readonly each_communication_seconds: readonly number[];
  readonly each_exposed_communication_seconds: readonly number[];
  readonly events: number;
}

/** Transfers of a step in groups of one kind: the mean of their ranks. */
export interface TrafficAnswer {
  readonly group_kind: string;
  readonly groups: number;
  readonly min_ranks: number;
  readonly max_ranks: number;
  readonly bytes: number;
  readonly transfer_seconds: number;
  readonly bus_bytes_per_second: number | null;
}

export interface VerdictAnswer {
  readonly kind: string;
  readonly severity: string;
  readonly confidence: string;
  readonly headline: string;
  readonly reason: string;
  readonly evidence: string;
  readonly phase: string;
  readonly culprits: readonly number[];
  readonly stage: number | null;
  readonly impact_ratio: number | null;
  readonly lost_gpu_seconds: number | null;
  readonly since_unix_seconds: number;
}
