// Reports of hangs: all of them, or one with the places of its ranks and the table of collectives.
import type { HangReport } from "./answers";
import { hang, hangs } from "./api";
import { moment, quantity } from "./format";
import { address } from "./location";
import { Answer, Notice, useAnswer } from "./parts";

const REFRESH_SECONDS = 5;

function duration(began: number, until: number, ended: number | null): string {
  return `${ended === null ? "over " : ""}${quantity(until - began, "seconds")}`;
}

function List({ run }: { run: string }) {
  const found = useAnswer((signal) => hangs(run, signal), REFRESH_SECONDS, [run]);
  return (
    <>
      <h1>Hangs{run !== "" && ` of ${run}`}</h1>
      <Answer of={found}>
        {(rows) =>
          rows.length === 0 ? (
            <Notice isCalm>No run has hung. When one does, the stacks of all its ranks are read at once, and the report is kept here.</Notice>
          ) : (
            <section class="card scroll">
              <table class="cards">
                <thead>
                  <tr>
                    <th>Run</th>
                    <th>What hangs</th>
                    <th class="number" title="From the last step to the next one, to the end of the job, or to now">Lasted</th>
                    <th class="number" title="When a rank last ended a step, by this browser's clock">Last step</th>
                  </tr>
                </thead>
                <tbody>
                  {rows.map((row) => (
                    <tr key={row.id}>
                      <td><a class="run" href={address({ view: "hangs", hang: row.id, run: row.run }, false)}>{row.run}</a></td>
                      <td class="whole">{row.headline}</td>
                      <td class="number" data-title="Lasted">{duration(row.began_unix_seconds, row.until_unix_seconds, row.ended_unix_seconds)}</td>
                      <td class="number" data-title="Last step">{moment(row.began_unix_seconds)}</td>
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

function Places({ of }: { of: HangReport }) {
  return (
    <section class="card">
      <h2>Where the ranks are, the odd ones first</h2>
      {of.places.map((place) => (
        <details key={place.ranks + place.place} open={place === of.places[0]}>
          <summary>
            <b>{place.count === 1 ? `rank ${place.ranks}` : `${place.count} ranks`}</b> in <code>{place.place}</code>
            <span class="faint"> · {place.phase}{place.count > 1 && ` · ranks ${place.ranks}`}</span>
          </summary>
          <pre>{place.stack.join("\n")}</pre>
        </details>
      ))}
      {of.places.length === 0 && <p class="faint">No stack could be read; the reasons are below.</p>}
    </section>
  );
}

function Collectives({ of }: { of: HangReport }) {
  if (of.collectives.length === 0) return <Notice>No flight recorder could be read, so only stacks say where ranks are. docs/analyze-flight-recorder.md has what a job needs for it.</Notice>;
  return (
    <section class="card scroll">
      <h2>Collectives</h2>
      <table>
        <thead>
          <tr><th>Collective</th><th>Ranks</th><th>Finding</th><th>Detail</th></tr>
        </thead>
        <tbody>
          {of.collectives.map((row) => (
            <tr key={row.collective + row.ranks + row.finding}>
              <td>{row.collective}</td>
              <td>{row.ranks}</td>
              <td>{row.finding}</td>
              <td>{row.detail}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

function lasted(of: HangReport): string {
  const until = of.ended_unix_seconds ?? of.seen_unix_seconds ?? of.made_unix_seconds;
  return duration(of.began_unix_seconds, until, of.ended_unix_seconds ?? null);
}

function Report({ id }: { id: string }) {
  const found = useAnswer((signal) => hang(id, signal), REFRESH_SECONDS, [id]);
  return (
    <Answer of={found}>
      {(report) => (
        <>
          <h1>Hang of {report.run}</h1>
          <section class="card verdict alarm">
            <div>
              <p>{report.headline}</p>
              <p class="evidence">{report.verdict}</p>
              <span class="faint">
                {report.world_size} ranks · last step {moment(report.began_unix_seconds)} · lasted {lasted(report)}
                {report.left !== "" && ` · ended processes: ranks ${report.left}`}
              </span>
            </div>
          </section>
          <Places of={report} />
          <Collectives of={report} />
          {report.gaps.length + report.problems.length > 0 && (
            <section class="card">
              <h2>What could not be read</h2>
              <ul>
                {report.gaps.map((gap) => <li key={gap.ranks + gap.what}>{gap.what} of ranks {gap.ranks}: {gap.reason}</li>)}
                {report.problems.map((problem) => <li key={problem}>{problem}</li>)}
              </ul>
            </section>
          )}
          <p class="faint">In a terminal: <code>rankscope hangs {report.id}</code></p>
        </>
      )}
    </Answer>
  );
}

export function HangsPage({ run, id }: { run: string; id: string }) {
  return id === "" ? <List run={run} /> : <Report id={id} />;
}
