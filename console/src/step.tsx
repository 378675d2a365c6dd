// One step of a run on a canvas: operations of ranks over time, who waits for whom, the critical path, the late operation.
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { StepPictureAnswer } from "./answers";
import { useCanvasSize } from "./canvas";
import { quantity } from "./format";
import { address } from "./location";
import { STEP } from "./palette";

const TIMES_SHOWN = 5;
const ZOOM = 1.5;
const LEAST_US = 20;
const LEAST_DRAG = 6, LEAST_LABEL = 10; // pixels
// Around the late operation, as shares of its length.
const BEFORE = 0.35, AFTER = 0.45;
const PADDING = 3;
// A message that is sent while another is received is short: it is drawn over the other.
const LEAST_BESIDE = 0.05;

type Range = readonly [from: number, to: number];
/** Where bars are drawn in their rows: most at full height, one that goes on beside work in the upper half, and one that begins while
 * another goes on in the lower half. */
interface Places {
  readonly top: Float32Array; // as shares of the height
  readonly bottom: Float32Array;
  /** The first bar of each row, and one more. */
  readonly begin: Int32Array;
}
interface Geometry {
  readonly width: number;
  readonly row: number; // the height of a row
  readonly range: Range;
}
interface Spot {
  readonly row: number;
  readonly bar: number; // -1 where nothing is known
  readonly isOwn: boolean; // in the work before the bar
  readonly at: number;
}

const time = (us: number): string => quantity(us / 1e6, "seconds");
const at = (column: readonly number[], index: number): number => column[index] ?? 0;

function placesOf({ bars, ranks }: StepPictureAnswer): Places {
  const count = bars.row.length;
  const [top, bottom, begin] = [new Float32Array(count), new Float32Array(count).fill(1), new Int32Array(ranks.length + 1).fill(count)];
  const beside = new Float64Array(count); // how long there is something else while each bar goes on
  let longest = 0; // the bar of the row that goes on until the latest time
  for (let bar = 0; bar < count; bar += 1) {
    const isFirst = bar === 0 || bars.row[bar] !== bars.row[bar - 1];
    const [start, stop, goesOn] = [at(bars.start_us, bar), at(bars.stop_us, bar), isFirst ? 0 : at(bars.stop_us, longest)];
    const begin = Math.max(start - at(bars.own_us, bar), at(bars.start_us, longest)); // of the work before, and of the bar itself
    if (!isFirst) beside[longest] = (beside[longest] ?? 0) + Math.max(0, Math.min(stop, goesOn) - begin);
    if (goesOn - start > LEAST_BESIDE * (stop - start)) top[bar] = 0.5;
    if (stop >= goesOn) longest = bar;
  }
  beside.forEach((work, bar) => {
    if (work > LEAST_BESIDE * (at(bars.stop_us, bar) - at(bars.start_us, bar))) bottom[bar] = 0.5;
  });
  for (let bar = count - 1; bar >= 0; bar -= 1) begin[at(bars.row, bar)] = bar;
  for (let row = ranks.length - 1; row >= 0; row -= 1) begin[row] = Math.min(begin[row] ?? count, begin[row + 1] ?? count);
  return { top, bottom, begin };
}

function hatching(context: CanvasRenderingContext2D, colour: string, back: string, factor: number): CanvasPattern | string {
  const tile = document.createElement("canvas");
  const size = (tile.width = tile.height = Math.round(7 * factor));
  const own = tile.getContext("2d");
  if (own === null) return colour;
  own.fillStyle = back;
  own.fillRect(0, 0, size, size);
  own.strokeStyle = colour;
  own.lineWidth = 1.6 * factor;
  for (const shift of [-size, 0, size]) {
    own.moveTo(shift, size);
    own.lineTo(shift + size, 0);
  }
  own.stroke();
  return context.createPattern(tile, "repeat") ?? colour;
}

