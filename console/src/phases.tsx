// Where the time of a step goes, as a bar per rank.
import { PHASES } from "./palette";
import { quantity } from "./format";
import { address } from "./location";

type Shares = Readonly<Record<string, number>>;

const NAMES = Object.keys(PHASES);

function sum(phases: Shares): number {
  return Object.values(phases).reduce((total, seconds) => total + seconds, 0);
}

function Bar({ phases, longest }: { phases: Shares; longest: number }) {
  return (
    <span class="bar">
      {NAMES.filter((name) => (phases[name] ?? 0) > 0).map((name) => (
        <i key={name} title={`${name}: ${quantity(phases[name], "seconds")}`} style={{ width: `${((phases[name] ?? 0) / longest) * 100}%`, background: PHASES[name] ?? "" }} />
      ))}
    </span>
  );
}

export function PhaseKeys({ of }: { of: readonly Shares[] }) {
  return (
    <div class="keys">
      {NAMES.filter((name) => of.some((phases) => (phases[name] ?? 0) > 0)).map((name) => (
        <span key={name}>
          <i style={{ background: PHASES[name] ?? "" }} />
          {name}
        </span>
      ))}
    </div>
  );
}

export interface PhaseRow {
  label: string;
  phases: Shares;
  rank?: number;
}

/** `definition` is that of a whole bar. */
export function PhaseBars({ run, rows, definition }: { run: string; rows: readonly PhaseRow[]; definition: string }) {
  const longest = Math.max(...rows.map((row) => sum(row.phases)), 1e-9);
  return (
    <>
      <div class="phases">
        {rows.map((row) => (
          <a key={row.label} href={row.rank === undefined ? undefined : address({ run, rank: String(row.rank) }, false)}>
            <span>{row.label}</span>
            <Bar phases={row.phases} longest={longest} />
            <span class="faint" title={definition}>{quantity(sum(row.phases), "seconds")}</span>
          </a>
        ))}
      </div>
      <PhaseKeys of={rows.map((row) => row.phases)} />
    </>
  );
}
