// A time series, by uPlot, in the colours of the page.
import { useEffect, useRef } from "preact/hooks";
import type uPlot from "uplot";
import { moment, quantity } from "./format";

// Not needed for what is seen first.
const library = import("uplot");

export interface Line {
  name: string;
  colour: string;
  values: readonly (number | null)[];
  dashed?: boolean;
}

interface Props {
  title: string;
  definition?: string;
  unit: string;
  times: readonly number[];
  lines: readonly Line[];
  /** Moments that are drawn as lines: a verdict, a capture, a restart. */
  marks?: readonly number[];
  height?: number;
}

function drawMarks(plot: uPlot, marks: readonly number[], colour: string): void {
  const { ctx, bbox } = plot;
  ctx.fillStyle = colour;
  for (const at of marks) {
    const left = Math.round(plot.valToPos(at, "x", true));
    if (left >= bbox.left && left <= bbox.left + bbox.width) ctx.fillRect(left, bbox.top, 1, bbox.height);
  }
}

export function Chart({ title, definition, unit, times, lines, marks = [], height = 150 }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const drawn = useRef(marks);
  drawn.current = marks;
  const plot = useRef<uPlot | null>(null);
  const shape = lines.map((line) => `${line.name}${line.colour}${line.dashed ?? false}`).join("|");

  useEffect(() => {
    const element = place.current;
    if (element === null) return;
    const colours = getComputedStyle(element); // live: they follow the theme
    const axis = { stroke: () => colours.color, grid: { stroke: () => colours.borderTopColor, width: 1 }, ticks: { show: false } };
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height }));
    let isGone = false;
    void library.then(({ default: Plot }) => {
      if (isGone) return;
      plot.current = new Plot(
        {
          width: element.clientWidth || 300,
          height,
          cursor: { points: { size: 5 } },
          legend: { live: true },
          hooks: { draw: [(plotted) => drawMarks(plotted, drawn.current, colours.color)] },
          scales: { x: { time: true } },
          axes: [{ ...axis, space: 110, size: 28, values: (_, ticks) => ticks.map(moment) }, { ...axis, size: 64, values: (_, ticks) => ticks.map((tick) => quantity(tick, unit)) }],
          series: [
            {},
            ...lines.map((line) => ({
              label: line.name,
              stroke: line.colour,
              width: 1.5,
              ...(line.dashed ? { dash: [5, 4] } : {}),
              points: { show: false },
              // Where nothing is pointed at, the latest.
              value: (own: uPlot, value: number | null, at: number, index: number | null) => quantity(index === null ? ([...(own.data[at] ?? [])] as (number | null)[]).findLast((known) => known !== null) : value, unit),
            })),
          ],
        },
        [[...times], ...lines.map((line) => [...line.values])] as uPlot.AlignedData,
        element,
      );
      observer.observe(element);
    });
    return () => {
      isGone = true;
      observer.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, unit, height]);

  useEffect(() => {
    plot.current?.setData([[...times], ...lines.map((line) => [...line.values])] as uPlot.AlignedData);
  }, [times, lines, marks]);

  return (
    <section class="chart">
      <h3 title={definition}>{title}</h3>
      <div ref={place} role="img" aria-label={`${title} over time`} />
    </section>
  );
}

/** The last values as a small line, without axes. */
export function Sparkline({ values, label }: { values: readonly (number | null)[]; label: string }) {
  const known = values.filter((value): value is number => value !== null);
  if (known.length < 2) return <span class="faint">–</span>;
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const height = Math.max(most - least, 0.2 * most) || 1; // so that noise is no mountain
  const low = (least + most - height) / 2;
  const points = values
    .map((value, at) => (value === null ? null : `${((at / (values.length - 1)) * 100).toFixed(1)},${(18 - ((value - low) / height) * 16).toFixed(1)}`))
    .filter((point) => point !== null);
  return (
    <svg class="sparkline" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label={label}>
      <polyline points={points.join(" ")} />
    </svg>
  );
}
