// The runs as the server sends them: one message after each evaluation. Not by EventSource, which cannot show a token.
import { signal } from "@preact/signals";
import type { RunsAnswer, RunSummary } from "./answers";
import { fetchAsCaller, loggedIn, login, pause } from "./login";

const runs = signal<readonly RunSummary[] | null>(null);
const elsewhere = signal<Readonly<Record<string, string>>>({});
const isConnected = signal(true);
const STANDBYS = 6;
let standbys = 0;

export const live = { runs, elsewhere, isConnected };

/** Connects again after a failure, and when the caller has logged in. A hidden page, or one that was left and may be
 * returned to, holds no connection: a browser has six for a server. */
export async function connect(): Promise<never> {
  for (;;) {
    if (document.hidden) await new Promise((shown) => document.addEventListener("visibilitychange", shown, { once: true }));
    const left = new AbortController();
    const leave = (): void => left.abort();
    document.addEventListener("visibilitychange", leave, { once: true });
    await listen(left.signal).catch(() => undefined);
    document.removeEventListener("visibilitychange", leave);
    if (left.signal.aborted) continue;
    if (login.refusal.value !== null) await loggedIn();
    else if (standsBy()) await pause(250);
    else {
      isConnected.value = false;
      await pause(3000);
    }
  }
}

/** A replica that stands by has nothing to show; the next connection may reach the other one. */
const standsBy = (): boolean => runs.value?.length === 0 && Object.keys(elsewhere.value).length > 0 && standbys < STANDBYS;

async function listen(signal: AbortSignal): Promise<void> {
  const response = await fetchAsCaller("./api/v1/events", { signal });
  if (response.status === 401) return void (runs.value = null);
  if (!response.ok || response.body === null) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const messages = (text + value).split("\n\n");
    text = messages.pop() ?? "";
    for (const message of messages) {
      const data = message.split("\n").find((line) => line.startsWith("data: "));
      if (data !== undefined) take(JSON.parse(data.slice("data: ".length)) as RunsAnswer);
    }
    if (standsBy()) return reader.cancel();
  }
}

function take(answer: RunsAnswer): void {
  const known = new Map(answer.is_complete ? [] : (runs.value ?? []).map((run) => [run.run, run]));
  for (const run of answer.runs) known.set(run.run, run);
  runs.value = [...known.values()];
  elsewhere.value = answer.elsewhere;
  isConnected.value = true;
  standbys = known.size > 0 ? 0 : standbys + 1;
}
