"use strict";
// Drawing: marks, axes and the figures. Whatever comes from the data becomes text or a number, never markup.

const NS = document.getElementById("drawing").namespaceURI;
let patterns = 0;

function fill(node, attributes, parent, text) {
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
const html = (tag, attributes, parent, text) => fill(document.createElement(tag), attributes, parent, text);
const shape = (tag, attributes, parent, text) => fill(document.createElementNS(NS, tag), attributes, parent, text);

// Three digits that count, as in the pictures.
function number(value, digits) {
  const places = digits ?? (value >= 100 ? 0 : value >= 10 ? 1 : 2);
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}
const distinct = (values) => [...new Set(values)];
const highest = (mark) => Math.max(mark.y, mark.high ?? mark.y);

function linearTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((s) => s * power >= rough) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9); n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const digit of [1, 2, 5]) {
      const tick = Number((digit * 10 ** power).toPrecision(6));
      if (tick >= low && tick <= high) found.push(tick);
    }
  return found;
}
const linear = (low, high, from, to) => (v) => from + ((v - low) / (high - low)) * (to - from);
const logarithmic = (low, high, from, to) => (v) => from + (Math.log(v / low) / Math.log(high / low)) * (to - from);

const CORNERS = {
  square: [[-1, -1], [1, -1], [1, 1], [-1, 1]],
  triangle: [[0, -1.2], [1.15, 0.9], [-1.15, 0.9]],
  down: [[0, 1.2], [1.15, -0.9], [-1.15, -0.9]],
  diamond: [[0, -1.35], [1.35, 0], [0, 1.35], [-1.35, 0]],
  pentagon: [[0, -1.2], [1.15, -0.37], [0.7, 1], [-0.7, 1], [-1.15, -0.37]],
  cross: [[-1.2, -0.6], [-0.6, -1.2], [0, -0.6], [0.6, -1.2], [1.2, -0.6], [0.6, 0], [1.2, 0.6], [0.6, 1.2], [0, 0.6], [-0.6, 1.2], [-1.2, 0.6], [-0.6, 0]],
};
function dot(parent, look, x, y, r) {
  const paint = { fill: look.fill === "solid" ? look.colour : "var(--paper)", stroke: look.colour, "stroke-width": 1.6 };
  if (look.marker === "circle") return shape("circle", { cx: x, cy: y, r, ...paint }, parent);
  const points = CORNERS[look.marker].map(([dx, dy]) => `${x + dx * r},${y + dy * r}`).join(" ");
  return shape("polygon", { points, ...paint }, parent);
}
function barPaint(svg, look) {
  if (look.fill === "solid") return { fill: look.colour };
  if (look.fill === "hollow") return { fill: "var(--paper)", stroke: look.colour, "stroke-width": 1.5 };
  const id = `hatch-${++patterns}`;
  const pattern = shape("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg);
  shape("rect", { width: 6, height: 6, fill: "var(--paper)" }, pattern);
  shape("rect", { width: 2.2, height: 6, fill: look.colour }, pattern);
  return { fill: `url(#${id})`, stroke: look.colour, "stroke-width": 1.2 };
}
function swatch(look, bars) {
  const svg = shape("svg", { width: 26, height: 14, "aria-hidden": "true" });
  if (bars) shape("rect", { x: 6, y: 1, width: 14, height: 12, ...barPaint(svg, look) }, svg);
  else {
    shape("line", { x1: 0, x2: 26, y1: 7, y2: 7, stroke: look.colour, "stroke-width": 2, "stroke-dasharray": look.fill === "solid" ? "none" : "4 3" }, svg);
    dot(svg, look, 13, 7, 4.5);
  }
  return svg;
}
// Something with numbers behind it: the mouse or the keyboard (Tab, then the arrows) brings them up.
function mark(parent, title, tips) {
  const group = shape("g", { class: "mark", tabindex: "-1", role: "img" }, parent);
  group.setAttribute("aria-label", `${title}: ${tips.map(([name, value]) => `${name} ${value}`).join(", ")}`);
  group.told = { title, tips };
  return group;
}
function label(parent, x, y, text, anchor, kind) {
  return shape("text", { x, y, "text-anchor": anchor || "start", class: kind || "" }, parent, text);
}
function rule(parent, x1, y1, x2, y2, kind) {
  shape("line", { x1, y1, x2, y2, class: kind }, parent);
}

// Bars: one small drawing for each batch; tokens/s each on its own scale, speed-ups all on one.
function drawBars(box, panel, view) {
  const marks = panel.marks[view.metric].filter((m) => view.arms.includes(m.arm));
  const batches = distinct(marks.map((m) => m.x)).sort((a, b) => a - b);
  const speedup = view.metric !== "tokens/s";
  const columns = Math.max(1, Math.min(batches.length, Math.floor(view.width / Math.max(180, 60 + 27 * view.arms.length))));
  const w = view.width / columns, h = 250, left = 48;
  const svg = shape("svg", { width: view.width, height: h * Math.max(1, Math.ceil(batches.length / columns)) }, box);
  const paints = Object.fromEntries(view.arms.map((arm) => [arm, barPaint(svg, view.looks[arm])]));
  batches.forEach((batch, place) => {
    const own = marks.filter((m) => m.x === batch);
    const x0 = (place % columns) * w + left, y0 = Math.floor(place / columns) * h;
    const reach = Math.max(...(speedup ? marks : own).map(highest)) * 1.1 || 1;
    const y = linear(0, reach, y0 + h - 24, y0 + 30);
    label(svg, x0 + (w - left) / 2 - 6, y0 + 16, `batch ${number(batch, 0)}`, "middle", "head");
    for (const tick of linearTicks(0, reach, 4)) {
      rule(svg, x0, y(tick), x0 + w - left - 12, y(tick), tick ? "grid" : "base");
      label(svg, x0 - 6, y(tick) + 4, number(tick, speedup || reach < 5 ? 1 : 0), "end", "axis small");
    }
    if (speedup) rule(svg, x0, y(1), x0 + w - left - 12, y(1), "one");
    const step = (w - left - 12) / view.arms.length, wide = Math.min(46, step * 0.84);
    const here = view.arms.filter((arm) => own.some((m) => m.arm === arm)); // fewer bars stand in the middle
    for (const m of own) {
      const middle = x0 + (here.indexOf(m.arm) + 0.5 + (view.arms.length - here.length) / 2) * step;
      const group = mark(svg, m.title, m.tips);
      shape("rect", { x: middle - wide / 2, y: y(m.y), width: wide, height: Math.max(0.5, y(0) - y(m.y)), ...paints[m.arm] }, group);
      if (m.low !== null) shape("path", { class: "whisker", d: `M${middle - 4} ${y(m.high)}h8m-4 0V${y(m.low)}m-4 0h8` }, group);
      if (step >= 25) label(group, middle, y(highest(m)) - 5, speedup ? m.y.toFixed(2) : number(m.y), "middle", "small");
    }
  });
  return svg;
}

function frame(box, view, height, names, xTicks, yTicks, x, y) {
  const svg = shape("svg", { width: view.width, height }, box);
  const [left, right, base] = [56, view.width - 14, height - 46];
  for (const [tick, text] of xTicks) {
    rule(svg, x(tick), 14, x(tick), base, "grid");
    label(svg, x(tick), base + 18, text, "middle", "axis");
  }
  for (const [tick, text] of yTicks) {
    rule(svg, left, y(tick), right, y(tick), "grid");
    label(svg, left - 8, y(tick) + 4, text, "end", "axis");
  }
  rule(svg, left, base, right, base, "base");
  rule(svg, left, 14, left, base, "base");
  label(svg, (left + right) / 2, height - 6, names[0], "middle");
  const side = label(svg, 0, 0, names[1], "middle");
  side.setAttribute("transform", `translate(14 ${(14 + base) / 2}) rotate(-90)`);
  return svg;
}
const plain = (ticks) => ticks.map((tick) => [tick, tick >= 1000 ? number(tick, 0) : String(tick)]);
function line(svg, points, look, x, y) {
  const d = points.map(([a, b], n) => `${n ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const dash = look.fill === "solid" ? "none" : "6 4";
  if (d) shape("path", { d, fill: "none", stroke: look.colour, "stroke-width": 2, "stroke-dasharray": dash, class: "curve" }, svg);
}
function point(svg, m, look, x, y) {
  const group = mark(svg, m.title, m.tips);
  if (m.low !== null) shape("path", { d: `M${x} ${y(m.low)}V${y(m.high)}`, stroke: look.colour, "stroke-width": 1.4 }, group);
  shape("circle", { cx: x, cy: y(m.y), r: 10, class: "hit" }, group);
  dot(group, look, x, y(m.y), 5);
}

// Pareto frontier: every point, and a line through those of an arm that none of its others beats both ways.
function drawFrontier(box, panel, view) {
  const marks = panel.marks[""].filter((m) => view.arms.includes(m.arm));
  if (!marks.length) return shape("svg", { width: view.width, height: 40 }, box);
  const height = Math.max(320, Math.min(460, view.width * 0.6)), names = ["tokens/s for each user", "tokens/s for each GPU"];
  const xs = marks.map((m) => m.x), ys = marks.map((m) => m.y);
  const [xLow, xHigh, yLow, yHigh] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const pad = (xHigh - xLow || xHigh) * 0.08, log = yHigh > 8 * yLow && yLow > 0;
  const [x1, x2] = [Math.max(0, xLow - pad), xHigh + pad * 1.6];
  const [y1, y2] = log ? [yLow / 1.4, yHigh * 1.4] : [0, yHigh * 1.1 || 1];
  const x = linear(x1, x2, 56, view.width - 14), y = (log ? logarithmic : linear)(y1, y2, height - 46, 14);
  const yTicks = plain(log ? logTicks(y1, y2) : linearTicks(y1, y2, 5));
  const svg = frame(box, view, height, names, plain(linearTicks(x1, x2, view.width / 110)), yTicks, x, y);
  for (const arm of view.arms) line(svg, marks.filter((m) => m.arm === arm && m.front).map((m) => [m.x, m.y]), view.looks[arm], x, y);
  for (const m of marks) point(svg, m, view.looks[m.arm], x(m.x), y);
  const last = new Map(); // TP and batch stand beside the rightmost point of each
  for (const m of marks) {
    const cell = m.title.slice(m.arm.length + 3);
    if (!last.has(cell) || last.get(cell).x < m.x) last.set(cell, m);
  }
  for (const [cell, m] of last) {
    const fits = x(m.x) + 110 < view.width;
    label(svg, x(m.x) + (fits ? 10 : -10), y(m.y) - 8, cell, fits ? "start" : "end", "axis small");
  }
  return svg;
}

// Speed-up against latency: points are measured, lines are the model's; points of one link stand side by side. A logarithmic axis has no 0: it gets a place of its own.
function drawLatency(box, panel, view) {
  const marks = panel.marks[""].filter((m) => view.arms.includes(m.arm));
  const curves = Object.entries(panel.curves).filter(([arm]) => view.arms.includes(arm));
  const positive = panel.marks[""].map((m) => m.x).filter((v) => v > 0);
  const nought = panel.marks[""].some((m) => m.x <= 0);
  const low = positive.length ? Math.min(...positive) / 1.5 : 0.5, high = positive.length ? Math.max(...positive) * 1.5 : 2;
  const height = Math.max(320, Math.min(430, view.width * 0.55)), left = nought ? 130 : 56;
  const along = logarithmic(low, high, left, view.width - 14), x = (v) => (v > 0 ? along(v) : 92);
  const [y1, y2] = panel.heights, y = logarithmic(y1, y2, height - 46, 14);
  const xTicks = [...(nought ? [[0, "0"]] : []), ...plain(logTicks(low, high))];
  const yTicks = panel.marked.map((tick) => [tick, `${tick}×`]);
  const svg = frame(box, view, height, ["latency of the link, alpha (µs)", "times as fast as standard"], xTicks, yTicks, x, y);
  rule(svg, 56, y(1), view.width - 14, y(1), "one");
  const clip = `clip-${++patterns}`, inside = shape("g", { "clip-path": `url(#${clip})` });
  shape("rect", { x: 56, y: 8, width: view.width - 70, height: height - 54 }, shape("clipPath", { id: clip }, svg));
  for (const [arm, points] of curves) line(inside, points, view.looks[arm], x, y);
  svg.append(inside);
  const aside = (arm) => 4.5 * (view.arms.indexOf(arm) - (view.arms.length - 1) / 2);
  for (const m of marks) point(svg, m, view.looks[m.arm], x(m.x) + aside(m.arm), y);
  return svg;
}

// Speed-up by format of the weights, each at a place of its own: points are measured, lines are the model's.
function drawWeights(box, panel, view) {
  const height = Math.max(320, Math.min(430, view.width * 0.55)), [y1, y2] = panel.heights;
  const x = linear(-0.5, panel.ticks.length - 0.5, 56, view.width - 14), y = logarithmic(y1, y2, height - 46, 14);
  const yTicks = panel.marked.map((tick) => [tick, `${tick}×`]);
  const svg = frame(box, view, height, ["weights of the layers", "times as fast as standard"], panel.ticks.map((name, n) => [n, name]), yTicks, x, y);
  rule(svg, 56, y(1), view.width - 14, y(1), "one");
  const clip = `clip-${++patterns}`, inside = shape("g", { "clip-path": `url(#${clip})` });
  shape("rect", { x: 56, y: 8, width: view.width - 70, height: height - 54 }, shape("clipPath", { id: clip }, svg));
  for (const [arm, points] of Object.entries(panel.curves)) if (view.arms.includes(arm)) line(inside, points, view.looks[arm], x, y);
  svg.append(inside);
  const aside = (arm) => 6 * (view.arms.indexOf(arm) - (view.arms.length - 1) / 2);
  for (const m of panel.marks[""]) if (view.arms.includes(m.arm)) point(svg, m, view.looks[m.arm], x(m.x) + aside(m.arm), y);
  return svg;
}

// Two lanes for each step, compute above communication, all on one time axis.
function drawTimeline(box, panel, view) {
  const left = 62, lane = 24, each = 92;
  const until = Math.max(...panel.steps.map((s) => s.compute[Math.min(2 * view.layers, s.compute.length) - 1][2]));
  const svg = shape("svg", { width: view.width, height: each * panel.steps.length + 44 }, box);
  const x = linear(0, until, left, view.width - 10), base = each * panel.steps.length;
  for (const tick of linearTicks(0, until, view.width / 110)) {
    rule(svg, x(tick), 0, x(tick), base, "grid");
    label(svg, x(tick), base + 16, String(tick), "middle", "axis");
  }
  label(svg, (left + view.width) / 2, base + 36, "milliseconds since the step began", "middle");
  panel.steps.forEach((step, n) => {
    const y0 = n * each;
    const title = label(svg, view.width < 560 ? 4 : left, y0 + 16, step.title, "start", "head");
    if (view.width < 560) title.style.fontSize = "11px";
    // on two lanes attention and MLP are computed at the same time: each has half of the row
    const [ones, others] = [true, false].map((is) => step.compute.filter(([what]) => what.startsWith("attention") === is));
    const both = ones.some(([, b, e]) => others.some(([, begin, end]) => begin < e - 1e-6 && b < end - 1e-6));
    for (const [lanes, y, name] of [[["compute", "waits"], y0 + 26, "compute"], [["comm"], y0 + 26 + lane + 3, "comm"]]) {
      label(svg, left - 8, y + 16, name, "end", "axis");
      for (const kind of lanes)
        for (const [what, begin, end] of step[kind]) {
          if (begin >= until || end <= begin) continue;
          const colour = view.spans[kind === "comm" ? "comm" : kind === "waits" ? "wait" : what.split(" ")[0]];
          const said = kind === "waits" ? `${what} waits for an all-reduce` : what;
          const group = mark(svg, said, [["took", `${(1000 * (end - begin)).toFixed(1)} µs`], ["began at", `${begin.toFixed(3)} ms`]]);
          const half = both && kind !== "comm", down = half && !what.startsWith("attention") ? lane / 2 : 0;
          const width = Math.max(0.6, x(Math.min(end, until)) - x(begin) - 0.6), height = half ? lane / 2 - 1 : lane;
          shape("rect", { x: x(begin), y: y + down, width, height, fill: colour }, group);
        }
    }
  });
  return svg;
}

// Lines through the marks of each arm; those in front, or all of them, are points too.
function drawCurves(box, marks, view, names, top, front) {
  if (!marks.length) return shape("svg", { width: view.width, height: 40 }, box);
  const height = Math.max(320, Math.min(430, view.width * 0.5)), xs = marks.map((m) => m.x);
  const [low, high] = [Math.min(...xs), Math.max(...xs)], log = front && low > 0 && high > 8 * low;
  const [x1, x2] = log ? [low / 1.1, high * 1.1] : [0, high * 1.05 || 1];
  const x = (log ? logarithmic : linear)(x1, x2, 56, view.width - 14), y = linear(0, top, height - 46, 14);
  const xTicks = plain(log ? logTicks(x1, x2) : linearTicks(x1, x2, view.width / 110));
  const svg = frame(box, view, height, names, xTicks, plain(linearTicks(0, top, 5)), x, y);
  for (const arm of view.arms) {
    const own = marks.filter((m) => m.arm === arm).sort((a, b) => a.x - b.x || a.y - b.y);
    line(svg, own.map((m) => [m.x, m.y]), view.looks[arm], x, y);
    for (const m of own) if (m.front || !front) point(svg, m, view.looks[arm], x(m.x), y);
  }
  return svg;
}
function drawDistribution(box, panel, view) {
  const marks = panel.marks[view.metric].filter((m) => view.arms.includes(m.arm));
  const names = [`${view.metric}, ms`, view.metric === "ITL" ? "% of tokens" : "% of requests"];
  return drawCurves(box, marks, view, names, 100, true);
}
function drawLoad(box, panel, view) {
  const marks = panel.marks[view.metric].filter((m) => view.arms.includes(m.arm));
  const top = Math.max(...marks.map((m) => m.y), 0) * 1.1 || 1;
  return drawCurves(box, marks, view, [panel.keys.against, view.metric], top, false);
}
