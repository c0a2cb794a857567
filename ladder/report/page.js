// The page: sections with choices, legends, hovering, tables. One object of numbers comes with it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set(); // arms that the reader has switched off, in all figures
const sections = []; // how to draw each again
const tip = document.getElementById("tip");

function section(id, title, words) {
  const made = html("section", { id }, document.getElementById("main"));
  html("h2", {}, made, title);
  if (words) html("p", { class: "quiet" }, made, words);
  html("a", { href: `#${id}` }, document.getElementById("nav"), title);
  return made;
}

// Buttons of which one is pressed; `dim` says which of them would change another choice too.
function choice(parent, name, values, chosen, dim, act) {
  const group = html("div", { class: "choice", role: "group", "aria-label": name }, parent);
  html("span", {}, group, name);
  for (const value of values) {
    const button = html("button", { type: "button", "aria-pressed": String(value === chosen) }, group, String(value));
    button.dataset.key = `${name}=${value}`;
    if (dim(value)) button.className = "other";
    button.addEventListener("click", () => act(value));
  }
}
// After a redraw the keyboard stays on the button that it was on.
function keepFocus(inside, redraw) {
  const key = inside.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  redraw();
  if (key !== undefined) [...inside.querySelectorAll("button")].find((button) => button.dataset.key === key)?.focus();
}

function figure(id, title, words, panels, draw, options = {}) {
  const here = section(id, title, words);
  if (!panels.length) {
    html("p", { class: "quiet" }, here, options.none);
    return;
  }
  const size = (panel) => (panel.marks ? Object.values(panel.marks).flat().length : 0);
  const better = (a, b) => size(a) > size(b) || (size(a) === size(b) && a.lead > b.lead);
  let panel = panels.reduce((best, other) => (better(other, best) ? other : best));
  const choices = html("div", { class: "choices" }, here), legend = html("div", { class: "legend" }, here);
  const plot = html("div", { class: "plot" }, here), facts = html("p", { class: "facts" }, here);
  const remark = html("p", { class: "facts" }, here);
  let extra = options.extra?.start(panel);

  function pick(key, value) {
    const alike = (other) => Object.keys(panel.keys).filter((k) => other.keys[k] === panel.keys[k]).length;
    const possible = panels.filter((other) => other.keys[key] === value);
    panel = possible.reduce((best, other) => (alike(other) > alike(best) ? other : best));
    if (options.extra && !options.extra.values(panel).includes(extra)) extra = options.extra.start(panel);
    keepFocus(here, show);
  }
  function showChoices() {
    choices.replaceChildren();
    for (const key of Object.keys(panel.keys)) {
      const alike = panels.filter((other) => Object.keys(panel.keys).every((k) => k === key || other.keys[k] === panel.keys[k]));
      const values = distinct((key === "measured" ? alike : panels).map((other) => other.keys[key]));
      if (values.every((value) => Number(value) > 0)) values.sort((a, b) => a - b);
      const exact = (value) => alike.some((other) => other.keys[key] === value);
      if (values.length > 1 || key !== "measured") choice(choices, key, values, panel.keys[key], (v) => !exact(v), (v) => pick(key, v));
    }
    if (options.extra) {
      choice(choices, options.extra.name, options.extra.values(panel), extra, () => false, (value) => {
        extra = value;
        keepFocus(here, show);
      });
    }
  }
  function showLegend(arms) {
    legend.replaceChildren();
    for (const arm of arms) {
      const button = html("button", { type: "button", "aria-pressed": String(!hidden.has(arm)), title: `show or hide ${arm}` }, legend);
      button.dataset.key = `arm=${arm}`;
      button.append(swatch(DATA.looks[arm], id === "throughput"), arm);
      button.addEventListener("click", () => {
        if (!hidden.delete(arm)) hidden.add(arm);
        keepFocus(here, () => sections.forEach((again) => again()));
      });
    }
  }
  function show() {
    showChoices();
    const present = new Set(panel.marks ? Object.values(panel.marks).flat().map((m) => m.arm) : []);
    const arms = Object.keys(DATA.looks).filter((arm) => present.has(arm));
    if (options.legend) options.legend(legend);
    else showLegend(arms);
    const view = { width: plot.clientWidth, arms: arms.filter((arm) => !hidden.has(arm)), looks: DATA.looks, spans: DATA.spans };
    if (options.extra) view[options.extra.as] = options.extra.read ? options.extra.read(extra, panel) : extra;
    plot.replaceChildren();
    const svg = draw(plot, panel, view);
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", `${title}: ${Object.values(panel.keys).join(", ")}`);
    svg.querySelector(".mark")?.setAttribute("tabindex", "0");
    facts.textContent = panel.facts;
    remark.textContent = panel.remark || "";
  }
  sections.push(show);
}

