import { render } from "preact";
import { useEffect } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { isOfApi, isServed } from "./api";
import { CapturesPage } from "./captures";
import { Fleet } from "./fleet";
import { HangsPage } from "./hangs";
import { connect, live } from "./live";
import { address, go, parameter, view } from "./location";
import { hasToken, Login, login, openAsCaller } from "./login";
import { Notice } from "./parts";
import { RankPage } from "./rank";
import { ReportPage } from "./report";
import { RunPage } from "./run";

const THEMES = ["system", "light", "dark"] as const;

const KEYS = [["/", "filter"], ["g", "runs"], ["c", "captures"], ["h", "hangs"], ["f", "report"], ["r", "run"]] as const;

function theme(): (typeof THEMES)[number] {
  const kept = window.localStorage.getItem("theme");
  return THEMES.find((name) => name === kept) ?? "system";
}

function setTheme(name: (typeof THEMES)[number]): void {
  window.localStorage.setItem("theme", name);
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

/** Links inside the page change the address without loading the page again. Files and pages of the API need the token. */
function follow(event: MouseEvent): void {
  const link = (event.target as Element).closest("a");
  if (link !== null && isOfApi(link) && hasToken()) {
    event.preventDefault();
    openAsCaller(link.href, "_blank");
    return;
  }
  if (!link || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || link.origin !== window.location.origin || link.hasAttribute("download") || link.target) return;
  if (link.pathname !== window.location.pathname) return;
  event.preventDefault();
  go(Object.fromEntries(new URLSearchParams(link.search)), { keep: false });
}

function onKey(event: KeyboardEvent): void {
  const typing = (event.target as Element).matches("input, select, textarea");
  if (event.key === "Escape" && typing) (event.target as HTMLElement).blur();
  if (typing || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === "/") {
    document.querySelector<HTMLElement>('[data-key="/"]')?.focus();
    event.preventDefault();
  } else if (event.key === "g") go({}, { keep: false });
  else if (event.key === "c") go({ view: "captures" }, { keep: false });
  else if (event.key === "h") go({ view: "hangs" }, { keep: false });
  else if (event.key === "f") go({ view: "report" }, { keep: false });
  else if (event.key === "r" && parameter("rank") !== "") go({ rank: null });
}

function Elsewhere({ runs }: { runs: Readonly<Record<string, string>> }) {
  const replicas = [...new Set(Object.values(runs))].filter((name) => name !== "");
  if (Object.keys(runs).length === 0) return null;
  return (
    <Notice>
      Another replica of the operator correlates {Object.keys(runs).join(", ")}. Load the page again to reach it
      {replicas.map((name) => <>, or <code>kubectl port-forward pod/{name} 9469</code></>)}.
    </Notice>
  );
}

function Console() {
  useEffect(() => {
    setTheme(theme());
    void connect();
    document.addEventListener("click", follow);
    document.addEventListener("keydown", onKey);
  }, []);
  const [run, rank] = [parameter("run"), parameter("rank")];
  document.title = run === "" ? "Rankscope" : `${run}${rank === "" ? "" : `, rank ${rank}`} · Rankscope`;
  return (
    <>
      <header>
        <a class="name" href="./">Rankscope</a>
        <nav aria-label="Pages">
          <a href="./" aria-current={view.value === "fleet" ? "page" : undefined}>Runs</a>
          {isServed("captures") && <a href={address({ view: "captures" }, false)} aria-current={view.value === "captures" ? "page" : undefined}>Captures</a>}
          {isServed("hangs") && <a href={address({ view: "hangs" }, false)} aria-current={view.value === "hangs" ? "page" : undefined}>Hangs</a>}
          {isServed("report") && <a href={address({ view: "report" }, false)} aria-current={view.value === "report" ? "page" : undefined}>Report</a>}
          {run !== "" && <a href={address({ run }, false)} aria-current={view.value === "run" ? "page" : undefined}>{run}</a>}
          {rank !== "" && <a href={address({ run, rank }, false)} aria-current="page">rank {rank}</a>}
        </nav>
        <span class="faint hints" aria-hidden="true">{KEYS.map(([key, does]) => <span key={key}><kbd>{key}</kbd> {does}</span>)}</span>
        <select aria-label="Colours" value={theme()} onChange={(event) => setTheme(event.currentTarget.value as (typeof THEMES)[number])}>
          {THEMES.map((name) => <option key={name} value={name}>◐ {name}</option>)}
        </select>
      </header>
      <main>
        {!live.isConnected.value && login.refusal.value === null && <Notice>The server does not answer; what is shown may be old. Trying again every few seconds. If it was stopped, start <code>rankscope up</code> again.</Notice>}
        <Elsewhere runs={live.elsewhere.value} />
        {login.refusal.value !== null ? <Login refused={login.refusal.value} /> : view.value === "hangs" ? <HangsPage run={run} id={parameter("hang")} /> : view.value === "report" ? <ReportPage /> : view.value === "captures" ? <CapturesPage run={run} id={parameter("capture")} /> : view.value === "rank" ? <RankPage run={run} rank={Number(rank)} /> : view.value === "run" ? <RunPage run={run} /> : <Fleet />}
      </main>
    </>
  );
}

render(<Console />, document.getElementById("console")!);
