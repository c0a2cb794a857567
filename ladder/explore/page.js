// The explorer: choices on one side, what was predicted for them on the other. Every figure comes from Python, asked
// for while the page is open, or written into the file; here figures are only shown.

const { offer, start, looks, charts } = DATA;
const form = document.getElementById("choices");
const hidden = new Set(); // wirings that the reader has switched off
const byId = (id) => document.getElementById(id);
const plot = (id) => document.querySelector(`#${id} .plot`);
const FIELDS = { size: "Model", chip: "Chip", tp: "GPUs", link: "Link between them", batch: "Batch (sequences)", prompt: "Context", weights: "Weights" };
const OWN = "own"; // the entry of a link that is typed
let choice = { ...start }, shown = {}, turn = 0, due;

// --- answers: from the server, or from the file ---------------------------------------------------------------------

let inside; // the answers of a file
async function unpacked() {
  const bytes = Uint8Array.from(atob(DATA.answers), (c) => c.charCodeAt(0));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  return JSON.parse(text);
}
async function ask(what) {
  if (DATA.answers === undefined) {
    const got = await fetch(`/${what}?${new URLSearchParams(choice)}`);
    return got.json();
  }
  inside ??= await unpacked();
  const found = inside[what][keyOf(what)];
  return found ?? { refused: inside.refused[keyOf("answer")] ?? "This setting is not in this file: run ladder explore for all of them." };
}
// What an answer depends on: the names of Choice.key in Python.
function keyOf(what) {
  const { size, chip, tp, link, batch, prompt, weights } = choice;
  const joined = tp === "1" ? "-" : link;
  if (what === "frontier") return [size, chip, link.split("_tp")[0], prompt, weights].join("|");
  return [size, chip, tp, joined, batch, prompt, weights].join("|");
}

// --- choices --------------------------------------------------------------------------------------------------------

function options(select, entries, chosen) {
  select.replaceChildren();
  for (const { value, name } of entries) html("option", { value }, select, name);
  select.value = chosen;
}
function showChoices() {
  for (const name of Object.keys(FIELDS)) {
    const label = html("label", { class: ["size", "chip", "link"].includes(name) ? "wide" : "" }, form, FIELDS[name]);
    const select = html("select", { name }, label);
    if (name !== "link") options(select, offer[name], choice[name]);
    select.addEventListener("change", () => choose(name, select.value));
  }
  const typed = html("input", { name: "typed", "aria-label": "own link: latency and bandwidth", placeholder: "50us,10GB/s", hidden: "" }, form.link.parentNode);
  typed.addEventListener("change", () => choose("link", typed.value.replaceAll(" ", "")));
  form.addEventListener("submit", (event) => event.preventDefault());
  showLinks();
}
// Links that join so many GPUs; on one GPU there is none. The same kind of link stays chosen.
function showLinks() {
  const entries = [...offer.links[choice.chip][choice.tp]], names = entries.map((e) => e.value), stem = (name) => name.split("_tp")[0];
  const known = Object.values(offer.links).flatMap(Object.values).flat().some((e) => e.value === choice.link);
  const own = DATA.answers === undefined, isOwn = own && !known;
  if (!names.includes(choice.link) && !isOwn) choice.link = names.find((name) => stem(name) === stem(choice.link)) ?? names[0] ?? choice.link;
  if (own) entries.push({ value: OWN, name: "own: latency,bandwidth" });
  options(form.link, entries, isOwn ? OWN : choice.link);
  form.link.disabled = choice.tp === "1";
  form.typed.hidden = !isOwn || choice.tp === "1";
  if (isOwn) form.typed.value = choice.link;
}
function choose(name, value) {
  if (name === "link" && value === OWN) {
    form.typed.hidden = false;
    form.typed.focus();
    return;
  }
  choice[name] = value;
  if (["chip", "tp", "link"].includes(name)) showLinks();
  history.replaceState(null, "", `#${new URLSearchParams(choice)}`);
  document.body.dataset.answered = document.body.dataset.shown = "";
  turn++; // an answer to the former choice is no longer shown
  clearTimeout(due); // several changes at once, as by the arrow keys, are asked about once
  due = setTimeout(show, 80);
}
// A setting can be linked to: it is in the address.
function fromAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const name of Object.keys(start)) {
    if (name === "link" ? given.link : offer[name]?.some((e) => e.value === given[name])) choice[name] = given[name];
  }
}

