// One run: its verdict, its ranks over time, and where the time of a step goes.
import { useMemo } from "preact/hooks";
import type { CaptureRow, Mark, RunDetail, Signal } from "./answers";
import { captures, heatmap, runDetail, signalsOfRanks, stepPicture } from "./api";
import { CaptureHeading } from "./capture_form";
import { Chart } from "./chart";
import { moment, quantity, titleOf } from "./format";
import { HeatMap } from "./heatmap";
import { address, go, parameter } from "./location";
import type { Scale } from "./matrix";
import { COHORT } from "./palette";
import { Answer, Figures, type Loaded, Note, Notice, shownSeconds, TimeRange, useAnswer, VerdictCard } from "./parts";
import { PhaseBars, type PhaseRow } from "./phases";
import { StepPicture } from "./step";
import { StepParts } from "./step_parts";

const COLUMNS = 450;
const BARS_SHOWN = 64;
export const REFRESH_SECONDS = 2;
export const CAPTURES_SECONDS = 5;

interface Moment extends Pick<Mark, "unix_seconds" | "text"> {
  href?: string;
}

interface HeatProps {
  run: string;
  details: Loaded<RunDetail>;
  table: Loaded<readonly Signal[]>;
  moments: readonly Moment[];
}

function Heat({ run, details, table, moments }: HeatProps) {
  const about = details.state === "ready" ? details.value : null;
  const known = table.state === "ready" ? table.value.filter((one) => about?.signals.includes(one.name)) : [];
  const chosen = known.find((one) => one.name === parameter("signal")) ?? known[0];
  const scale: Scale = parameter("scale") === "absolute" ? "absolute" : "relative";
  // Asked for together with the run, before its signals are known.
  const [name, since] = [chosen?.name ?? parameter("signal", "self_seconds"), shownSeconds()];
  const matrix = useAnswer((signal) => heatmap(run, name, since, COLUMNS, signal), REFRESH_SECONDS, [run, name, since]);
  const stages = useMemo(() => new Map(about?.layout.ranks.map((rank, at) => [rank, about.layout.pipeline[at] ?? -1])), [about]);
  const marks = useMemo(() => moments.map((one) => ({ at: one.unix_seconds, text: one.text })), [moments]);
  if (about === null || table.state !== "ready") return null;
  if (chosen === undefined) return <Notice>No figure of any rank is known yet. The first appears after two windows, about four seconds.</Notice>;
  return (
    <section class="card">
      <div class="row">
        <h2>Ranks over time</h2>
        <select aria-label="Signal" value={name} onChange={(event) => go({ signal: event.currentTarget.value }, { replace: true })}>
          {known.map((one) => <option key={one.name} value={one.name}>{titleOf(one.name)}</option>)}
        </select>
        <button aria-pressed={scale === "relative"} title="Colours show the ratio to the median of all ranks at the same time" onClick={() => go({ scale: scale === "relative" ? "absolute" : null }, { replace: true })}>
          against the median
        </button>
        <TimeRange begins={about.pace.begins_unix_seconds} />
      </div>
      <p class="faint">{chosen.definition}{about.layout.axes.pipeline !== undefined && " Ranks are in the order of pipeline stage, data and tensor coordinate."}</p>
      <Answer of={matrix}>
        {(value) => (
          <>
            <HeatMap matrix={value} stages={stages} scale={scale} name={titleOf(name)} marks={marks} onOpen={(rank) => go({ rank: String(rank) })} />
            <Note text={value.note} />
          </>
        )}
      </Answer>
    </section>
  );
}

/** Nothing where the run is not judged by its critical path. */
function Step({ run }: { run: string }) {
  const answer = useAnswer((signal) => stepPicture(run, signal), REFRESH_SECONDS, [run]);
  if (answer.state !== "ready" || answer.value === null) return null;
  return (
    <section class="card">
      <StepPicture key={run} run={run} picture={answer.value} onOpen={(rank) => go({ rank: String(rank) })} />
    </section>
  );
}

function Histogram({ of }: { of: RunDetail["step_histogram"] }) {
  if (of === null) return <p class="faint">No step has ended yet.</p>;
  const most = Math.max(...of.counts, 1);
  return (
    <>
      <div class="bars" role="img" aria-label="Distribution of step times">
        {of.counts.map((count, at) => (
          <i key={at} title={`${quantity(of.edges[at], "seconds")} to ${quantity(of.edges[at + 1], "seconds")}: ${count}`} style={{ height: `${(count / most) * 100}%` }} />
        ))}
      </div>
      <div class="ends faint">
        <span>{quantity(of.edges[0], "seconds")}</span>
        <span>{quantity(of.edges[of.edges.length - 1], "seconds")}</span>
      </div>
    </>
  );
}

