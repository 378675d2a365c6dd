// What is shown is in the address, so that a link shows the same to another person.
import { computed, signal } from "@preact/signals";

export type View = "fleet" | "run" | "rank" | "captures" | "hangs" | "report";

const query = signal(new URLSearchParams(window.location.search));

window.addEventListener("popstate", () => {
  query.value = new URLSearchParams(window.location.search);
});

export function address(changes: Readonly<Record<string, string | null>>, keep = true): string {
  const next = new URLSearchParams(keep ? query.value : undefined);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") next.delete(name);
    else next.set(name, value);
  }
  const text = next.toString();
  return text === "" ? "./" : `./?${text}`;
}

/** Changes the address. What a person types is replaced in place, so that "back" goes to the page before. */
export function go(changes: Readonly<Record<string, string | null>>, options: { keep?: boolean; replace?: boolean } = {}): void {
  const next = address(changes, options.keep ?? true);
  window.history[options.replace ? "replaceState" : "pushState"](null, "", next);
  query.value = new URLSearchParams(window.location.search);
}

export const parameter = (name: string, otherwise = ""): string => query.value.get(name) ?? otherwise;

export const view = computed<View>(() => {
  const named = query.value.get("view");
  if (named === "captures" || named === "hangs" || named === "report") return named;
  if (!query.value.has("run")) return "fleet";
  return query.value.has("rank") ? "rank" : "run";
});
