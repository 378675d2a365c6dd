// Questions to the server. What it answers is described in answers.ts.
import { signal } from "@preact/signals";
import type {
  CaptureAnswer,
  CaptureCost,
  CaptureRow,
  CapturesAnswer,
  ExcessAnswer,
  FleetReportAnswer,
  HangReport,
  HangRow,
  HangsAnswer,
  HeatmapHeader,
  Problem,
  RankHistory,
  RunDetail,
  Signal,
  SignalsAnswer,
  StartCapture,
  StepAnswer,
  StepPictureAnswer,
} from "./answers";
import { fetchAsCaller } from "./login";
import type { Matrix } from "./matrix";

type Parameters = Readonly<Record<string, string | number>>;

/** What was shown is not there any longer, or another replica has it by now. */
export class GoneError extends Error {}

/** Where a page or a file of the server is. */
export function addressOf(path: string, parameters: Parameters): string {
  const text = new URLSearchParams(Object.entries(parameters).map(([name, value]) => [name, String(value)])).toString();
  return `./api/v1/${path}${text === "" ? "" : `?${text}`}`;
}

export const isOfApi = (link: HTMLAnchorElement): boolean => link.href.startsWith(new URL("./api/v1/", window.location.href).href);

/** Services that the server does not have (501), with the reason: each is asked for once. */
const unserved = signal<Readonly<Record<string, string>>>({});
/** The same of "captures/cost" and "capture". */
const serviceOf = (path: string): string => path.replace(/s?(\/.*)?$/, "");

export const isServed = (path: string): boolean => unserved.value[serviceOf(path)] === undefined;

async function ask(path: string, parameters: Parameters, stop: AbortSignal): Promise<Response> {
  const absent = unserved.peek()[serviceOf(path)];
  if (absent !== undefined) throw new Error(absent);
  const response = await fetchAsCaller(addressOf(path, parameters), { signal: stop });
  return answerOf(response).catch((error: Error) => {
    if (response.status === 501) unserved.value = { ...unserved.peek(), [serviceOf(path)]: error.message };
    throw error;
  });
}

async function order(path: string, body: unknown): Promise<Response> {
  return answerOf(await fetchAsCaller(addressOf(path, {}), { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }));
}

async function answerOf(response: Response): Promise<Response> {
  if (response.ok) return response;
  const told = (await response.json().catch(() => null)) as Problem | null;
  const text = told === null ? `The server answers ${response.status} ${response.statusText}.` : `${told.error}: ${told.next}`;
  throw response.status === 404 || response.status === 503 ? new GoneError(text) : new Error(text);
}

export async function runDetail(run: string, since: number, signal: AbortSignal): Promise<RunDetail> {
  return (await ask("run", { run, since: -since }, signal)).json() as Promise<RunDetail>;
}

export async function rankHistory(run: string, rank: number, since: number, signal: AbortSignal): Promise<RankHistory> {
  return (await ask("rank", { run, rank, since: -since }, signal)).json() as Promise<RankHistory>;
}

export async function signalsOfRanks(signal: AbortSignal): Promise<readonly Signal[]> {
  const answer = (await (await ask("signals", {}, signal)).json()) as SignalsAnswer;
  return answer.signals.filter((one) => one.scope === "rank");
}

export async function heatmap(run: string, name: string, since: number, columns: number, signal: AbortSignal): Promise<Matrix> {
  const bytes = await (await ask("heatmap", { run, signal: name, since: -since, columns }, signal)).arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length))) as HeatmapHeader;
  return { ranks: header.ranks, times: header.ends, unit: header.unit, medians: header.medians, note: header.note, values: new Float32Array(bytes, 4 + length) };
}

/** Null where the run is not judged by its critical path. */
export async function stepPicture(run: string, signal: AbortSignal): Promise<StepPictureAnswer | null> {
  return ((await (await ask("step", { run }, signal)).json()) as StepAnswer).picture;
}

export async function captures(run: string, signal: AbortSignal): Promise<readonly CaptureRow[]> {
  return ((await (await ask("captures", { run }, signal)).json()) as CapturesAnswer).captures;
}

export async function capture(id: string, signal: AbortSignal): Promise<CaptureAnswer> {
  return (await ask("capture", { id }, signal)).json() as Promise<CaptureAnswer>;
}

/** Empty: as many steps as tell a slow rank from the others. */
export type Length = { readonly steps?: number; readonly seconds?: number };

export async function captureCost(run: string, length: Length, signal: AbortSignal): Promise<CaptureCost> {
  return (await ask("captures/cost", { run, ...length }, signal)).json() as Promise<CaptureCost>;
}

type Started = Partial<Omit<StartCapture, "options">> & { readonly run: string; readonly options: Partial<StartCapture["options"]> };

export async function startCapture(wanted: Started): Promise<CaptureAnswer> {
  return (await order("captures", wanted)).json() as Promise<CaptureAnswer>;
}

export async function cancelCapture(id: string): Promise<CaptureAnswer> {
  return (await order("capture/cancel", { id })).json() as Promise<CaptureAnswer>;
}

export const artifactAddress = (id: string, rank: number, window: number): string => addressOf("capture/artifact", { id, rank, window });

export async function artifact(id: string, rank: number, signal: AbortSignal): Promise<ArrayBuffer> {
  return (await ask("capture/artifact", { id, rank }, signal)).arrayBuffer();
}

export const mergedAddress = (id: string): string => addressOf("capture/merged", { id });

export async function merged(id: string, signal: AbortSignal): Promise<ArrayBuffer> {
  return (await ask("capture/merged", { id }, signal)).arrayBuffer();
}

export async function excess(run: string, rank: number, signal: AbortSignal): Promise<ExcessAnswer> {
  return (await ask("excess", { run, rank }, signal)).json() as Promise<ExcessAnswer>;
}

export async function hangs(run: string, signal: AbortSignal): Promise<readonly HangRow[]> {
  return ((await (await ask("hangs", { run }, signal)).json()) as HangsAnswer).hangs;
}

export async function hang(id: string, signal: AbortSignal): Promise<HangReport> {
  return (await ask("hang", { id }, signal)).json() as Promise<HangReport>;
}

export async function report(since: string, signal: AbortSignal): Promise<FleetReportAnswer> {
  return (await ask("report", { since }, signal)).json() as Promise<FleetReportAnswer>;
}
