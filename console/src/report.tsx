// Where the GPU-hours of all runs went. Texts and tables are the server's: the terminal has the same.
import type { FleetReportAnswer, ReportTable } from "./answers";
import { report } from "./api";
import { moment } from "./format";
import { go, parameter } from "./location";
import { Answer, Loading, Notice, Sentence, useAnswer } from "./parts";

const PERIODS = [["24h", "24 h"], ["7d", "7 d"], ["30d", "30 d"]] as const;
const REFRESH_SECONDS = 2;

function ReportCard({ table, definitions }: { table: ReportTable; definitions: Readonly<Record<string, string>> }) {
  const isNumber = (column: string): boolean => !table.left.includes(column);
  return (
    <section class="card scroll" tabIndex={0} aria-label={table.title}>
      <h2>{table.title}</h2>
      {table.rows.length === 0 ? (
        <p class="faint">{table.empty}</p>
      ) : (
        <table>
          <thead>
            <tr>
              {table.columns.map((column) => (
                column === "" ? <td key={column} /> : <th key={column} class={isNumber(column) ? "number" : ""} title={definitions[column]}>{column}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {table.rows.map((row, at) => (
              <tr key={at}>
                {row.map((cell, number) => <td key={number} class={isNumber(table.columns[number] ?? "") ? "number" : ""}>{cell}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {table.rows.length > 0 && table.said.map((sentence) => <p key={sentence} class="faint">{sentence}</p>)}
    </section>
  );
}

function Made({ of }: { of: FleetReportAnswer }) {
  if (of.making !== "") {
    return (
      <>
        <Notice isCalm>The report is {of.making}.</Notice>
        <Loading />
      </>
    );
  }
  return (
    <>
      <section class="card">
        <p>{of.headline}.</p>
        <span class="faint">{of.span} · made {moment(of.made_unix_seconds)}</span>
      </section>
      {of.notes.length > 0 && <Notice>{of.notes.map((note) => <p key={note}><Sentence text={note} /></p>)}</Notice>}
      {of.tables.map((table) => <ReportCard key={table.title} table={table} definitions={of.definitions} />)}
    </>
  );
}

export function ReportPage() {
  const since = parameter("since", "7d");
  const found = useAnswer((signal) => report(since, signal), REFRESH_SECONDS, [since], (answer) => answer.making === "");
  return (
    <>
      <div class="row">
        <h1>Report</h1>
        <span class="row" role="group" aria-label="Time of the report">
          {PERIODS.map(([name, text]) => (
            <button key={name} aria-pressed={since === name} onClick={() => go({ since: name }, { replace: true })}>{text}</button>
          ))}
        </span>
      </div>
      <Answer of={found}>{(answer) => <Made of={answer} />}</Answer>
    </>
  );
}