// Numbers of a mark, beside the mouse or the mark itself.
function tell(group, x, y) {
  tip.replaceChildren();
  html("b", {}, tip, group.told.title);
  const list = html("dl", {}, tip);
  for (const [name, value] of group.told.tips) {
    html("dt", {}, list, name);
    html("dd", {}, list, value);
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 14 + height > innerHeight ? Math.max(4, y - height - 10) : y + 14}px`;
}
const over = (event) => event.target.closest?.(".mark");
addEventListener("pointermove", (event) => (over(event) ? tell(over(event), event.clientX, event.clientY) : document.activeElement?.told || (tip.hidden = true)));
function tellOf(mark) {
  if (!mark?.told) return void (tip.hidden = true);
  const place = mark.getBoundingClientRect();
  tell(mark, place.x + place.width / 2, place.y);
}
addEventListener("focusin", (event) => tellOf(event.target));
addEventListener("focusout", () => (tip.hidden = true));
// a mark that gets the focus is scrolled into view, and its numbers go with it
addEventListener("scroll", () => tellOf(tip.hidden ? null : document.activeElement), true);
addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hidden = true;
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  if (!event.target.told || !(event.key in steps)) return;
  event.preventDefault();
  const all = [...event.target.closest("svg").querySelectorAll(".mark")];
  const next = all[(all.indexOf(event.target) + steps[event.key] + all.length) % all.length];
  event.target.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
});

// A table whose headers sort it; what is missing goes last either way.
function table(parent, columns, cells, name) {
  const box = html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, parent);
  const made = html("table", {}, box), head = html("tr", {}, html("thead", {}, made)), body = html("tbody", {}, made);
  let by = -1, direction = 1;
  const order = (a, b) => (a === null || b === null ? (a === null) - (b === null) : direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
  const written = (value, { digits }) => (value === null ? "" : typeof value === "number" ? number(value, digits ?? undefined) : value);
  function show() {
    const rows = by < 0 ? cells : [...cells].sort((a, b) => order(a[by], b[by]));
    body.replaceChildren();
    for (const row of rows) {
      const line = html("tr", {}, body);
      columns.forEach((column, n) => {
        const text = column.write ? column.write(row[n], row) : written(row[n], column);
        html("td", { class: column.wide ? "wide" : column.digits === null ? "" : "number" }, line, text);
      });
    }
  }
  columns.forEach((column, n) => {
    const cell = html("th", { "aria-sort": "none", class: column.digits === null ? "" : "number" }, head);
    const button = html("button", { type: "button", title: "sort" }, cell, column.title);
    button.addEventListener("click", () => {
      direction = by === n ? -direction : 1;
      by = n;
      [...head.children].forEach((other, at) => {
        other.setAttribute("aria-sort", at !== n ? "none" : direction > 0 ? "ascending" : "descending");
        other.firstChild.textContent = columns[at].title + (at !== n ? "" : direction > 0 ? " ↑" : " ↓");
      });
      show();
    });
  });
  show();
}

function published() {
  const { source, setting, rows } = DATA.published;
  const here = section("published", "Beside the published figures", `Published: ${source}, ${setting}. Ours: the same size, TP, batch and arm, on the nearest named link; blank where nothing was measured.`);
  const unit = (value, row) => (value === null ? "" : row[9] === "x" ? `${value.toFixed(2)}×` : `${value.toFixed(1)}%`);
  const titles = ["size", "TP", "batch", "link", "arm", "what", "published", "ours"];
  const columns = titles.map((title) => ({ title, digits: ["TP", "batch", "published", "ours"].includes(title) ? 0 : null }));
  columns[6].write = columns[7].write = unit;
  columns.push({ title: "ours was measured on", digits: null, wide: true });
  table(here, columns, rows.map((r) => [r.size, r.tp, r.batch, r.link, r.arm, r.what, r.published, r.ours, r.measured, r.unit]), "published figures and ours");
}

function page() {
  for (const words of DATA.summary) html("p", {}, document.getElementById("summary"), words);
  for (const words of DATA.notes) html("p", { class: "quiet" }, document.getElementById("summary"), words);
  const { throughput, frontier, latency } = DATA.figures;
  const metrics = (panel) => ["speed-up over standard", "tokens/s"].filter((name) => panel.marks[name].length);
  if (DATA.rows.cells.length) {
    const bound = "none" in DATA.looks ? " The arm none has no communication: a bound on speed, not a model." : "";
    figure("throughput", "Throughput by wiring", `Whiskers: the quartiles of a token's time over the repetitions. Tokens/s: each batch on a scale of its own.${bound}`, throughput, drawBars, {
      extra: { name: "show", as: "metric", values: metrics, start: (panel) => metrics(panel)[0] },
    });
    figure("frontier", "Pareto frontier", "Further right: faster answers. Further up: cheaper tokens. Each point is a batch and a TP degree.", frontier, drawFrontier, {
      none: "A frontier needs more than one batch or TP degree.",
    });
    figure("latency", "Speed-up against link latency", "Points: measured, time of a token against standard's on the same link.", latency, drawLatency, {
      none: "No link with a known latency has both standard and another arm.",
    });
  }
  if (DATA.weights.cells.length) {
    figure("weights", "Speed-up by weight format", "Time of a token against standard's with the same weights, on the same link.", DATA.figures.weights, drawWeights);
    table(section("formats", "Speed-up over standard by weight format", "Times as fast as standard with the same weights, decoding; predicted: by the performance model. A header sorts the table."), DATA.weights.columns, DATA.weights.cells, "speed-ups by weight format");
  }
  if (DATA.timelines.length) {
    const layers = (panel) => distinct([panel.shown, 4 * panel.shown, Infinity].map((n) => Math.min(n, Math.max(...panel.steps.map((s) => s.layers)))));
    figure("timeline", "Compute and communication of a step", "What one rank computes, and what it communicates meanwhile.", DATA.timelines, drawTimeline, {
      extra: { name: "first layers", as: "layers", values: layers, start: (panel) => layers(panel)[0] },
      legend: (legend) => {
        legend.replaceChildren();
        const names = { attention: "attention", MLP: "MLP", comm: "all-reduce", wait: "waiting for an all-reduce" };
        for (const [key, name] of Object.entries(names)) {
          const entry = html("span", {}, legend);
          entry.append(swatch({ colour: DATA.spans[key], fill: "solid" }, true), ` ${name} `);
        }
      },
    });
  }
  if (DATA.loads.cells.length) {
    const drawn = (panel) => Object.keys(panel.marks).filter((name) => panel.marks[name].length);
    const show = { extra: { name: "show", as: "metric", values: drawn, start: (panel) => drawn(panel)[0] } };
    figure("load-latency", "Latency of requests", "Which share of the requests (of the tokens, for ITL) took at most so long. Points: p50, p90, p99.", DATA.figures["load-latency"], drawDistribution, {
      ...show,
      none: "No lines of single requests.",
    });
    figure("load-rate", "Load", "Each point is a run.", DATA.figures["load-rate"], drawLoad, {
      ...show,
      none: "A curve needs runs at more than one rate, or with more than one number of requests at a time.",
    });
    table(section("loads", "Runs of requests", "A header sorts the table. Milliseconds where nothing else is said."), DATA.loads.columns, DATA.loads.cells, "runs of requests");
  }
  if (DATA.rows.cells.length) {
    published();
    table(section("rows", "All measurements", "A header sorts the table."), DATA.rows.columns, DATA.rows.cells, "all measurements");
  }
  sections.forEach((show) => show());
  let width = innerWidth, due;
  addEventListener("resize", () => {
    clearTimeout(due);
    if (innerWidth !== width) due = setTimeout(() => ((width = innerWidth), sections.forEach((show) => show())), 100);
  });
}
page();
