// The caller's token, for servers that want one. It is kept by the browser until the tab is closed.
import { signal } from "@preact/signals";
import { useState } from "preact/hooks";
import type { Problem } from "./answers";

const KEY = "token";
const TRIES = 6;
const refusal = signal<Problem | null>(null);

/** What the server said, while it does not know the caller. */
export const login = { refusal };

export const pause = (milliseconds: number): Promise<void> => new Promise((done) => window.setTimeout(done, milliseconds));

/** fetch, with the token. */
export async function fetchAsCaller(address: string, init: RequestInit = {}): Promise<Response> {
  for (let tries = 1; ; tries += 1) {
    const token = window.sessionStorage.getItem(KEY);
    const headers = new Headers(init.headers);
    if (token !== null) headers.set("Authorization", `Bearer ${token}`);
    const response = await fetch(address, { ...init, headers });
    if (response.status === 401) {
      const unknown = { error: "The server does not know you.", next: "log in" };
      const said = (await response.clone().json().catch(() => unknown)) as Problem;
      // An answer to a token that has been replaced, perhaps while it was read, says nothing.
      if (token === window.sessionStorage.getItem(KEY)) refusal.value = said;
    }
    // Another replica may have the run: the server has closed the connection, and the next may reach that one.
    if (response.status !== 503 || init.method !== undefined || tries === TRIES) return response;
    await pause(250);
  }
}

export const hasToken = (): boolean => window.sessionStorage.getItem(KEY) !== null;

/** Opens a download or a page. The browser sends no header of ours with it, so the token goes in a form, which the server takes like a GET. */
export function openAsCaller(address: string, target: string): void {
  const field = Object.assign(document.createElement("input"), { type: "hidden", name: "token", value: window.sessionStorage.getItem(KEY) ?? "" });
  const form = Object.assign(document.createElement("form"), { action: address, method: "post", target, rel: "noopener" });
  form.append(field);
  document.body.append(form);
  form.submit();
  form.remove();
}

export function loggedIn(): Promise<void> {
  return new Promise((done) => {
    const stop = refusal.subscribe((value) => {
      if (value === null) queueMicrotask(() => (stop(), done()));
    });
  });
}

export function Login({ refused }: { refused: Problem }) {
  const [token, setToken] = useState("");
  const hadToken = hasToken();
  function submit(event: Event): void {
    event.preventDefault();
    window.sessionStorage.setItem(KEY, token.trim());
    refusal.value = null;
  }
  return (
    <form class="card" onSubmit={submit} aria-labelledby="login">
      <h2 id="login">Log in</h2>
      {hadToken && <p role="alert">{refused.error}</p>}
      <p>
        This console is for callers with a token. Make one with <code>kubectl create token ACCOUNT -n NAMESPACE --audience rankscope</code>. You see the runs of the namespaces in which its account may list training runs.
      </p>
      <p>
        <label>
          Token <input type="password" autocomplete="off" spellcheck={false} required value={token} onInput={(event) => setToken(event.currentTarget.value)} />
        </label>{" "}
        <button class="main" disabled={token.trim() === ""}>Log in</button>
      </p>
      <p class="faint">The browser keeps it until you close this tab.</p>
    </form>
  );
}
