// Ranks by time on a canvas. Pixels are made once per answer; moving the pointer only copies them.
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { useCanvasSize } from "./canvas";
import { moment, quantity } from "./format";
import { pixels, rangeOf, relative, type Matrix, type Scale } from "./matrix";
import { css } from "./palette";

interface Cell {
  row: number;
  column: number;
}

interface Props {
  matrix: Matrix;
  /** The pipeline stage of each rank, -1 where it is not known. */
  stages: ReadonlyMap<number, number>;
  scale: Scale;
  name: string;
  /** Moments that are drawn as lines: a verdict, a capture, a restart. */
  marks: readonly { at: number; text: string }[];
  onOpen: (rank: number) => void;
}

const LEAST_ROWS = 8;
const TIMES_SHOWN = 5;

interface Band {
  stage: number;
  ranks: number[];
}

/** Neighbouring ranks of one stage. */
function bandsOf(ranks: readonly number[], stages: ReadonlyMap<number, number>): readonly Band[] {
  const bands: Band[] = [];
  for (const rank of ranks) {
    const stage = stages.get(rank) ?? -1;
    if (bands.at(-1)?.stage === stage) bands.at(-1)!.ranks.push(rank);
    else bands.push({ stage, ranks: [rank] });
  }
  return bands;
}

