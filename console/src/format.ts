// Numbers as people read them: three digits, a unit, and a dash where nothing was measured.

const DASH = "–";

function digits(value: number): string {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

function scaled(value: number, steps: readonly (readonly [number, string])[]): string {
  const [least, last] = [steps[0], steps[steps.length - 1]];
  const fitting = steps.find(([size]) => Math.abs(value) >= size) ?? (value === 0 ? least : last);
  return fitting === undefined ? digits(value) : `${digits(value / fitting[0])} ${fitting[1]}`;
}

const DURATIONS = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]] as const;
const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]] as const;
const RATES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]] as const;

export function quantity(value: number | null | undefined, unit: string): string {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  switch (unit) {
    case "seconds":
    case "seconds/step":
      return value === 0 ? "0 s" : scaled(value, DURATIONS);
    case "ratio":
      return `${(value * 100).toFixed(Math.abs(value) >= 0.9995 ? 0 : 1)} %`;
    case "bytes":
      return scaled(value, SIZES);
    case "hertz":
      return `${scaled(value, RATES)}Hz`;
    case "watts":
      return `${digits(value)} W`;
    case "celsius":
      return `${digits(value)} °C`;
    case "GPU seconds":
      return value === 0 ? "0 GPU-h" : `${digits(value / 3600)} GPU-h`;
    default:
      return `${digits(value)} ${unit}`.trim();
  }
}

export function clock(unixSeconds: number): string {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}

/** With the day, if it is not today. */
export function moment(unixSeconds: number): string {
  const then = new Date(unixSeconds * 1000);
  const isToday = then.toDateString() === new Date().toDateString();
  return isToday ? clock(unixSeconds) : `${then.toLocaleDateString([], { month: "short", day: "numeric" })} ${clock(unixSeconds)}`;
}

/** As in "self time" for self_seconds. */
export function titleOf(signal: string): string {
  const words = signal.replace(/_(seconds|ratio|bytes|hertz|watts|celsius)$/, "").replaceAll("_", " ");
  const time = signal.endsWith("_seconds") ? `${words} time` : words;
  return time.replace(/^gpu\b/, "GPU").replace(/^cpu\b/, "CPU").replace(/^mfu\b/, "MFU").replace(/\bsm\b/, "SM").replace("run ahead time", "host run-ahead").replace(/^./, (first) => first.toUpperCase());
}