// --- what is shown --------------------------------------------------------------------------------------------------

async function show() {
  const mine = ++turn;
  document.body.classList.add("busy");
  document.body.dataset.shown = "";
  const answer = await ask("answer").catch(() => ({ refused: "The server does not answer any more: start ladder explore again." }));
  if (mine !== turn) return;
  shown = { answer };
  showAnswer();
  document.body.dataset.answered = keyOf("answer");
  if (!answer.refused) await drawLayer();
  for (const [what, drawn] of [["curve", drawCurve], ["frontier", drawFrontier]]) {
    const found = answer.refused ? { refused: answer.refused } : await ask(what).catch(() => ({ refused: "The server does not answer any more." }));
    if (mine !== turn) return;
    shown[what] = found;
    await drawn();
  }
  if (mine !== turn) return;
  document.body.classList.remove("busy");
  document.body.dataset.shown = keyOf("answer");
}
const COLUMNS = [
  ["speedup", "× standard", (v) => `${number(v, 2)}×`],
  ["tpot_ms", "ms per token", (v) => number(v)],
  ["tokens_per_s", "tokens/s", (v) => number(v)],
  ["tokens_per_s_gpu", "per GPU", (v) => number(v)],
  ["exposed_ms", "waits, ms", (v) => number(v)],
  ["hidden", "hidden", (v) => (v === null ? "–" : `${Math.round(100 * v)}%`)],
];
function showAnswer() {
  const { answer } = shown, refused = answer.refused !== undefined;
  const { verdict, headline, reasons } = refused ? { verdict: "refused", headline: "This setting is not possible.", reasons: [answer.refused] } : answer.advice;
  byId("advice").dataset.verdict = verdict;
  byId("headline").textContent = headline;
  byId("reasons").replaceChildren();
  for (const words of reasons) html("p", {}, byId("reasons"), words);
  for (const id of ["wirings", "layer", "latency", "frontier"]) byId(id).hidden = refused;
  if (refused) return;
  byId("remarks").textContent = answer.remarks.join(" · ");
  byId("command").textContent = answer.command;
  byId("latency").hidden = choice.tp === "1";
  const head = document.querySelector("#wirings thead"), body = document.querySelector("#wirings tbody");
  head.replaceChildren();
  const titles = html("tr", {}, head);
  html("th", { scope: "col" }, titles, "wiring");
  for (const [, title] of COLUMNS) html("th", { scope: "col" }, titles, title);
  const measured = Object.keys(answer.measured).length > 0;
  if (measured) html("th", { scope: "col" }, titles, "measured");
  html("th", { scope: "col", class: "share", "aria-hidden": "true" }, titles, "");
  const most = Math.max(...answer.rows.map((row) => row.speedup));
  const pressed = document.activeElement?.dataset?.wiring;
  body.replaceChildren();
  for (const row of answer.rows) {
    const line = html("tr", { class: row.wiring === "standard" ? "base" : "", "data-wiring": row.wiring }, body);
    const button = html("button", { type: "button", "aria-pressed": String(!hidden.has(row.wiring)), title: `show or hide ${row.wiring}`, "data-wiring": row.wiring }, html("td", {}, line));
    button.append(sign(row.wiring, looks), row.wiring);
    button.addEventListener("click", () => toggle(row.wiring));
    for (const [key, , write] of COLUMNS) html("td", { "data-key": key, "data-value": String(row[key]) }, line, write(row[key]));
    if (measured) {
      const own = answer.measured[row.wiring];
      const cell = html("td", { "data-key": "measured" }, line, own ? `${number(own.y, 2)}×` : "");
      if (own) cell.title = `${own.how}, ${number(own.ms)} ms per token, context ${own.context}, commit ${own.commit ?? "unknown"}`;
    }
    const bar = html("span", { class: "bar" }, html("td", { class: "share", "aria-hidden": "true" }, line));
    bar.style.width = `${(100 * row.speedup) / most}%`;
    bar.style.background = looks[row.wiring].colour;
  }
  if (pressed) body.querySelector(`button[data-wiring="${CSS.escape(pressed)}"]`)?.focus();
}
// Colours and signs beside the figures that use them; a button hides its wiring in all of them.
function showLegend(id, wirings) {
  const legend = document.querySelector(`#${id} .legend`), pressed = legend.contains(document.activeElement) && document.activeElement.dataset.wiring;
  legend.replaceChildren();
  for (const wiring of wirings) {
    const button = html("button", { type: "button", "aria-pressed": String(!hidden.has(wiring)), "data-wiring": wiring }, legend);
    button.append(sign(wiring, looks), wiring);
    button.addEventListener("click", () => toggle(wiring));
    if (wiring === pressed) button.focus();
  }
}
function toggle(wiring) {
  if (!hidden.delete(wiring)) hidden.add(wiring);
  showAnswer();
  redraw();
}
async function redraw() {
  if (shown.answer && !shown.answer.refused) await drawLayer();
  if (shown.curve) await drawCurve();
  if (shown.frontier) await drawFrontier();
}

