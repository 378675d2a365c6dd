// The heat map's numbers: ranks by times, as the server sends them, and their colours.
import { COLOURS, LEVELS } from "./palette";

export interface Matrix {
  ranks: readonly number[];
  /** The end of each column, in seconds since 1970. */
  times: readonly number[];
  unit: string;
  /** Why something is missing. */
  note: string;
  /** Of all ranks, by time. */
  medians: readonly (number | null)[];
  /** By rank, then by time; NaN where nothing was measured. */
  values: Float32Array;
}

export interface Range {
  low: number;
  high: number;
}

/** Absolute: the value. Relative: its ratio to the median of all ranks at that time, which shows the odd rank. */
export type Scale = "absolute" | "relative";

const SAMPLED = 20_000;

export function relative(matrix: Matrix): Float32Array {
  const { values } = matrix;
  const columns = matrix.times.length;
  const medians = Float32Array.from(matrix.medians, (middle) => (middle !== null && middle > 0 ? middle : NaN));
  const found = new Float32Array(values.length);
  for (let at = 0, time = 0; at < values.length; at++, time = time + 1 === columns ? 0 : time + 1) found[at] = (values[at] ?? NaN) / (medians[time] ?? NaN);
  return found;
}

/** From a low to a high value that single outliers do not move. */
export function rangeOf(values: Float32Array, scale: Scale): Range {
  const step = Math.max(1, Math.floor(values.length / SAMPLED));
  const seen = new Float32Array(Math.ceil(values.length / step)).map((_, at) => values[at * step] ?? NaN).filter((value) => !Number.isNaN(value));
  if (seen.length === 0) return { low: 0, high: 1 };
  seen.sort();
  const at = (share: number): number => seen[Math.min(seen.length - 1, Math.floor(share * seen.length))] ?? 0;
  if (scale === "relative") return { low: Math.min(0.9, at(0.01)), high: Math.max(1.25, at(0.999)) };
  const [low, high] = [Math.min(0, at(0)), at(0.999)];
  return { low, high: high > low ? high : low + 1 };
}

/** One pixel per value, of `rows` rows from `first`; in a row of many ranks the highest counts, so that one slow rank of
 * thousands is still a line. */
export function pixels(values: Float32Array, columns: number, first: number, last: number, rows: number, range: Range, empty: number): Uint32Array {
  const out = new Uint32Array(rows * columns).fill(empty);
  const factor = (LEVELS - 1) / (range.high - range.low);
  for (let y = 0; y < rows; y++) {
    const from = first + Math.floor((y * (last - first)) / rows);
    const to = Math.max(from + 1, first + Math.floor(((y + 1) * (last - first)) / rows));
    for (let x = 0; x < columns; x++) {
      let most = NaN;
      for (let row = from; row < to; row++) {
        const value = values[row * columns + x] ?? NaN;
        if (!(value <= most) && !Number.isNaN(value)) most = value;
      }
      if (!Number.isNaN(most)) {
        const level = Math.min(LEVELS - 1, Math.max(0, Math.round((most - range.low) * factor)));
        out[y * columns + x] = COLOURS[level] ?? empty;
      }
    }
  }
  return out;
}
