// All runs: what each is doing, what is wrong with it, and what that costs.
import type { RunSummary } from "./answers";
import { Sparkline } from "./chart";
import { quantity } from "./format";
import { live } from "./live";
import { address, go, parameter } from "./location";
import { Badge, Loading, Notice } from "./parts";

interface Column {
  key: string;
  title: string;
  definition: string;
  order: (run: RunSummary) => number | string;
  show?: (run: RunSummary) => string;
  wide?: boolean;
}

const SEVERITIES = ["none", "warning", "alarm"];
const worst = (value: number | null): number => value ?? -Infinity;

const COLUMNS: readonly Column[] = [
  { key: "verdict", title: "Verdict", definition: "What is wrong with the run, worst first", order: (run) => SEVERITIES.indexOf(run.verdict.severity) * 1e6 + worst(run.verdict.impact_ratio ?? 0) },
  { key: "run", title: "Run", definition: "The name that metrics and alerts use", order: (run) => run.run },
  { key: "ranks", title: "Ranks", definition: "Ranks that report, of all ranks of the run", order: (run) => run.world_size, show: (run) => (run.ranks_seen === run.world_size ? `${run.world_size}` : `${run.ranks_seen} of ${run.world_size}`) },
  { key: "step", title: "Step", definition: "Step time, median of the ranks", order: (run) => worst(run.step_seconds), show: (run) => quantity(run.step_seconds, "seconds") },
  { key: "mfu", title: "MFU", definition: "Model FLOPs utilisation, median of the ranks: the share of the devices' peak that the model's arithmetic uses", order: (run) => worst(run.mfu_ratio), show: (run) => quantity(run.mfu_ratio, "ratio"), wide: true },
  { key: "exposed", title: "Exposed comm.", definition: "Share of the step spent waiting on others, mean of the ranks", order: (run) => worst(run.exposed_communication_ratio), show: (run) => quantity(run.exposed_communication_ratio, "ratio"), wide: true },
  { key: "lost", title: "Lost today", definition: "GPU-hours that findings have cost since midnight UTC", order: (run) => run.lost_today_gpu_seconds, show: (run) => quantity(run.lost_today_gpu_seconds, "GPU seconds") },
];

export function Fleet() {
  const [sort, filter] = [parameter("sort", "verdict"), parameter("filter")];
  const column = COLUMNS.find((one) => sort.replace("-", "") === one.key) ?? COLUMNS[0]!;
  const words = filter.toLowerCase().split(/\s+/);
  const runs = (live.runs.value ?? [])
    .filter((run) => words.every((word) => `${run.run} ${run.verdict.kind} ${run.verdict.headline}`.toLowerCase().includes(word)))
    .sort((a, b) => {
      const [left, right] = [column.order(a), column.order(b)];
      const order = typeof left === "string" ? left.localeCompare(String(right)) : Number(right) - Number(left);
      return (sort.startsWith("-") ? -order : order) || a.run.localeCompare(b.run);
    });
  if (live.runs.value === null) return <Loading />;
  if (live.runs.value.length === 0) {
    return (
      <Notice isCalm>
        No training job is seen on the nodes that report here. Start one with <code>rankscope run -- torchrun …</code>, or see{" "}
        <code>rankscope doctor</code> for why a running job is not found.
      </Notice>
    );
  }
  return (
    <>
      <div class="row">
        <h1>Runs</h1>
        <input
          type="search"
          value={filter}
          placeholder="Filter by name or verdict"
          aria-label="Filter runs by name or verdict"
          data-key="/"
          onInput={(event) => go({ filter: event.currentTarget.value }, { replace: true })}
        />
        <span class="faint" title="Runs that match the filter, of all runs">{runs.length} of {live.runs.value.length}</span>
      </div>
      <section class="card scroll">
        <table class="cards">
          <thead>
            <tr>
              {COLUMNS.map((one) => (
                <th key={one.key} class={`${one.show ? "number" : ""} ${one.wide ? "wide" : ""}`} aria-sort={one === column ? (sort.startsWith("-") ? "ascending" : "descending") : "none"}>
                  <button title={one.definition} onClick={() => go({ sort: sort === one.key ? `-${one.key}` : one.key }, { replace: true })}>
                    {one.title}
                    {one === column ? (sort.startsWith("-") ? " ↑" : " ↓") : ""}
                  </button>
                </th>
              ))}
              <th class="wide" title="Step time of the last 15 minutes, median of the ranks">Step time</th>
            </tr>
          </thead>
          <tbody>
            {runs.map((run) => (
              <tr key={run.run}>
                <td><Badge verdict={run.verdict} /></td>
                <td class="whole">
                  <a class="run" href={address({ run: run.run }, false)}>{run.run}</a>
                  {run.verdict.headline !== run.verdict.kind && <div class="faint">{run.verdict.headline}</div>}
                </td>
                {COLUMNS.filter((one) => one.show).map((one) => (
                  <td key={one.key} class={`number ${one.wide ? "wide" : ""}`} data-title={one.title}>{one.show?.(run)}</td>
                ))}
                <td class="wide"><Sparkline values={run.recent_step_seconds} label={`step time of ${run.run}`} /></td>
              </tr>
            ))}
          </tbody>
        </table>
        {runs.length === 0 && <p class="faint">No run matches “{filter}”.</p>}
      </section>
    </>
  );
}
