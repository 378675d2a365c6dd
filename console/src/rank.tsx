// One rank beside its cohort.
import type { RankDetail } from "./answers";
import { rankHistory, signalsOfRanks } from "./api";
import { CaptureHeading } from "./capture_form";
import { Chart } from "./chart";
import { Frames } from "./frames";
import { quantity, titleOf } from "./format";
import { COHORT, RANK } from "./palette";
import { Answer, Figures, Note, Notice, shownSeconds, TimeRange, useAnswer, type FigureOf } from "./parts";
import { PhaseBars } from "./phases";
import { REFRESH_SECONDS } from "./run";

const MAX_RANGES = 8;

function figures(of: RankDetail): FigureOf[] {
  const throttled = Object.entries(of.throttled_seconds).filter(([, seconds]) => seconds > 0);
  const ranges = Object.entries(of.range_seconds);
  return [
    { name: "Step", definition: "Median step time of the window", value: quantity(of.step_seconds, "seconds") },
    { name: "Self time", definition: "Step time less waiting on others. Compare ranks by this one", value: quantity(of.self_seconds, "seconds") },
    { name: "Wait", definition: "Time in which the rank waits for others", value: quantity(of.wait_seconds, "seconds") },
    { name: "Host", definition: "What a step takes on the host, where step time is the device's", value: quantity(of.host_seconds, "seconds") },
    { name: "Run-ahead", definition: "The furthest the host is ahead of the device within a step", value: quantity(of.run_ahead_seconds, "seconds") },
    { name: "MFU", definition: "Model FLOPs utilisation", value: quantity(of.mfu_ratio, "ratio") },
    { name: "CPU", definition: "CPU time of the process by time: 200 % is two cores", value: quantity(of.cpu_ratio, "ratio") },
    { name: "GPU", definition: "Time with any kernel running on the rank's GPU", value: quantity(of.gpu_utilization_ratio, "ratio") },
    { name: "Throttled", definition: "Why the GPU's clock was held back in the window", value: throttled.map(([reason]) => reason.replaceAll("_", " ")).join(", ") || "–" },
    { name: "Memory", definition: "Device memory that torch's allocator has handed out", value: quantity(of.memory.allocated_bytes, "bytes") },
    ...(ranges.length > 0 ? [{ name: "NVTX ranges", definition: "Host time of a step by the program's own ranges, less that of ranges inside them", value: ranges.slice(0, MAX_RANGES).map(([name, seconds]) => `${name} ${quantity(seconds, "seconds")}`).join(", ") }] : []),
    { name: "Wait measured by", definition: "Where the time of communication comes from", value: of.wait_source || "–" },
  ];
}

function whereabouts(of: RankDetail): string {
  const place = [`node ${of.node}`, of.pod && `pod ${of.pod}`, `process ${of.pid}`, of.gpu_model];
  return [...place, ...Object.entries(of.coordinates).map(([axis, at]) => `${axis} ${at}`)].filter((part) => part !== "").join(" · ");
}

/** The latest value that is known. */
function last(values: readonly (number | null)[]): number {
  return values.findLast((value) => value !== null) ?? 0;
}

const PHASES = ["input", "forward", "backward", "optimizer", "checkpoint", "other", "wait"];

export function RankPage({ run, rank }: { run: string; rank: number }) {
  const since = shownSeconds();
  const details = useAnswer((signal) => rankHistory(run, rank, since, signal), REFRESH_SECONDS, [run, rank], undefined, [since]);
  const table = useAnswer(signalsOfRanks, 3600, []);
  return (
    <>
      <CaptureHeading run={run} rank={rank}>Rank {rank} of {run}</CaptureHeading>
      <Answer of={details}>
        {({ latest, history }) => {
          const phases = PHASES.map((name) => [name, history.series.find((one) => one.signal === `${name}_seconds`)] as const);
          const bar = (take: (one: (typeof history.series)[number]) => readonly (number | null)[]): Record<string, number> =>
            Object.fromEntries(phases.map(([name, one]) => [name, one === undefined ? 0 : last(take(one))]));
          return (
            <>
              {latest === null ? (
                <Notice>This rank does not report now. What is shown is its history.</Notice>
              ) : (
                <section class="card">
                  <p class="faint">{whereabouts(latest)}</p>
                  <Figures of={figures(latest)} />
                  {latest.problems.map((problem) => <p key={problem} class="faint">{problem}</p>)}
                </section>
              )}
              <section class="card">
                <h2>Time of a step</h2>
                <PhaseBars run={run} rows={[{ label: `rank ${rank}`, phases: bar((one) => one.values) }, { label: "cohort", phases: bar((one) => one.cohort_median) }]} definition="Self time by phase, and waiting for others, per step; of the cohort the median" />
              </section>
              <Frames run={run} rank={rank} />
              <div class="row">
                <h2>Over time</h2>
                <TimeRange begins={history.begins_unix_seconds} />
              </div>
              <Note text={history.note} />
              <div class="grid">
                {history.series.map((one) => {
                  const about = table.state === "ready" ? table.value.find((signal) => signal.name === one.signal) : undefined;
                  return (
                    <section class="card" key={one.signal} title={about?.definition}>
                      <Chart
                        title={titleOf(one.signal)}
                        unit={about?.unit ?? ""}
                        times={history.ends}
                        lines={[
                          { name: `rank ${rank}`, colour: RANK, values: one.values },
                          { name: "median of its cohort", colour: COHORT, values: one.cohort_median, dashed: true },
                        ]}
                      />
                    </section>
                  );
                })}
              </div>
            </>
          );
        }}
      </Answer>
    </>
  );
}