/** The ranks with the most work in phases, in the order of ranks. */
function phaseRows(details: RunDetail): PhaseRow[] {
  const phases = Object.entries(details.phase_seconds);
  const work = details.layout.ranks.map((_, at) => phases.reduce((sum, [name, values]) => (name === "wait_seconds" ? sum : sum + (values[at] ?? 0)), 0));
  const longest = work.map((_, at) => at).sort((a, b) => (work[b] ?? 0) - (work[a] ?? 0)).slice(0, BARS_SHOWN);
  const rows = longest.map((at) => ({
    rank: details.layout.ranks[at] ?? 0,
    label: `rank ${details.layout.ranks[at] ?? 0}`,
    phases: Object.fromEntries(phases.map(([name, values]) => [name.replace("_seconds", ""), values[at] ?? 0])),
  }));
  return rows.sort((a, b) => a.rank - b.rank);
}

/** Verdicts, restarts and captures, the latest first. */
function momentsOf(run: string, marks: readonly Mark[], taken: readonly CaptureRow[]): readonly Moment[] {
  const moments = taken.map((row) => ({
    unix_seconds: row.requested_unix_ms / 1000,
    text: `capture of ranks ${row.ranks}: ${row.state}`,
    href: address({ view: "captures", capture: row.id, run }, false),
  }));
  return [...marks, ...moments].sort((a, b) => b.unix_seconds - a.unix_seconds);
}

export function RunPage({ run }: { run: string }) {
  const taken = useAnswer((signal) => captures(run, signal), CAPTURES_SECONDS, [run]);
  const since = shownSeconds();
  const details = useAnswer((signal) => runDetail(run, since, signal), REFRESH_SECONDS, [run], undefined, [since]);
  const table = useAnswer(signalsOfRanks, 3600, []);
  const moments = momentsOf(run, details.state === "ready" ? details.value.marks : [], taken.state === "ready" ? taken.value : []);
  return (
    <>
      <CaptureHeading run={run}>{run}</CaptureHeading>
      <Answer of={details}>
        {(known) => (
          <>
            {known.ended_unix_seconds !== null && <Notice>This run does not report since {moment(known.ended_unix_seconds)}. What is shown is the last that is known of it.</Notice>}
            <VerdictCard verdict={known.verdict} />
            <section class="card">
              <Figures
                of={[
                  { name: "Step", definition: "Step time, median of the ranks", value: quantity(known.step_seconds, "seconds") },
                  { name: "MFU", definition: "Model FLOPs utilisation: the share of the devices' peak that the model's arithmetic uses", value: quantity(known.mfu_ratio, "ratio") },
                  { name: "Exposed communication", definition: "Share of the step spent waiting on others, mean of the ranks", value: quantity(known.exposed_communication_ratio, "ratio") },
                  { name: "Ranks", definition: "Ranks that report, of all ranks of the run", value: `${known.ranks_seen} of ${known.world_size}` },
                  { name: "Lost today", definition: "What findings have cost since midnight UTC", value: quantity(known.lost_today_gpu_seconds, "GPU seconds") },
                  { name: "Restarts", definition: "How often all processes of the run were replaced", value: String(known.restarts) },
                ]}
              />
            </section>
          </>
        )}
      </Answer>
      <Step run={run} />
      <Heat run={run} details={details} table={table} moments={moments} />
      {details.state === "ready" && details.value.breakdown !== null && <StepParts of={details.value.breakdown} />}
      {details.state === "ready" && <Breakdown run={run} known={details.value} moments={moments} />}
    </>
  );
}

/** Where the time goes, and what happened. */
function Breakdown({ run, known, moments }: { run: string; known: RunDetail; moments: readonly Moment[] }) {
  return (
    <div class="grid">
      <section class="card">
        <h2>Time of a step, by rank</h2>
        <PhaseBars run={run} rows={phaseRows(known)} definition="Self time by phase, and waiting for others, per step" />
        {known.layout.ranks.length > BARS_SHOWN && <p class="faint">The {BARS_SHOWN} of {known.layout.ranks.length} ranks with the most work in these phases.</p>}
      </section>
      <section class="card">
        <Chart title="Step time" definition="Step time, median of the ranks. Lines are verdicts, captures and restarts" unit="seconds" times={known.pace.ends} lines={[{ name: "step", colour: COHORT, values: known.pace.series[0]?.values ?? [] }]} marks={moments.map((one) => one.unix_seconds)} />
        <Note text={known.pace.note} />
        <h3 title="How often a step took that long on a rank, in the latest two minutes">Distribution of step times, all ranks</h3>
        <Histogram of={known.step_histogram} />
      </section>
      <section class="card">
        <h2>History</h2>
        <ul class="timeline">
          {moments.map((one) => (
            <li key={`${one.unix_seconds} ${one.text}`}>
              <time class="faint">{moment(one.unix_seconds)}</time>
              {one.href === undefined ? <span>{one.text}</span> : <a href={one.href}>{one.text}</a>}
            </li>
          ))}
        </ul>
      </section>
    </div>
  );
}
