// Hands a trace to Perfetto's page, which reads it in the browser: nothing is uploaded.

const KEY = "perfetto";
const DEFAULT = "https://ui.perfetto.dev";
const PATIENCE_SECONDS = 60;

export function perfettoAddress(): string {
  return window.localStorage.getItem(KEY) ?? DEFAULT;
}

export function setPerfettoAddress(text: string): void {
  if (text === "" || text === DEFAULT) window.localStorage.removeItem(KEY);
  else window.localStorage.setItem(KEY, text);
}

/** Opens the page at once, while the click allows it, and sends the trace when both are there. */
export async function openInPerfetto(title: string, load: () => Promise<ArrayBuffer>): Promise<void> {
  const page = new URL(perfettoAddress());
  if (page.protocol !== "https:" && page.protocol !== "http:") throw new Error(`${page.href} is no address of Perfetto: set one that begins with https://`);
  const opened = window.open(page.href);
  if (opened === null) throw new Error("The browser blocked the new tab: allow it for this page, or download the file and open it in Perfetto.");
  const [buffer] = await Promise.all([load(), isReady(opened, page.origin)]);
  opened.postMessage({ perfetto: { buffer, title } }, page.origin, [buffer]);
}

/** Perfetto answers "PONG" to "PING" once it can take a trace. */
function isReady(opened: Window, origin: string): Promise<void> {
  return new Promise((resolve, reject) => {
    const end = (settle: () => void): void => {
      window.clearInterval(timer);
      window.removeEventListener("message", onMessage);
      settle();
    };
    const onMessage = (event: MessageEvent): void => {
      if (event.source === opened && event.origin === origin && event.data === "PONG") end(resolve);
    };
    const began = Date.now();
    const timer = window.setInterval(() => {
      if (opened.closed) end(() => reject(new Error("Perfetto's tab was closed.")));
      else if (Date.now() - began > PATIENCE_SECONDS * 1000) end(() => reject(new Error(`${origin} does not answer: check the address, or download the file and open it there.`)));
      else opened.postMessage("PING", origin);
    }, 100);
    window.addEventListener("message", onMessage);
  });
}