const JOINED = document.querySelector("#layer .quiet").textContent;
const ALONE = "All on one time axis: what is computed, on one lane or on two, and what waits for the other lane. One GPU has no all-reduces.";
const us = (value) => `${number(value, 1)} µs`;
// A lane of computation, or two; the link's below.
function place(bar, lanes) {
  const [kind, , lane] = bar;
  if (kind === "all-reduce") return [2.1, 2.95];
  if (lanes === 1) return [0.05, 1.9];
  return lane === 0 ? [0.05, 0.95] : [1.0, 1.9];
}
async function drawLayer() {
  const { rows, timelines } = shown.answer, records = [];
  const longest = Math.max(...timelines.map((step) => step.us)), alone = choice.tp === "1";
  timelines.forEach((step, order) => {
    const row = rows[order], arm = row.wiring;
    const lanes = step.lanes === 2 ? " on two lanes" : "";
    const heading = `${arm}${lanes}: ${number(row.tpot_ms)} ms, ${number(row.speedup, 2)}×`;
    const first = new Set();
    for (const bar of step.bars) {
      const [kind, name, , begin, end, after, since] = bar, [top, bottom] = place(bar, step.lanes);
      const what = { wait: alone ? `${name} waits for the other lane` : `${name} waits`, "all-reduce": `all-reduce of ${name}` }[kind] ?? name;
      const tips = [["takes", us(end - begin)], ["begins at", us(begin)]];
      if (after) tips.push(["needs the all-reduce of", after], ["which ends at", us(since)]);
      const label = kind === "all-reduce" || kind === "wait" || end - begin < 0.06 * longest ? undefined : name.split(" ")[1];
      records.push({ arm, heading, order, kind, begin, end, top, bottom, label, title: `${arm}: ${what}`, tips });
      if (after && since > 0 && since <= begin + 0.02 && !first.has(after)) {
        first.add(after);
        records.push({ arm, heading, order, kind: "edge", begin: since, end: begin, top: 2.1, bottom });
      }
    }
  });
  const step = timelines[0], chart = structuredClone(charts.layer);
  plot("layer").dataset.layers = `${step.first}`;
  for (const entry of byId("kinds").children) entry.hidden = alone && entry.textContent === "all-reduce";
  document.querySelector("#layer .quiet").textContent = alone ? ALONE : JOINED;
  if (alone) for (const { encoding } of chart.spec.layer) if (encoding.y?.axis) encoding.y.axis.values = [1]; // no link
  await draw(plot("layer"), { ...chart, datasets: { bars: records } }, `layers ${step.first} and ${step.first + 1} of a step`, hidden);
}
async function drawCurve() {
  const { curves, chosen, measured, reach, refused } = shown.curve;
  if (refused || choice.tp === "1") return;
  showLegend("latency", Object.keys(curves));
  const lines = Object.entries(curves).flatMap(([arm, points]) => points.map(([x, y], order) => ({ arm, x, y, order })));
  const points = measured.map(({ wiring: arm, alpha: x, y, ms, context, how, commit }) => ({
    arm, x, y, title: `${arm}, measured`, tips: [["decoding speed-up", `${number(y, 2)}×`], ["ms per token", number(ms)], ["link's latency", us(x)], ["context", String(context)], ["how", how], ["commit", commit ?? "unknown"]],
  }));
  const dots = []; // the predictions on the chosen link
  for (const row of shown.answer.rows) {
    if (row.wiring === "standard") continue;
    const tips = [["predicted", `${number(row.speedup, 2)}×`], ["ms per token", number(row.tpot_ms)], ["link's latency", us(chosen)]];
    dots.push({ arm: row.wiring, x: chosen, y: row.speedup, title: `${row.wiring} on the chosen link`, tips });
  }
  const here = [{ x: chosen, text: "chosen link" }];
  const params = charts.latency.params.map((p) => ({ ...p, value: reach[p.name === "low" ? 0 : 1] }));
  await draw(plot("latency"), { ...charts.latency, params, datasets: { lines, dots, points, chosen: here } }, "speed-up against link latency", hidden);
  document.querySelector("#latency .facts").textContent = measured.length
    ? `Lines and dots: predicted. ${measured.length} larger points: measured (${distinct(measured.map((m) => m.how)).join("; ")}).`
    : "All predicted: there are no measurements of this setting.";
}
async function drawFrontier() {
  const { points: found, measured, refused } = shown.frontier;
  if (refused) return;
  showLegend("frontier", distinct([...Object.keys(found), ...measured.map((m) => m.wiring)]));
  const isChosen = (p) => String(p.tp) === choice.tp && String(p.batch) === choice.batch;
  const all = Object.entries(found).flatMap(([arm, points]) => points.map((point) => ({ arm, ...point }))).filter((p) => p.front || isChosen(p));
  const lines = all.filter((p) => p.front).map((p, order) => ({ arm: p.arm, x: p.user, y: p.gpu, order }));
  const tips = (p) => [["tokens/s for each user", number(p.user)], ["tokens/s for each GPU", number(p.gpu)]];
  const dots = all.map((p) => ({ arm: p.arm, x: p.user, y: p.gpu, title: `${p.arm}: ${p.tp} GPU${p.tp > 1 ? "s" : ""}, batch ${p.batch}`, tips: tips(p) }));
  const rings = all.filter(isChosen).map((p) => ({ arm: p.arm, x: p.user, y: p.gpu }));
  const measuredPoints = measured.map((m) => ({ arm: m.wiring, x: m.user, y: m.gpu, title: `${m.wiring}, measured: ${m.tp} GPUs, batch ${m.batch}`, tips: [...tips(m), ["how", m.how], ["commit", m.commit ?? "unknown"]] }));
  await draw(plot("frontier"), { ...charts.frontier, datasets: { lines, dots, points: measuredPoints, rings } }, "Pareto frontier", hidden);
  document.querySelector("#frontier .facts").textContent = measured.length ? `${measured.length} larger points: measured (${distinct(measured.map((m) => m.how)).join("; ")}). Lines and dots: predicted.` : "All of this figure is predicted.";
}

// --- the page -------------------------------------------------------------------------------------------------------

kindsLegend(byId("kinds"));
scrollHint(document.querySelector("#wirings .scroll"));
byId("about").textContent = DATA.about;
fromAddress();
showChoices();
show();
redrawn(redraw);
