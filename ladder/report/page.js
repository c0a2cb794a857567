// The page: sections with choices, legends, hovering, tables. One object of numbers comes with it.

const hidden = new Set(); // arms that the reader has switched off, in all figures
const sections = []; // how to draw each again

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

function figure(id, title, words, panels, options = {}) {
  const here = section(id, title, words);
  if (!panels.length) {
    html("p", { class: "quiet" }, here, options.none);
    return;
  }
  const better = (a, b) => a.size > b.size || (a.size === b.size && a.lead > b.lead);
  let panel = panels.reduce((best, other) => (better(other, best) ? other : best));
  const choices = html("div", { class: "choices" }, here), legend = html("div", { class: "legend" }, here);
  const plot = html("div", { class: "plot" }, here), facts = html("p", { class: "facts" }, here);
  const remark = html("p", { class: "facts" }, here);
  let extra = Object.keys(panel.charts)[0];

  function pick(key, value) {
    const alike = (other) => Object.keys(panel.keys).filter((k) => other.keys[k] === panel.keys[k]).length;
    const possible = panels.filter((other) => other.keys[key] === value);
    panel = possible.reduce((best, other) => (alike(other) > alike(best) ? other : best));
    if (!(extra in panel.charts)) extra = Object.keys(panel.charts)[0];
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
    const names = Object.keys(panel.charts);
    if (names.length > 1 || names[0]) {
      choice(choices, options.extra ?? "show", names, extra, () => false, (value) => {
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
      button.append(sign(arm, DATA.looks), arm);
      button.addEventListener("click", () => {
        if (!hidden.delete(arm)) hidden.add(arm);
        keepFocus(here, () => sections.forEach((again) => again()));
      });
    }
  }
  function show() {
    showChoices();
    if (options.legend) options.legend(legend);
    else showLegend(panel.arms);
    draw(plot, panel.charts[extra], `${title}: ${Object.values(panel.keys).join(", ")}`, hidden);
    facts.textContent = panel.facts;
    remark.textContent = panel.remark || "";
  }
  sections.push(show);
}

// A table whose headers sort it; what is missing goes last either way.
function table(parent, columns, cells, name) {
  const box = html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, parent);
  const made = html("table", {}, box), head = html("tr", {}, html("thead", {}, made)), body = html("tbody", {}, made);
  scrollHint(box);
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
  const { source, setting, count, rows } = DATA.published;
  if (!rows.length) return;
  const here = section("published", "Beside the published figures", `Published: ${source}, ${setting}. Ours: the same size, TP, batch and arm, on the nearest named link. ${rows.length} of ${count} published figures have a counterpart here.`);
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
  const { figures } = DATA;
  if (DATA.rows.cells.length) {
    const remark = "none" in DATA.looks ? " The arm none has no communication, and is no model; an arm on two lanes can be faster." : "";
    figure("throughput", "Throughput by wiring", `Whiskers: the quartiles of a token's time over the repetitions.${remark}`, figures.throughput);
    figure("frontier", "Pareto frontier", "Further right: faster answers. Further up: cheaper tokens. Each point is a batch and a TP degree.", figures.frontier, {
      none: "A frontier needs more than one batch or TP degree.",
    });
    figure("latency", "Speed-up against link latency", "Points: measured, time of a token against standard's on the same link.", figures.latency, {
      none: "No link with a known latency has both standard and another arm.",
    });
  }
  if (DATA.weights.cells.length) {
    figure("weights", "Speed-up by weight format", "Time of a token against standard's with the same weights, on the same link.", figures.weights);
    table(section("formats", "Speed-up over standard by weight format", "Times as fast as standard with the same weights, decoding; predicted: by the performance model. A header sorts the table."), DATA.weights.columns, DATA.weights.cells, "speed-ups by weight format");
  }
  if (DATA.timelines.length) {
    figure("timeline", "Compute and communication of a step", `What one rank computes, and what it communicates meanwhile. ${DATA.gaps}`, DATA.timelines, { extra: "layers", legend: kindsLegend });
  }
  if (figures.training.length) figure("training", "Training", "What the runs' logs say. Points: evaluations, and the last line.", figures.training);
  if (DATA.loads.cells.length) {
    figure("load-latency", "Latency of requests", "Which share of the requests (of the tokens, for ITL) took at most so long. Points: p50, p90, p99.", figures["load-latency"], {
      none: "No lines of single requests.",
    });
    figure("load-rate", "Load", "Each point is a run.", figures["load-rate"], {
      none: "A curve needs runs at more than one rate, or with more than one number of requests at a time.",
    });
    table(section("loads", "Runs of requests", "A header sorts the table. Milliseconds where nothing else is said."), DATA.loads.columns, DATA.loads.cells, "runs of requests");
  }
  if (DATA.rows.cells.length) {
    published();
    table(section("rows", "All measurements", "A header sorts the table."), DATA.rows.columns, DATA.rows.cells, "all measurements");
  }
  const again = () => sections.forEach((show) => show());
  again();
  redrawn(again);
}
page();
