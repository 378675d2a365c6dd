"use strict";

// The tree is given by columns: node n > 0 has parent[n - 1], frame[n - 1], own[n] and reference[n] in nanoseconds.
const data = JSON.parse(document.getElementById("profile").textContent);
const element = (id) => document.getElementById(id);
const canvas = element("graph"), context = canvas.getContext("2d");
const ROW = 19, LEAST_WIDTH = 0.4, FONT = "12px system-ui, 'DejaVu Sans', sans-serif";

const topDown = treeOf(data.parent, data.frame, data.own, data.reference);
let bottomUp = null;
let tree = topDown, zoomed = 0, boxes = [], isFlame = false, words = "";

// Children in the order of their time; totals with those of the children.
function treeOf(parent, frame, own, reference) {
  const size = own.length;
  const total = own.slice(), other = reference.slice(), depth = new Array(size).fill(0);
  const children = Array.from({ length: size }, () => []);
  for (let node = size - 1; node > 0; node--) {
    total[parent[node - 1]] += total[node];
    other[parent[node - 1]] += other[node];
  }
  for (let node = 1; node < size; node++) {
    children[parent[node - 1]].push(node);
    depth[node] = depth[parent[node - 1]] + 1;
  }
  for (const each of children) each.sort((a, b) => total[b] - total[a] || other[b] - other[a]);
  return { parent, frame, total, other, depth, children };
}

// Every node with time of its own begins a path from its frame out to the root.
function invert() {
  const parent = [], frame = [], own = [0], reference = [0], known = new Map();
  for (let node = 0; node < data.own.length; node++) {
    if (!data.own[node] && !data.reference[node]) continue;
    let place = 0;
    for (let at = node; at > 0; at = data.parent[at - 1]) {
      const key = place * data.frames.length + data.frame[at - 1];
      if (!known.has(key)) {
        known.set(key, own.length);
        parent.push(place);
        frame.push(data.frame[at - 1]);
        own.push(0);
        reference.push(0);
      }
      place = known.get(key);
    }
    own[place] += data.own[node];
    reference[place] += data.reference[node];
  }
  return treeOf(parent, frame, own, reference);
}

function label(node) {
  if (node === 0) return "all";
  const [name, file, line] = data.frames[tree.frame[node - 1]];
  const place = file.slice(file.lastIndexOf("/") + 1) + (line ? ":" + line : "");
  return place ? `${name} (${place})` : name;
}

function isMatch(node) {
  if (!words || node === 0) return false;
  const [name, file, line] = data.frames[tree.frame[node - 1]];
  return `${name} (${file}:${line})`.toLowerCase().includes(words);
}

const percent = (part, whole) => (whole ? ((100 * part) / whole).toFixed(1) : "0.0") + " %";

function seconds(nanos) {
  const value = nanos / 1e9;
  if (value >= 1) return value.toFixed(value < 100 ? 1 : 0) + " s";
  return value >= 1e-3 ? (value * 1e3).toFixed(1) + " ms" : (value * 1e6).toFixed(1) + " µs";
}

// How much larger the share is than in the reference, from -1 to 1 of the larger of both.
function excess(node) {
  const here = tree.total[0] ? tree.total[node] / tree.total[0] : 0;
  const there = tree.other[0] ? tree.other[node] / tree.other[0] : 0;
  return here === there ? 0 : (here - there) / Math.max(here, there);
}

function colour(node) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const light = isDark ? 36 : 74;
  if (isMatch(node)) return isDark ? "hsl(300 60% 42%)" : "hsl(300 75% 78%)";
  if (node === 0) return `hsl(210 8% ${light}%)`;
  if (data.compared) {
    const more = excess(node);
    const away = (isDark ? 10 : -18) * Math.abs(more);
    return `hsl(${more >= 0 ? 8 : 215} ${Math.round(75 * Math.abs(more))}% ${light + away}%)`;
  }
  const [name, , , kind] = data.frames[tree.frame[node - 1]];
  let hash = 0;
  for (let at = 0; at < name.length; at++) hash = (hash * 31 + name.charCodeAt(at)) % 1009;
  const hue = { native: 200, kernel: 130 }[kind] ?? 22;
  return `hsl(${hue + (hash % 24)} ${60 + (hash % 20)}% ${light + (hash % 6)}%)`;
}

