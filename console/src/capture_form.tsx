// Starts a capture: which ranks, how long, what else, and what that costs.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { RunSummary } from "./answers";
import { captureCost, isServed, startCapture, type Length } from "./api";
import { live } from "./live";
import { go } from "./location";
import { Answer, Notice, useAnswer } from "./parts";

const OPTIONS: readonly (readonly [name: "stacks" | "shapes" | "memory" | "flops" | "modules", definition: string])[] = [
  ["stacks", "Python stacks of every operator. The most expensive option"],
  ["shapes", "Shapes of the inputs of every operator"],
  ["memory", "Allocations of device memory"],
  ["flops", "Arithmetic of matrix products and convolutions"],
  ["modules", "The module that each operator belongs to"],
];

const ALL = "all";
const ALL_UP_TO_RANKS = 8;

/** All ranks of a small run. Of a larger one the rank of the page, or the slow one and a healthy one beside it. */
function ranksToCapture({ world_size, verdict }: RunSummary, rank: number | undefined): string {
  if (world_size <= ALL_UP_TO_RANKS) return ALL;
  if (rank !== undefined) return String(rank);
  return verdict.culprits.length > 0 ? "straggler+peer" : "0,1";
}

function Cost({ run, length }: { run: string; length: Length }) {
  const cost = useAnswer((signal) => captureCost(run, length, signal), 3600, [run, JSON.stringify(length)]);
  return (
    <Answer of={cost}>
      {(known) => <ul class="plain" aria-label="What it costs">{known.sentences.map((sentence) => <li key={sentence}>{sentence}</li>)}</ul>}
    </Answer>
  );
}

function Form({ run, ranks, onClose }: { run: string; ranks: string; onClose: () => void }) {
  const [wanted, setRanks] = useState(ranks);
  const [unit, setUnit] = useState<"enough steps" | "steps" | "seconds">("enough steps");
  const [amount, setAmount] = useState(12);
  const [chosen, setChosen] = useState<Readonly<Record<string, boolean>>>({});
  const [reason, setReason] = useState("");
  const [state, setState] = useState<{ busy: boolean; error: string }>({ busy: false, error: "" });
  const length: Length = unit === "enough steps" ? {} : unit === "steps" ? { steps: amount } : { seconds: amount };

  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    setState({ busy: true, error: "" });
    try {
      const started = await startCapture({ run, ranks: wanted, ...length, options: chosen, reason });
      go({ view: "captures", capture: started.id, run }, { keep: false });
    } catch (error) {
      setState({ busy: false, error: (error as Error).message });
    }
  }

  return (
    <form class="card capture" onSubmit={(event) => void submit(event)} aria-label={`Capture ranks of ${run}`}>
      <div class="row">
        <label title="all, numbers and ranges as in 0,3-5, straggler (the ranks that the verdict names), or straggler+peer">
          Ranks <input name="ranks" list="ranks" value={wanted} required onInput={(event) => setRanks(event.currentTarget.value)} />
        </label>
        <datalist id="ranks">
          {[ALL, "straggler", "straggler+peer"].map((text) => <option key={text} value={text} />)}
        </datalist>
        <label>
          for {unit !== "enough steps" && <input name="amount" type="number" min={unit === "steps" ? 1 : 0.05} max={unit === "steps" ? 100 : 60} step={unit === "steps" ? 1 : "any"} required value={amount} onInput={(event) => setAmount(event.currentTarget.valueAsNumber || 1)} />}
        </label>
        <select aria-label="Unit" value={unit} onChange={(event) => setUnit(event.currentTarget.value as typeof unit)}>
          <option title="As many as tell a slow rank from the others">enough steps</option>
          <option>steps</option>
          <option>seconds</option>
        </select>
        <label class="grow">
          because <input name="reason" placeholder="kept with the capture" value={reason} onInput={(event) => setReason(event.currentTarget.value)} />
        </label>
      </div>
      <div class="row" role="group" aria-label="What else to record">
        {OPTIONS.map(([name, definition]) => (
          <label key={name} title={definition}>
            <input type="checkbox" name={name} checked={chosen[name] ?? false} onChange={(event) => setChosen({ ...chosen, [name]: event.currentTarget.checked })} /> {name}
          </label>
        ))}
      </div>
      <Cost run={run} length={length} />
      {wanted.trim() !== ALL && <p>These ranks are compared with each other. Who arrives last in the collectives of the whole run shows if <button type="button" onClick={() => setRanks(ALL)}>all</button> are recorded.</p>}
      {state.error !== "" && <Notice>{state.error}</Notice>}
      <div class="row">
        <button class="main" type="submit" disabled={state.busy}>{state.busy ? "Starting…" : "Start the capture"}</button>
        <button type="button" onClick={onClose}>Not now</button>
      </div>
    </form>
  );
}

/** The heading of a page, with a button that opens the form. A run that has ended has no button. */
export function CaptureHeading({ run, rank, children }: { run: string; rank?: number; children: ComponentChildren }) {
  const [isOpen, setOpen] = useState(false);
  const found = live.runs.value?.find((one) => one.run === run && one.ended_unix_seconds === null);
  const known = isServed("captures") ? found : undefined;
  return (
    <>
      <div class="row heading">
        <h1>{children}</h1>
        {known !== undefined && !isOpen && <button onClick={() => setOpen(true)} title="Record some ranks with torch's own profiler, all at the same moment">Capture…</button>}
      </div>
      {known !== undefined && isOpen && <Form run={run} ranks={ranksToCapture(known, rank)} onClose={() => setOpen(false)} />}
    </>
  );
}
