// Small parts that several pages use.
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";
import { GoneError } from "./api";
import { clock, quantity } from "./format";
import { go, parameter } from "./location";
import type { VerdictAnswer } from "./answers";

const SEVERITY: Readonly<Record<string, readonly [style: string, mark: string]>> = {
  alarm: ["alarm", "▲"],
  warning: ["warning", "●"],
  none: ["good", "✓"],
};

export function styleOf(verdict: VerdictAnswer): readonly [style: string, mark: string] {
  return verdict.kind === "insufficient_data" ? ["none", "…"] : (SEVERITY[verdict.severity] ?? ["none", "?"]);
}

export function Badge({ verdict }: { verdict: VerdictAnswer }) {
  const [style, mark] = styleOf(verdict);
  return (
    <span class={`badge ${style}`}>
      {mark} {verdict.kind.replaceAll("_", " ")}
    </span>
  );
}

const STATES: Readonly<Record<string, readonly [style: string, mark: string]>> = {
  analysed: ["good", "✓"],
  failed: ["alarm", "▲"],
  cancelled: ["none", "×"],
};

/** The state of a capture, or of a rank in it. */
export function StateBadge({ state }: { state: string }) {
  const [style, mark] = STATES[state] ?? ["warning", "…"];
  return (
    <span class={`badge ${style}`}>
      {mark} {state}
    </span>
  );
}

export function VerdictCard({ verdict }: { verdict: VerdictAnswer }) {
  const [style] = styleOf(verdict);
  return (
    <section class={`card verdict ${style}`} aria-live="polite">
      <Badge verdict={verdict} />
      <div>
        <p>{verdict.headline}</p>
        {!verdict.headline.includes(verdict.evidence) && <p class="evidence">{verdict.evidence}</p>}
        <span class="faint">
          since {clock(verdict.since_unix_seconds)}
          {verdict.confidence === "low" && " · from stacks alone"}
          {verdict.impact_ratio !== null && <span title="Share of the run's time that this finding costs"> · {quantity(verdict.impact_ratio, "ratio")} of the step time</span>}
          {verdict.lost_gpu_seconds !== null && <span title="What this finding has cost: its impact times ranks and time"> · {quantity(verdict.lost_gpu_seconds, "GPU seconds")} lost</span>}
        </span>
      </div>
    </section>
  );
}

export interface FigureOf {
  name: string;
  definition: string;
  value: string;
}

export function Figures({ of }: { of: readonly FigureOf[] }) {
  return (
    <dl class="figures">
      {of.map(({ name, definition, value }) => (
        <div key={name}>
          <dt title={definition}>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** What is wrong, or, if it is calm, what to do where there is nothing yet. */
export function Notice({ children, isCalm }: { children: ComponentChildren; isCalm?: boolean }) {
  return (
    <section class={`card notice ${isCalm ? "calm" : ""}`} role="status">
      {children}
    </section>
  );
}

const RANGES: readonly (readonly [seconds: number, text: string])[] = [[300, "5 min"], [900, "15 min"], [3600, "1 h"], [21_600, "6 h"], [86_400, "24 h"], [604_800, "7 d"]];
const ALWAYS_OFFERED = 3;

export const shownSeconds = (): number => Number(parameter("since", "900")) || 900;

/** The time to show. A longer one is offered if it would show more: memory begins before the next shorter one, or Prometheus is asked (`begins` is null). */
export function TimeRange({ begins }: { begins: number | null }) {
  const [chosen, age] = [shownSeconds(), begins === null ? Infinity : Date.now() / 1000 - begins];
  const offered = RANGES.filter(([seconds], at) => at < ALWAYS_OFFERED || seconds === chosen || age > (RANGES[at - 1]?.[0] ?? 0));
  return (
    <span class="row" role="group" aria-label="Time shown">
      {offered.map(([seconds, text]) => (
        <button key={seconds} aria-pressed={chosen === seconds} onClick={() => go({ since: String(seconds) }, { replace: true })}>{text}</button>
      ))}
    </span>
  );
}

/** Why something is missing; nothing if nothing is. */
export function Note({ text }: { text: string }) {
  return text === "" ? null : <p class="faint" role="status">{text}</p>;
}

/** With its `code` as code. */
export function Sentence({ text }: { text: string }) {
  return <>{text.split("`").map((part, at) => (at % 2 ? <code key={at}>{part}</code> : part))}</>;
}

export function Loading() {
  return <p class="loading faint" role="status">Loading…</p>;
}

export type Loaded<T> = { state: "loading" } | { state: "failed"; reason: string } | { state: "ready"; value: T };

/** Asks again when `keys` or `details` change and every `seconds`; the last answer stays while the next one is under way, and while there is
 * none, unless the keys have changed. An answer that `isFinal` is the last. */
export function useAnswer<T>(ask: (signal: AbortSignal) => Promise<T>, seconds: number, keys: readonly unknown[], isFinal: (value: T) => boolean = () => false, details: readonly unknown[] = []): Loaded<T> {
  const [answer, setAnswer] = useState<Loaded<T>>({ state: "loading" });
  const key = JSON.stringify(keys); // by value: NaN differs from itself
  // Before the page is painted: the answer is what takes long.
  useLayoutEffect(() => setAnswer({ state: "loading" }), [key]);
  useLayoutEffect(() => {
    const stop = new AbortController();
    let timer = 0;
    const turn = async (): Promise<void> => {
      try {
        const value = await ask(stop.signal);
        if (!stop.signal.aborted) setAnswer({ state: "ready", value });
        if (isFinal(value)) return;
      } catch (error) {
        if (!stop.signal.aborted) setAnswer((before) => (before.state === "ready" && !(error instanceof GoneError) ? before : { state: "failed", reason: String((error as Error).message) }));
      }
      if (!stop.signal.aborted) timer = window.setTimeout(turn, (document.hidden ? 5 : 1) * seconds * 1000);
    };
    void turn();
    return () => {
      stop.abort();
      window.clearTimeout(timer);
    };
  }, [key, JSON.stringify(details)]);
  return answer;
}

export function Answer<T>({ of, children }: { of: Loaded<T>; children: (value: T) => ComponentChildren }) {
  if (of.state === "loading") return <Loading />;
  if (of.state === "failed") return <Notice><Sentence text={of.reason} /></Notice>;
  return <>{children(of.value)}</>;
}
