// Captures: all of them, or one with its ranks and what their traces say.
import { useState } from "preact/hooks";
import type { CaptureAnswer, CapturedRank, RankTraceSummary } from "./answers";
import { artifact, artifactAddress, cancelCapture, capture, captures, merged, mergedAddress } from "./api";
import { moment, quantity } from "./format";
import { address } from "./location";
import { Answer, Figures, Notice, StateBadge, useAnswer } from "./parts";
import { openInPerfetto, perfettoAddress, setPerfettoAddress } from "./perfetto";
import { PhaseBars } from "./phases";
import { CAPTURES_SECONDS, REFRESH_SECONDS } from "./run";

const RANKS_SHOWN = 64;

function List({ run }: { run: string }) {
  const found = useAnswer((signal) => captures(run, signal), CAPTURES_SECONDS, [run]);
  return (
    <>
      <h1>Captures{run !== "" && ` of ${run}`}</h1>
      <Answer of={found}>
        {(rows) =>
          rows.length === 0 ? (
            <Notice isCalm>
              No capture yet. Open a run and press “Capture…”, or use <code>rankscope capture --steps 3</code>. It records chosen ranks with torch's own profiler.
            </Notice>
          ) : (
            <section class="card scroll">
              <table class="cards">
                <thead>
                  <tr>
                    <th>State</th>
                    <th>Capture</th>
                    <th class="wide">Run</th>
                    <th class="number" title="Ranks that delivered, of those selected">Ranks</th>
                    <th class="number" title="When, by this browser's clock">Requested</th>
                  </tr>
                </thead>
                <tbody>
                  {rows.map((row) => (
                    <tr key={row.id}>
                      <td><StateBadge state={row.state} /></td>
                      <td class="whole">
                        <a class="run" href={address({ view: "captures", capture: row.id, run: row.run }, false)}>{row.id}</a>
                        <div class="faint">{[row.sentence, row.reason].filter((text) => text !== "").join(" · ")}</div>
                      </td>
                      <td class="wide"><a href={address({ run: row.run }, false)}>{row.run}</a></td>
                      <td class="number" data-title="Ranks" title="Ranks that delivered, of those selected">{row.ranks_delivered} of {row.ranks_selected}</td>
                      <td class="number" data-title="Requested">{moment(row.requested_unix_ms / 1000)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </section>
          )
        }
      </Answer>
    </>
  );
}

const isTrace = (rank: CapturedRank): boolean => rank.file?.endsWith(".json.gz") ?? false;

function InPerfetto({ title, load, onError }: { title: string; load: (signal: AbortSignal) => Promise<ArrayBuffer>; onError: (text: string) => void }) {
  const show = (): void => {
    onError("");
    openInPerfetto(title, () => load(new AbortController().signal)).catch((error: Error) => onError(error.message));
  };
  return <button onClick={show}>Open in Perfetto</button>;
}

function Files({ of, rank, onError }: { of: CaptureAnswer; rank: CapturedRank; onError: (text: string) => void }) {
  if (rank.state !== "analysed" || rank.file === null) return <span class="faint">{rank.progress}</span>;
  return (
    <span class="row">
      {[rank.file, ...rank.more_files].map((file, window) => (
        <a key={file} href={artifactAddress(of.id, rank.rank, window)} download>
          {window === 0 ? `Download ${quantity(rank.bytes, "bytes")}` : `window ${window + 1}`}
        </a>
      ))}
      {isTrace(rank) && <InPerfetto title={`${of.job}, rank ${rank.rank}`} load={(signal) => artifact(of.id, rank.rank, signal)} onError={onError} />}
    </span>
  );
}

function Ranks({ of }: { of: CaptureAnswer }) {
  const [error, setError] = useState("");
  const [perfetto, setPerfetto] = useState(perfettoAddress());
  const starts = of.ranks.flatMap((rank) => rank.start_unix_ms ?? []);
  const first = Math.min(...starts);
  const traces = of.ranks.filter((rank) => rank.state === "analysed" && isTrace(rank));
  return (
    <section class="card">
      <h2>Ranks</h2>
      {error !== "" && <Notice>{error}</Notice>}
      {traces.length > 1 && (
        <p class="row">
          All {traces.length} ranks in one trace:
          <a href={mergedAddress(of.id)} download title="Every rank keeps the clock of its machine">Download</a>
          <InPerfetto title={`${of.job}, all ranks`} load={(signal) => merged(of.id, signal)} onError={setError} />
        </p>
      )}
      <div class="scroll">
        <table class="cards">
          <thead>
            <tr>
              <th class="number" title="The number of the rank in its run">Rank</th>
              <th>State</th>
              <th class="wide" title="What recorded: libkineto in the process, the probe, or stack samples">By</th>
              <th class="number" title="Whole steps in the recording">Steps</th>
              <th class="number wide" title="After the first rank that began">Start</th>
              <th class="number wide" title="Step time before, during and after the capture">Step time</th>
              <th>Recording</th>
            </tr>
          </thead>
          <tbody>
            {of.ranks.slice(0, RANKS_SHOWN).map((rank) => (
              <tr key={rank.rank}>
                <td class="number" data-title="Rank"><a href={address({ run: of.job, rank: String(rank.rank) }, false)}>{rank.rank}</a></td>
                <td><StateBadge state={rank.state} /></td>
                <td class="wide" data-title="By">{rank.backend ?? "–"}</td>
                <td class="number" data-title="Steps">{rank.steps ?? "–"}</td>
                <td class="number wide" data-title="Start">{rank.start_unix_ms === null ? "–" : `+${rank.start_unix_ms - first} ms`}</td>
                <td class="number wide" data-title="Step">
                  {rank.step_times === null ? "–" : [rank.step_times.before_seconds, rank.step_times.during_seconds, rank.step_times.after_seconds].map((seconds) => quantity(seconds, "seconds")).join(" → ")}
                </td>
                <td><Files of={of} rank={rank} onError={setError} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {of.ranks.length > RANKS_SHOWN && <p class="faint">The first {RANKS_SHOWN} of {of.ranks.length} ranks. <code>rankscope captures show {of.id}</code> has all.</p>}
      {traces.length > 0 && (
        <details>
          <summary>Other ways to look at the recordings</summary>
          <p>
            “Open in Perfetto” opens <input type="url" aria-label="Address of Perfetto" value={perfetto} onChange={(event) => { setPerfettoAddress(event.currentTarget.value); setPerfetto(perfettoAddress()); }} /> and hands
            the trace over inside this browser. Without access to it, serve Perfetto yourself and put its address here, or download the file and open it with “Open trace file”.
          </p>
          <p>
            All ranks in one trace, with the clocks of their machines aligned: <code>rankscope captures get {of.id} --output traces</code>, then <code>rankscope analyze trace traces --merged all.json.gz</code>.
          </p>
        </details>
      )}
    </section>
  );
}

function partsOf(summary: RankTraceSummary): Record<string, number> {
  const [compute, communication, idle] = [summary.compute_seconds, summary.exposed_communication_seconds, summary.idle_seconds];
  const rest = summary.span_seconds - compute - communication - idle;
  return { compute, "exposed communication": communication, "exposed memory copy": rest > 1e-6 * summary.span_seconds ? rest : 0, idle };
}

function Counts({ of, label }: { of: readonly (readonly [name: string, count: number])[]; label: string }) {
  const most = Math.max(...of.map(([, count]) => count), 1);
  return (
    <div class="phases" role="img" aria-label={label}>
      {of.map(([name, count]) => (
        <div key={name}>
          <span>{name}</span>
          <span class="bar"><i style={{ width: `${(count / most) * 100}%`, background: "var(--accent)" }} /></span>
          <span class="faint" title={label}>{count}</span>
        </div>
      ))}
    </div>
  );
}

function Summary({ of }: { of: CaptureAnswer }) {
  const { join, ranks } = of.summary;
  if (ranks.length === 0 && join === null) return null;
  const arrivals = Object.entries(join?.last_arrivals ?? {}).sort(([, a], [, b]) => b - a).slice(0, RANKS_SHOWN);
  const kinds = new Map<string, number>();
  for (const one of ranks) for (const [kind, count] of Object.entries(one.collectives)) kinds.set(kind, Math.max(kinds.get(kind) ?? 0, count));
  const kernels = (ranks.find((one) => join?.culprits.includes(one.rank)) ?? ranks[0])?.top_kernels ?? [];
  return (
    <div class="grid pairs">
      {ranks.length > 0 && (
        <section class="card">
          <h2 title="The device's time, or the host's where there is no device">Where the recorded time goes, by rank</h2>
          <PhaseBars run={of.job} rows={ranks.slice(0, RANKS_SHOWN).map((one) => ({ rank: one.rank, label: `rank ${one.rank}`, phases: partsOf(one) }))} definition="The recorded time" />
          {ranks.slice(0, RANKS_SHOWN).map((one) => one.findings[0] !== undefined && <p key={one.rank} class="faint">Rank {one.rank}: {one.findings[0]}</p>)}
        </section>
      )}
      {arrivals.length > 0 && join !== null && (
        <section class="card">
          <h2 title="The rank that the others wait for">Who arrived last, in {join.collectives_matched} collectives</h2>
          <Counts of={arrivals.map(([rank, count]) => [`rank ${rank}`, count])} label="How often each rank arrived last" />
          {join.impact_ratio !== null && join.culprits.length > 0 && <p>If rank {join.culprits.join(", ")} were as fast as the others, {quantity(join.impact_ratio, "ratio")} of these steps would come back.</p>}
        </section>
      )}
      {kinds.size > 0 && (
        <section class="card">
          <h2>Collectives of a rank</h2>
          <Counts of={[...kinds].sort(([, a], [, b]) => b - a)} label="Collectives by kind" />
        </section>
      )}
      {kernels.length > 0 && (
        <section class="card">
          <h2>Longest kernels</h2>
          <ol class="plain">{kernels.slice(0, 8).map((kernel) => <li key={kernel} class="frame"><code>{kernel}</code></li>)}</ol>
        </section>
      )}
    </div>
  );
}

function One({ id }: { id: string }) {
  const found = useAnswer((signal) => capture(id, signal), REFRESH_SECONDS, [id], (known) => known.is_final);
  const [error, setError] = useState("");
  return (
    <>
      <h1>Capture {id}</h1>
      <Answer of={found}>
        {(known) => (
          <>
            {error !== "" && <Notice>{error}</Notice>}
            <section class={`card verdict ${known.state === "failed" ? "alarm" : known.state === "analysed" ? "good" : ""}`} aria-live="polite">
              <StateBadge state={known.state} />
              <div>
                <p>{known.summary.sentence}</p>
                {known.summary.findings.filter((finding) => !known.summary.sentence.includes(finding)).map((finding) => <p key={finding} class="evidence">{finding}</p>)}
                {known.notes.map((note) => <p key={note} class="evidence">{note}</p>)}
                <Figures
                  of={[
                    { name: "Run", definition: "The run whose ranks are recorded", value: known.job },
                    { name: "Requested", definition: "When, by this browser's clock", value: moment(known.requested_unix_ms / 1000) },
                    { name: "By", definition: "Who asked, as the server knows it", value: known.requested_by || "–" },
                    { name: "Because", definition: "The reason that was given", value: known.reason || "–" },
                  ]}
                />
              </div>
              {!known.is_final && <button onClick={() => void cancelCapture(id).catch((failure: Error) => setError(failure.message))}>Cancel</button>}
            </section>
            <Summary of={known} />
            <Ranks of={known} />
          </>
        )}
      </Answer>
    </>
  );
}

export function CapturesPage({ run, id }: { run: string; id: string }) {
  return id === "" ? <List run={run} /> : <One id={id} />;
}