// Boxes of what is wide enough to see, from the root: the ancestors of the zoomed node over the whole width.
function layout(width) {
  const path = [];
  for (let node = zoomed; ; node = tree.parent[node - 1]) {
    path.unshift(node);
    if (node === 0) break;
  }
  const found = path.map((node) => ({ node, left: 0, width }));
  // What only the reference has is shown too: by its share there.
  const here = tree.total[0] || 1, there = tree.other[0] || 1;
  const weight = (node) => Math.max(tree.total[node] / here, tree.other[node] / there);
  const open = [found[found.length - 1]];
  while (open.length) {
    const box = open.pop();
    const children = tree.children[box.node];
    const sum = children.reduce((all, child) => all + weight(child), 0);
    const unit = box.width / (Math.max(weight(box.node), sum) || 1);
    let left = box.left;
    for (const child of children) {
      const one = { node: child, left, width: unit * weight(child) };
      left += one.width;
      if (one.width < LEAST_WIDTH) continue;
      found.push(one);
      open.push(one);
    }
  }
  return found;
}

function draw() {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  boxes = layout(width);
  const rows = 1 + boxes.reduce((most, box) => Math.max(most, tree.depth[box.node]), 0);
  canvas.style.height = rows * ROW + "px";
  canvas.width = width * ratio;
  canvas.height = rows * ROW * ratio;
  const styles = getComputedStyle(document.documentElement);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = FONT;
  context.textBaseline = "middle";
  for (const box of boxes) {
    box.top = (isFlame ? rows - 1 - tree.depth[box.node] : tree.depth[box.node]) * ROW;
    context.fillStyle = colour(box.node);
    context.fillRect(box.left, box.top, Math.max(box.width - 0.6, 0.4), ROW - 1);
    if (box.width < 32) continue;
    context.save();
    context.beginPath();
    context.rect(box.left, box.top, box.width - 4, ROW);
    context.clip();
    context.fillStyle = styles.getPropertyValue("--ink");
    context.fillText(label(box.node), box.left + 4, box.top + ROW / 2);
    context.restore();
  }
  showMatched();
}

// The share of the outermost matches: a match inside a match is counted once.
function showMatched() {
  let sum = 0, other = 0;
  const open = words ? [0] : [];
  while (open.length) {
    const node = open.pop();
    if (isMatch(node)) {
      sum += tree.total[node];
      other += tree.other[node];
    } else open.push(...tree.children[node]);
  }
  const there = data.compared ? `, reference ${percent(other, tree.other[0])}` : "";
  element("matched").textContent = words ? `${percent(sum, tree.total[0])} matched${there}` : "";
}

function describe(node) {
  const lines = [`${label(node)}: ${percent(tree.total[node], tree.total[0])}, ${seconds(tree.total[node])}`];
  if (data.compared) lines.push(`reference ${percent(tree.other[node], tree.other[0])}`);
  if (zoomed !== node) lines.push(`${percent(tree.total[node], tree.total[zoomed])} of ${label(zoomed)}`);
  if (node) lines.push(data.frames[tree.frame[node - 1]][1]);
  return lines.filter(Boolean).join(" · ");
}

function boxAt(event) {
  const area = canvas.getBoundingClientRect();
  const left = event.clientX - area.left, top = event.clientY - area.top;
  return boxes.find((box) => left >= box.left && left < box.left + box.width && top >= box.top && top < box.top + ROW);
}

function zoom(node) {
  zoomed = node;
  draw();
  element("detail").textContent = describe(node);
}

function search(text) {
  words = text.trim().toLowerCase();
  draw();
}

function press(button, isPressed) {
  button.setAttribute("aria-pressed", String(isPressed));
}

canvas.addEventListener("mousemove", (event) => {
  const box = boxAt(event);
  element("detail").textContent = describe(box ? box.node : zoomed);
});
canvas.addEventListener("click", (event) => {
  const box = boxAt(event);
  if (box) zoom(box.node);
});
element("search").addEventListener("input", (event) => search(event.target.value));
element("reset").addEventListener("click", () => zoom(0));
element("flip").addEventListener("click", (event) => {
  isFlame = !isFlame;
  press(event.target, isFlame);
  draw();
  window.scrollTo(0, isFlame ? document.body.scrollHeight : 0);
});
element("order").addEventListener("click", (event) => {
  if (bottomUp === null) bottomUp = invert();
  tree = tree === topDown ? bottomUp : topDown;
  press(event.target, tree === bottomUp);
  zoom(0);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== element("search")) {
    event.preventDefault();
    element("search").focus();
  } else if (event.key === "Escape") {
    if (words || element("search").value) {
      element("search").value = "";
      search("");
      element("search").blur();
    } else zoom(0);
  }
});
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
zoom(0);