function draw(context: CanvasRenderingContext2D, picture: StepPictureAnswer, { top, bottom }: Places, { width, row, range }: Geometry, factor: number, style: CSSStyleDeclaration): void {
  const { bars, path, focus, ranks } = picture;
  const [text, back, pad] = [style.color, style.backgroundColor, Math.round(PADDING * factor)];
  const x = (us: number): number => ((us - range[0]) / (range[1] - range[0])) * width;
  const tall = row - 2 * pad;
  context.clearRect(0, 0, width, row * ranks.length);
  const waiting = hatching(context, STEP.waiting, back, factor);
  context.font = `${Math.round(11 * factor)}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  const label = (words: readonly string[], left: number, right: number, y: number, high: number, colour: string, under?: string): void => {
    const [from, to] = [Math.max(left, 0), Math.min(right, width)];
    const fitting = to - from < 24 * factor ? undefined : words.find((word) => context.measureText(word).width + 8 * factor < to - from);
    if (fitting === undefined) return;
    const wide = context.measureText(fitting).width;
    const begin = (from + to - wide) / 2;
    if (under !== undefined) {
      context.fillStyle = under;
      context.fillRect(begin - 3 * factor, y - high / 2, wide + 6 * factor, high);
    }
    context.fillStyle = colour;
    context.fillText(fitting, begin, y);
  };
  context.fillStyle = STEP.own;
  let worked = 0; // until when work is drawn, in the row of the bar before
  bars.own_us.forEach((own, bar) => {
    if (bar > 0 && bars.row[bar] !== bars.row[bar - 1]) worked = 0;
    const [from, to] = [Math.max(at(bars.start_us, bar) - own, worked), at(bars.start_us, bar)];
    if (to > from) context.fillRect(x(from), at(bars.row, bar) * row + pad, x(to) - x(from), tall);
    worked = Math.max(worked, to);
  });
  if (focus !== null) {
    const place = ranks.indexOf(focus.rank);
    focus.late_start_us.forEach((start, index) => {
      const [left, right] = [x(start), x(at(focus.late_stop_us, index))];
      context.fillStyle = STEP.late;
      context.fillRect(left, place * row + pad, Math.max(right - left, factor), tall);
      const longer = time(at(focus.late_stop_us, index) - start);
      label([`${longer} longer`, `+${longer}`], left, right, (place + 0.5) * row, tall, "#ffffff");
    });
  }
  for (let bar = 0; bar < bars.row.length; bar += 1) {
    const [left, met, right] = [x(at(bars.start_us, bar)), x(at(bars.arrived_us, bar)), x(at(bars.stop_us, bar))];
    if (right < 0 || left > width) continue;
    const y = at(bars.row, bar) * row + pad + (top[bar] ?? 0) * tall;
    const high = ((bottom[bar] ?? 1) - (top[bar] ?? 0)) * tall;
    context.fillStyle = waiting;
    context.fillRect(left, y, met - left, high);
    context.fillStyle = STEP.transfer;
    context.fillRect(met, y, Math.max(right - met, factor), high);
    if (high >= LEAST_LABEL * factor) {
      label([`waits for rank ${at(bars.awaited, bar)}`], left, met, y + high / 2, Math.min(high, 16 * factor), text, back);
      const name = picture.operations[at(bars.operation, bar)] ?? "";
      label([name, name.replace(/ of \d+$/, ""), name.replace(/^\w+ (\w+).*/, "$1")], met, right, y + high / 2, high, "#ffffff");
    }
  }
  context.strokeStyle = text;
  context.lineWidth = 2.5 * factor;
  context.lineJoin = "round";
  context.beginPath();
  let isDrawn = false;
  path.row.forEach((place, index) => {
    const y = (place + 1) * row - pad / 2;
    const [left, right] = [x(at(path.start_us, index)), x(at(path.stop_us, index))];
    if (place >= 0 && isDrawn) context.lineTo(left, y);
    else if (place >= 0) context.moveTo(left, y);
    if (place >= 0) context.lineTo(right, y);
    isDrawn = place >= 0;
  });
  context.stroke();
}

/** The late operation and what is around it; the whole step where nobody is late. */
function focusOf({ focus, step_us }: StepPictureAnswer): Range {
  if (focus === null) return [0, step_us];
  const length = Math.max(focus.end_us - focus.start_us, LEAST_US);
  return within([focus.start_us - BEFORE * length, focus.end_us + AFTER * length], step_us);
}

function within([from, to]: Range, whole: number): Range {
  const length = Math.min(whole, Math.max(to - from, LEAST_US));
  const begin = Math.min(Math.max(from, 0), whole - length);
  return [begin, begin + length];
}

/** What a bar, or the own work before it, is. */
function reading({ bars, ranks, operations, focus }: StepPictureAnswer, { row, bar, isOwn }: Spot): string {
  const rank = `rank ${ranks[row] ?? ""}`;
  if (bar < 0) return rank;
  const [own, start, met, stop] = [at(bars.own_us, bar), at(bars.start_us, bar), at(bars.arrived_us, bar), at(bars.stop_us, bar)];
  if (isOwn) {
    const late = focus === null || focus.rank !== ranks[row] ? -1 : focus.late_stop_us.findIndex((end) => Math.abs(end - start) <= 1);
    const excess = late < 0 || focus === null ? "" : `, ${time(at(focus.late_stop_us, late) - at(focus.late_start_us, late))} longer than usual`;
    return `${rank}: own work for ${time(own)}${excess}, from ${time(start - own)} to ${time(start)}`;
  }
  const awaited = at(bars.awaited, bar);
  const waits = awaited < 0 ? "" : `; waits ${time(met - start)} for rank ${awaited}, then ${time(stop - met)} of transfer`;
  return `${rank}: ${operations[at(bars.operation, bar)] ?? ""}, ${quantity(at(bars.bytes, bar), "bytes")}, ${time(stop - start)}, from ${time(start)} to ${time(stop)}${waits}`;
}

interface Props {
  run: string;
  picture: StepPictureAnswer;
  onOpen: (rank: number) => void;
}

/** Shows the newest picture, unless the viewer has zoomed into one. */
export function StepPicture({ run, picture: newest, onOpen }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const size = useCanvasSize(canvas);
  const [isWhole, setWhole] = useState(false);
  const [part, setPart] = useState<{ picture: StepPictureAnswer; range: Range } | null>(null);
  const [spot, setSpot] = useState<Spot | null>(null);
  const [pointer, setPointer] = useState<{ x: number; y: number } | null>(null);
  const [dragged, setDragged] = useState<Range | null>(null);
  const picture = part?.picture ?? newest;
  const { bars, ranks, step_us: whole, focus } = picture;
  const places = useMemo(() => placesOf(picture), [picture]);
  const range = part?.range ?? (isWhole ? ([0, whole] as const) : focusOf(picture));
  const tall = ranks.length <= 4 ? 44 : ranks.length <= 8 ? 34 : 26;
  const factor = window.devicePixelRatio || 1;

  // Drawn once for a picture and range; moving the pointer only copies it.
  const drawn = useMemo(() => document.createElement("canvas"), []);
  useLayoutEffect(() => {
    const context = drawn.getContext("2d");
    if (!context || canvas.current === null || size.width === 0) return;
    [drawn.width, drawn.height] = [size.width, size.height];
    draw(context, picture, places, { width: size.width, row: size.height / ranks.length, range }, factor, getComputedStyle(canvas.current));
  }, [picture, places, size, range[0], range[1]]);

  useLayoutEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!context || size.width === 0) return;
    context.clearRect(0, 0, size.width, size.height);
    context.drawImage(drawn, 0, 0);
    if (spot !== null && spot.bar >= 0) {
      const [start, stop] = spot.isOwn ? [at(bars.start_us, spot.bar) - at(bars.own_us, spot.bar), at(bars.start_us, spot.bar)] : [at(bars.start_us, spot.bar), at(bars.stop_us, spot.bar)];
      const [scale, row] = [size.width / (range[1] - range[0]), size.height / ranks.length];
      context.strokeStyle = getComputedStyle(context.canvas).color;
      context.lineWidth = 2 * factor;
      context.strokeRect((start - range[0]) * scale, spot.row * row + PADDING * factor, Math.max((stop - start) * scale, 3 * factor), row - 2 * PADDING * factor);
    }
    if (dragged !== null) {
      context.fillStyle = "#80808060";
      context.fillRect(Math.min(...dragged) * factor, 0, Math.abs(dragged[1] - dragged[0]) * factor, size.height);
    }
  }, [picture, places, size, range[0], range[1], spot, dragged]);

  const follow = (all: boolean): void => {
    setPart(null);
    setSpot(null);
    setWhole(all);
  };
  const show = (from: number, to: number): void => setPart({ picture, range: within([from, to], whole) });
  const zoom = (by: number, around: number): void => show(around - (around - range[0]) * by, around + (range[1] - around) * by);
  const momentAt = (event: MouseEvent): number => {
    const box = canvas.current?.getBoundingClientRect();
    return box ? range[0] + ((event.clientX - box.left) / box.width) * (range[1] - range[0]) : 0;
  };

  function spotAt(event: MouseEvent): Spot | null {
    const box = canvas.current?.getBoundingClientRect();
    if (!box) return null;
    const place = ((event.clientY - box.top) / box.height) * ranks.length;
    const [row, moment, near] = [Math.floor(place), momentAt(event), ((range[1] - range[0]) / box.width) * 2];
    if (row < 0 || row >= ranks.length) return null;
    let [found, isOwn] = [-1, true];
    for (let bar = places.begin[row] ?? 0; bar < (places.begin[row + 1] ?? 0); bar += 1) {
      const [start, stop, high] = [at(bars.start_us, bar), at(bars.stop_us, bar), place - row];
      if (start - near <= moment && stop + near >= moment && high >= (places.top[bar] ?? 0) && high <= (places.bottom[bar] ?? 1)) [found, isOwn] = [bar, false];
      else if (isOwn && start - at(bars.own_us, bar) <= moment && moment < start) found = bar;
    }
    return { row, bar: found, isOwn, at: moment };
  }

  /** To the bar before or after, or to the one at this time on another rank. */
  function move(rows: number, steps: number): void {
    const now = spot ?? { row: Math.max(0, ranks.indexOf(focus?.rank ?? -1)), bar: -1, isOwn: false, at: focus?.stop_us ?? range[0] };
    const row = Math.min(ranks.length - 1, Math.max(0, now.row + rows));
    const [first, last] = [places.begin[row] ?? 0, (places.begin[row + 1] ?? 0) - 1];
    if (last < first) return;
    let bar = now.bar + steps;
    if (rows !== 0 || now.bar < 0) {
      bar = first;
      while (bar < last && at(bars.stop_us, bar) < now.at) bar += 1;
    }
    bar = Math.min(last, Math.max(first, bar));
    const [start, stop] = [at(bars.start_us, bar), at(bars.stop_us, bar)];
    setSpot({ row, bar, isOwn: false, at: start });
    setPointer(null);
    if (stop < range[0] || start > range[1]) show(start - (range[1] - range[0]) / 2, start + (range[1] - range[0]) / 2);
    else setPart({ picture, range });
  }

  const middle = spot?.at ?? (range[0] + range[1]) / 2;
  const keys: Readonly<Record<string, () => void>> = {
    ArrowLeft: () => move(0, -1),
    ArrowRight: () => move(0, 1),
    ArrowUp: () => move(-1, 0),
    ArrowDown: () => move(1, 0),
    "+": () => zoom(1 / ZOOM, middle),
    "=": () => zoom(1 / ZOOM, middle),
    "-": () => zoom(ZOOM, middle),
    Escape: () => follow(true),
    Enter: () => spot !== null && onOpen(ranks[spot.row] ?? 0),
  };
  const isOld = part !== null && (newest.step !== picture.step || newest.sentence !== picture.sentence);
  return (
    <figure class="step">
      <div class="row">
        <h2>One step of all ranks</h2>
        <span class="row" role="group" aria-label="Part of the step">
          {focus !== null && <button aria-pressed={part === null && !isWhole} onClick={() => follow(false)}>Late operation</button>}
          <button aria-pressed={part === null && (isWhole || focus === null)} onClick={() => follow(true)}>Whole step</button>
          {isOld && <button onClick={() => follow(isWhole)}>Show the newest step</button>}
        </span>
      </div>
      <p>{picture.sentence}</p>
      <div class="ranks">
        {ranks.map((rank, place) => (
          <a key={rank} class={rank === focus?.rank ? "late" : ""} href={address({ run, rank: String(rank) }, false)}>
            <span class="faint wide">{picture.stages[place] !== picture.stages[place - 1] && new Set(picture.stages).size > 1 ? `stage ${picture.stages[place] ?? 0}` : ""}</span> rank {rank}
          </a>
        ))}
      </div>
      <div class="drawing">
        <canvas
          ref={canvas}
          width={size.width}
          height={size.height}
          style={{ height: `${ranks.length * tall}px` }}
          tabIndex={0}
          role="img"
          aria-label={`Step ${picture.step} of ${ranks.length} ranks over time. ${picture.sentence} Arrow keys move, plus and minus zoom, Enter opens a rank, Escape shows the whole step.`}
          onMouseMove={(event) => {
            setSpot(spotAt(event));
            setPointer({ x: event.offsetX, y: event.offsetY });
            if (dragged !== null) setDragged([dragged[0], event.offsetX]);
          }}
          onMouseLeave={() => {
            setSpot(null);
            setPointer(null);
            setDragged(null);
          }}
          onMouseDown={(event) => setDragged([event.offsetX, event.offsetX])}
          onMouseUp={(event) => {
            const wide = canvas.current?.clientWidth ?? 1;
            const [from, to] = [Math.min(dragged?.[0] ?? 0, event.offsetX), Math.max(dragged?.[0] ?? 0, event.offsetX)];
            if (dragged !== null && to - from >= LEAST_DRAG) show(range[0] + (from / wide) * (range[1] - range[0]), range[0] + (to / wide) * (range[1] - range[0]));
            setDragged(null);
          }}
          onDblClick={() => follow(true)}
          onWheel={(event) => {
            // A page that is scrolled past it does not zoom.
            if (document.activeElement !== canvas.current && !event.ctrlKey) return;
            event.preventDefault();
            const [wide, across] = [range[1] - range[0], Math.abs(event.deltaX) > Math.abs(event.deltaY)];
            if (across) show(range[0] + (event.deltaX / 500) * wide, range[1] + (event.deltaX / 500) * wide);
            else zoom(event.deltaY < 0 ? 1 / ZOOM : ZOOM, momentAt(event));
          }}
          onKeyDown={(event) => {
            if (keys[event.key] === undefined || event.ctrlKey || event.metaKey) return;
            keys[event.key]?.();
            event.preventDefault();
          }}
        />
        {pointer !== null && spot !== null && (dragged === null || dragged[0] === dragged[1]) && (
          <div class="tip" aria-hidden="true" style={{ top: `${pointer.y + 14}px`, ...(pointer.x * 2 < (canvas.current?.clientWidth ?? 0) ? { left: `${pointer.x + 14}px` } : { right: `${(canvas.current?.clientWidth ?? 0) - pointer.x + 14}px` }) }}>
            {reading(picture, spot)}
          </div>
        )}
      </div>
      <div class="ends faint" aria-hidden="true">
        {Array.from({ length: TIMES_SHOWN }, (_, tick) => <span key={tick}>{time(range[0] + (tick / (TIMES_SHOWN - 1)) * (range[1] - range[0]))}</span>)}
      </div>
      <figcaption>
        <div class="keys" aria-hidden="true">
          <span><i style={{ background: STEP.own }} />own work</span>
          {focus !== null && <span><i style={{ background: STEP.late }} />longer than usual</span>}
          <span><i style={{ background: `repeating-linear-gradient(135deg, ${STEP.waiting} 0 2px, transparent 2px 5px)` }} />waits</span>
          <span><i style={{ background: STEP.transfer }} />transfer</span>
          <span><i class="line" />critical path</span>
        </div>
        <p class="reading" aria-live="polite">
          {spot === null || pointer !== null ? "Point at a bar to read it; drag to enlarge; click, then scroll to zoom; Escape shows the whole step." : reading(picture, spot)}
        </p>
        {picture.detail + picture.note !== "" && <p class="faint">{picture.detail} {picture.note}</p>}
      </figcaption>
    </figure>
  );
}
