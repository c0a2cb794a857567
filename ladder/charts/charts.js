"use strict";
// What all pages share: elements, charts, and the numbers of a mark beside the mouse or the keyboard's focus.
// Whatever comes from the data becomes text or a number, never markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const dark = matchMedia("(prefers-color-scheme: dark)");

function html(tag, attributes, parent, text) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
// Three digits that count, as in the pictures.
function number(value, digits) {
  const places = digits ?? (value >= 100 ? 0 : value >= 10 ? 1 : 2);
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}
const distinct = (values) => [...new Set(values)];
function sign(arm, looks) {
  const made = html("span", { class: "sign", "aria-hidden": "true", "data-sign": looks[arm].sign });
  made.style.color = looks[arm].colour;
  return made;
}

// The chart into the box, as wide as the box is; arms that are `hidden` are left out. A later call wins.
async function draw(box, chart, name, hidden = new Set()) {
  if (typeof vegaEmbed === "undefined") return void box.replaceChildren(html("p", { class: "quiet" }, null, DATA.missing));
  const turn = (box.turn = (box.turn || 0) + 1);
  box.setAttribute("aria-busy", "true");
  const own = structuredClone(chart);
  for (const [key, records] of Object.entries(own.datasets)) own.datasets[key] = records.filter((r) => !hidden.has(r.arm));
  if (own.layer) own.layer = own.layer.filter((l) => !l.data.name || own.datasets[l.data.name]?.length);
  if (!own.layer?.some((l) => l.data.name) && !own.datasets.bars?.length) {
    box.setAttribute("aria-busy", "false");
    return void box.replaceChildren();
  }
  const width = Math.max(240, box.clientWidth);
  const has = { work: (r) => r.title && r.kind !== "wait", label: (r) => r.label !== undefined };
  if (own.facet) own.spec.layer = own.spec.layer.filter((l) => own.datasets.bars.some(has[l.name] ?? ((r) => r.kind === l.name)));
  if (own.facet) own.spec.width = width - 70;
  else own.width = width;
  const made = html("div", {});
  const config = DATA.themes[dark.matches ? "dark" : "light"];
  const drawn = await vegaEmbed(made, own, { config, ast: true, actions: false, renderer: "svg", tooltip: () => {} });
  if (turn !== box.turn) return drawn.finalize();
  box.drawn?.finalize();
  box.drawn = drawn;
  const marks = [...made.querySelectorAll("svg [aria-roledescription]")].filter((e) => told(e)?.title);
  for (const mark of marks) {
    const { title, tips } = told(mark);
    mark.setAttribute("tabindex", "-1");
    mark.setAttribute("role", "img");
    mark.classList.add("mark");
    mark.setAttribute("aria-label", `${title}: ${tips.map(([what, value]) => `${what} ${value}`).join(", ")}`);
  }
  marks[0]?.setAttribute("tabindex", "0");
  made.querySelector(".vega-embed, svg")?.setAttribute("aria-label", name);
  made.querySelector("svg")?.setAttribute("role", "group");
  box.replaceChildren(made);
  box.setAttribute("aria-busy", "false");
  box.style.minHeight = `${box.offsetHeight}px`; // so that the page does not jump when it is drawn again
}
const told = (element) => element?.__data__?.datum;

function tell(mark, x, y) {
  const { title, tips } = told(mark);
  tip.replaceChildren();
  html("b", {}, tip, title);
  const list = html("dl", {}, tip);
  for (const [name, value] of tips) {
    html("dt", {}, list, name);
    html("dd", {}, list, value);
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 14 + height > innerHeight ? Math.max(4, y - height - 10) : y + 14}px`;
}
const over = (event) => event.target.closest?.(".mark");
const focused = () => document.activeElement?.classList.contains("mark");
addEventListener("pointermove", (event) => (over(event) ? tell(over(event), event.clientX, event.clientY) : focused() || (tip.hidden = true)));
function tellOf(mark) {
  if (!mark?.classList?.contains("mark")) return void (tip.hidden = true);
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
  if (!event.target.classList?.contains("mark") || !(event.key in steps)) return;
  event.preventDefault();
  const all = [...event.target.closest("svg").querySelectorAll(".mark")];
  const next = all[(all.indexOf(event.target) + steps[event.key] + all.length) % all.length];
  event.target.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
});
// What takes time in a step.
function kindsLegend(legend) {
  legend.replaceChildren();
  for (const [name, colour] of [...Object.entries(DATA.kinds), ["waiting", ""]]) {
    const entry = html("span", { class: "kind" }, legend);
    const box = html("i", { class: colour ? "" : "wait" }, entry);
    if (colour) box.style.background = colour;
    entry.append(name);
  }
}
// Below a box that scrolls sideways: that it does, while there is something to scroll to.
function scrollHint(box) {
  const hint = html("p", { class: "facts hint" });
  hint.textContent = "→ There are more columns: scroll the table sideways.";
  box.after(hint);
  const look = () => (hint.hidden = box.scrollWidth <= box.clientWidth + 1);
  new ResizeObserver(look).observe(box);
  if (box.firstElementChild) new ResizeObserver(look).observe(box.firstElementChild);
  look();
}
// Charts are drawn again for another width and for other colours.
function redrawn(again) {
  let width = innerWidth, due;
  addEventListener("resize", () => {
    clearTimeout(due);
    if (innerWidth !== width) due = setTimeout(() => ((width = innerWidth), again()), 100);
  });
  dark.addEventListener("change", again);
}
