// Colours that people with any kind of colour vision tell apart.

/** Cividis at eleven points: dark blue, grey, yellow. Lightness grows with the value. */
const CIVIDIS = [
  [0, 32, 77], [0, 48, 111], [42, 63, 109], [72, 78, 107], [94, 93, 109], [115, 109, 114],
  [138, 126, 118], [163, 144, 114], [190, 163, 105], [220, 184, 87], [255, 234, 70],
] as const;

export const LEVELS = 256;

function colour(position: number): number {
  const scaled = position * (CIVIDIS.length - 1);
  const below = CIVIDIS[Math.min(CIVIDIS.length - 2, Math.floor(scaled))] ?? CIVIDIS[0];
  const above = CIVIDIS[Math.min(CIVIDIS.length - 1, Math.floor(scaled) + 1)] ?? CIVIDIS[10];
  const part = scaled - Math.floor(scaled);
  const mix = (channel: 0 | 1 | 2): number => Math.round(below[channel] + (above[channel] - below[channel]) * part);
  // As a canvas stores it on a little-endian machine: alpha, blue, green, red.
  return ((255 << 24) | (mix(2) << 16) | (mix(1) << 8) | mix(0)) >>> 0;
}

export const COLOURS = Uint32Array.from({ length: LEVELS }, (_, level) => colour(level / (LEVELS - 1)));

export const css = (position: number): string => {
  const value = COLOURS[Math.round(Math.min(1, Math.max(0, position)) * (LEVELS - 1))] ?? 0;
  return `rgb(${value & 255} ${(value >> 8) & 255} ${(value >> 16) & 255})`;
};

/** A rank and what it is compared with. */
export const RANK = "#e0701a";
export const COHORT = "#3d8fd1";

/** Parts of the picture of one step. */
export const STEP = { own: "#3d8fd173", late: "#d9480f", transfer: "#587592", waiting: "#cc79a7" } as const;

/** Phases of a step, and parts of a recording, after Okabe and Ito. */
export const PHASES: Readonly<Record<string, string>> = {
  input: "#e69f00",
  forward: "#56b4e9",
  backward: "#0072b2",
  optimizer: "#009e73",
  communication: "#d55e00",
  wait: "#cc79a7",
  checkpoint: "#999999",
  other: "#b8b8a8",
  compute: "#0072b2",
  "exposed communication": "#d55e00",
  "exposed memory copy": "#e69f00",
  idle: "#b8b8a8",
};