export function HeatMap({ matrix, stages, scale, name, marks, onOpen }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const size = useCanvasSize(canvas);
  const [cell, setCell] = useState<Cell | null>(null);
  const [rows, setRows] = useState<readonly [number, number] | null>(null);
  const drag = useRef<number | null>(null);
  const [first, last] = rows === null ? [0, matrix.ranks.length] : [Math.min(rows[0], matrix.ranks.length - 1), Math.min(rows[1], matrix.ranks.length)];
  const columns = matrix.times.length;
  const shown = useMemo(() => (scale === "relative" ? relative(matrix) : matrix.values), [matrix, scale]);
  const range = useMemo(() => rangeOf(shown, scale), [shown, scale]);
  const height = Math.max(160, Math.min(400, (last - first) * 22));
  const bands = useMemo(() => bandsOf(matrix.ranks.slice(first, last), stages), [matrix, first, last, stages]);

  const image = useMemo(() => {
    const drawn = Math.max(1, Math.min(last - first, Math.round(height * (window.devicePixelRatio || 1))));
    const made = document.createElement("canvas");
    made.width = Math.max(1, columns);
    made.height = drawn;
    const data = pixels(shown, columns, first, last, drawn, range, 0x00000000);
    if (columns > 0) made.getContext("2d")?.putImageData(new ImageData(new Uint8ClampedArray(data.buffer as ArrayBuffer), columns, drawn), 0, 0);
    return made;
  }, [shown, columns, first, last, range, height]);

  // Together with the size of the canvas, which clears it.
  useLayoutEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!context || size.width === 0) return;
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, size.width, size.height);
    context.drawImage(image, 0, 0, size.width, size.height);
    const [begin, end] = [matrix.times[0] ?? 0, matrix.times[columns - 1] ?? 0];
    context.fillStyle = "#ffffffd0";
    for (const { at } of marks) {
      if (end > begin && at >= begin && at <= end) context.fillRect(((at - begin) / (end - begin)) * size.width, 0, 2, size.height);
    }
    if (cell !== null) {
      const [w, h] = [size.width / columns, size.height / (last - first)];
      context.strokeStyle = "#ffffff";
      context.lineWidth = 2;
      context.strokeRect(cell.column * w, (cell.row - first) * h, Math.max(3, w), Math.max(3, h));
    }
  }, [image, size, cell, marks, matrix, columns, first, last]);

  function cellAt(event: MouseEvent): Cell | null {
    const box = canvas.current?.getBoundingClientRect();
    if (!box || columns === 0) return null;
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const row = first + Math.floor(((event.clientY - box.top) / box.height) * (last - first));
    return row >= first && row < last && column >= 0 && column < columns ? { row, column } : null;
  }

  function move(key: string): boolean {
    const now = cell ?? { row: first, column: columns - 1 };
    const moves: Record<string, readonly [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const way = moves[key];
    if (way === undefined) return false;
    const within = (value: number, low: number, high: number): number => Math.min(high, Math.max(low, value));
    setCell({ row: within(now.row + way[0], first, last - 1), column: within(now.column + way[1], 0, columns - 1) });
    return true;
  }

  const open = (at: Cell | null): void => {
    const rank = at === null ? undefined : matrix.ranks[at.row];
    if (rank !== undefined) onOpen(rank);
  };
  const value = cell === null ? NaN : (matrix.values[cell.row * columns + cell.column] ?? NaN);
  const happened = marks
    .filter(({ at }) => cell !== null && at > (matrix.times[cell.column - 1] ?? Infinity) && at <= (matrix.times[cell.column] ?? 0))
    .map(({ text }) => ` · ${text}`)
    .join("");
  const ratio = cell === null || scale === "absolute" ? NaN : (shown[cell.row * columns + cell.column] ?? NaN);

  return (
    <figure class="heatmap">
      <div class="bands" aria-hidden="true">
        {bands.map(({ stage, ranks }) => (
          <span key={ranks[0]} style={{ flexGrow: ranks.length }} title={`ranks ${ranks[0]} to ${ranks.at(-1)}`}>{stage >= 0 ? `stage ${stage}` : `ranks ${ranks[0]} – ${ranks.at(-1)}`}</span>
        ))}
      </div>
      <canvas
        ref={canvas}
        width={size.width}
        height={size.height}
        style={{ height: `${height}px` }}
        tabIndex={0}
        role="img"
        aria-label={`${name} of ${matrix.ranks.length} ranks over time. Arrow keys move, Enter opens a rank, Escape shows all ranks.`}
        onMouseMove={(event) => setCell(cellAt(event))}
        onMouseLeave={() => setCell(null)}
        onMouseDown={(event) => (drag.current = cellAt(event)?.row ?? null)}
        onMouseUp={(event) => {
          const [from, to] = [drag.current, cellAt(event)?.row ?? null];
          drag.current = null;
          if (from === null || to === null || Math.abs(to - from) < LEAST_ROWS) open(cellAt(event));
          else setRows([Math.min(from, to), Math.max(from, to) + 1]);
        }}
        onKeyDown={(event) => {
          if (event.key === "Enter") open(cell);
          else if (event.key === "Escape") setRows(null);
          else if (!move(event.key)) return;
          event.preventDefault();
        }}
      />
      <div class="ends faint" aria-hidden="true">
        {Array.from({ length: TIMES_SHOWN }, (_, at) => <span key={at}>{moment(matrix.times[Math.round((at / (TIMES_SHOWN - 1)) * (columns - 1))] ?? 0)}</span>)}
      </div>
      <figcaption>
        <span class="legend" aria-hidden="true">
          {scale === "relative" ? `${range.low.toFixed(2)} ×` : quantity(range.low, matrix.unit)}
          <span class="ramp">{Array.from({ length: 24 }, (_, at) => <i key={at} style={{ background: css(at / 23) }} />)}</span>
          {scale === "relative" ? `${range.high.toFixed(2)} × the median` : quantity(range.high, matrix.unit)}
        </span>
        <span class="reading" aria-live="polite">
          {cell === null
            ? "Point at a rank; click to open it; drag over ranks to enlarge them."
            : `rank ${matrix.ranks[cell.row] ?? ""} at ${moment(matrix.times[cell.column] ?? 0)}: ${quantity(value, matrix.unit)}${Number.isNaN(ratio) ? "" : ` (${ratio.toFixed(2)} × the median)`}${happened}`}
        </span>
        {rows !== null && <button onClick={() => setRows(null)}>Show all ranks</button>}
      </figcaption>
    </figure>
  );
}
