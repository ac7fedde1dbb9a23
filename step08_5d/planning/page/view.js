// What one sees: controls, bars and dots. All numbers come from plan.js, or were embedded; looks.js says how they look.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
plan.use(DATA.constants);
const { MODELS, MACHINES, RECOMPUTE, MOST_FULL } = DATA.constants;
const { COLOURS, NAMES, DOTS } = DATA;
const find = (id) => document.getElementById(id);

// An element: make("td", { title: "..." }, "text", another element, ...)
function make(name, attributes = {}, ...children) {
  const drawn = ["svg", "g", "rect", "circle", "path", "text", "title"].includes(name);
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// ---- controls: their values are the settings, and the address after # keeps them -----------------------------------

const SELECTS = {
  model: ["Model", Object.keys(MODELS)],
  gpu: ["GPU", Object.keys(MACHINES)],
  zero: ["ZeRO stage", [0, 1, 2, 3]],
  recompute: ["Recompute", RECOMPUTE],
};
const NUMBERS = {
  // label, and the powers of two at the ends of the slider
  dp: ["Data (dp)", 0, 14],
  tp: ["Tensor (tp)", 0, 7],
  pp: ["Pipeline (pp)", 0, 7],
  cp: ["Context (cp)", 0, 8],
  ep: ["Expert (ep)", 0, 8],
  seq: ["Sequence", 8, 20],
  micro_batch: ["Micro-batch", 0, 7],
  micro_batches: ["Micro-batches", 0, 12],
};
const ORDER = ["model", "gpu", ...Object.keys(NUMBERS), "zero", "recompute"];
const START = { model: "llama3-8b", gpu: "H100", dp: 32, tp: 2, seq: 4096, micro_batches: 8, zero: 1 };

function build_controls() {
  const given = { ...START, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  for (const name of ORDER) {
    const label = make("label", { for: name }, (SELECTS[name] || NUMBERS[name])[0]);
    if (SELECTS[name]) {
      const values = SELECTS[name][1].map(String);
      const select = make("select", { id: name }, ...values.map((value) => make("option", {}, value)));
      if (values.includes(String(given[name]))) select.value = given[name];
      label.append(select);
    } else {
      const [, min, max] = NUMBERS[name];
      const number = make("input", { id: name, type: "number", min: 1, value: given[name] || 1 });
      const slider = make("input", { type: "range", min, max, "aria-label": `${NUMBERS[name][0]}, powers of two` });
      slider.value = Math.log2(number.value);
      slider.addEventListener("input", () => (number.value = 2 ** slider.value));
      number.addEventListener("input", () => (slider.value = Math.log2(number.value)));
      label.append(slider, number);
    }
    find("controls").append(label);
  }
}

function settings() {
  const values = {};
  for (const name of ORDER) values[name] = find(name).value;
  for (const name of [...Object.keys(NUMBERS), "zero"]) {
    values[name] = Math.max(name === "zero" ? 0 : 1, Math.floor(Number(values[name])) || 0);
  }
  return values;
}

// ---- one layout ----------------------------------------------------------------------------------------------------

function show_layout() {
  const values = settings(), model = MODELS[values.model], machine = MACHINES[values.gpu];
  const layout = plan.layout_of(values), refusal = plan.refusal(values.model, model, layout);
  history.replaceState(null, "", `#${new URLSearchParams(values)}`);
  find("costs").hidden = Boolean(refusal);
  if (refusal) return say("bad", `Step 8 refuses it: ${refusal}`);
  const fullest = plan.total(plan.memory(model, layout));
  const times = plan.times(model, layout, machine), seconds = plan.total(times);
  say(...verdict(fullest, machine.memory, MOST_FULL));
  const [binds, longest] = longest_of_the_rest(times);
  show_numbers({
    parameters: short(model.count.total),
    GPUs: thousands(layout.gpus),
    "tokens per batch": short(layout.dp * layout.micro_batch * layout.micro_batches * layout.seq),
    "time of a step": duration(seconds),
    "tokens/s/GPU": thousands(plan.speed(layout, seconds)),
    MFU: percent(plan.mfu(model, layout, seconds, machine)),
    "most of the rest of the step": `${NAMES[binds]} (${percent(longest / seconds)})`,
  });
  show_memory(model, layout, machine);
  show_time(times, seconds);
  find("command").textContent = plan.command(values.model, layout, machine);
}

function say(kind, line) {
  find("verdict").className = kind;
  find("verdict").textContent = line;
}

function show_numbers(values) {
  const pairs = Object.entries(values);
  const tiles = pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  find("numbers").replaceChildren(...tiles);
}

// A bar of parts: {name: number}, of which `whole` would fill it
function bar(parts, whole, words) {
  const style = (name, width) => `width: ${width}%; background: ${COLOURS[name]}`;
  const spans = pieces(parts, whole).map(([name, size, width]) =>
    make("span", { style: style(name, width), title: words(name, size) }),
  );
  return make("div", { class: "bar" }, ...spans);
}

const swatch = (name) => make("span", { class: "swatch", style: `background: ${COLOURS[name]}` });
const row = (kind, ...cells) => make("tr", {}, ...cells.map((cell) => make(kind, {}, ...[cell].flat())));

function show_memory(model, layout, machine) {
  const stages = plan.fullest_ranks(model, layout).map((stage) => [stage, plan.of_stage(model, layout, stage)]);
  const held = stages.map(([, kinds]) => plan.total(kinds));
  const { whole, most, all } = memory_scale(held, machine.memory, MOST_FULL);
  const bars = stages.map(([, kinds]) => bar(kinds, whole, (kind, size) => `${kind}: ${gigabytes(size)}`));
  const mark = (kind, place, title) => make("i", { class: kind, style: `left: ${place}%`, title });
  for (const each of bars) {
    each.append(mark("most", most, `${percent(MOST_FULL)} of the GPU's memory`));
    each.append(mark("", all, `the GPU's memory, ${gigabytes(machine.memory)}`));
  }
  const ends = { 0: "first stage", [layout.pp - 1]: "last stage" };
  const names = stages.length > 1 ? stages.map(([stage]) => ends[stage] || `stage ${stage}`) : ["a rank"];
  const rows = Object.keys(stages[0][1]).map((kind) =>
    row("td", [swatch(kind), kind], ...stages.map(([, kinds]) => gigabytes(kinds[kind]))),
  );
  rows.push(row("td", "all", ...held.map(gigabytes)));
  const uneven = unevenness(plan.layers_of_ranks(model, layout));
  find("memory").replaceChildren(...bars, make("table", {}, row("th", "", ...names), ...rows), make("em", {}, uneven));
}

function show_time(times, seconds) {
  const there = Object.entries(times).filter(([, each]) => each > 0);
  const rows = there.map(([name, each]) =>
    row("td", [swatch(name), NAMES[name]], duration(each), percent(each / seconds)),
  );
  rows.push(row("td", "the step", duration(seconds), ""));
  const drawn = bar(times, seconds, (name, each) => `${NAMES[name]}: ${duration(each)}`);
  find("time").replaceChildren(drawn, make("table", {}, ...rows));
}

// ---- many runs -----------------------------------------------------------------------------------------------------

function show_runs() {
  const dots = DOTS.filter((dot) => dot.grid === find("grid").value);
  const { rows, columns, left, top, width, height, marks } = picture_of(dots), { ends, unit, detail } = legend_of(dots);
  const picture = make("svg", { width, height });
  columns.forEach((name, x) => {
    const transform = `translate(${left + SIZE * (x + 0.55)}, ${top - 6}) rotate(-55)`;
    picture.append(make("text", { transform }, name));
  });
  rows.forEach((name, row) => {
    const y = top + SIZE * row;
    picture.append(make("text", { x: 0, y: y + 0.6 * SIZE }, name));
    const cells = columns.map((_, x) => ({ x: left + SIZE * x, y, width: SIZE, height: SIZE, class: "cell" }));
    picture.append(...cells.map((place) => make("rect", place)));
  });
  picture.append(...marks.map(draw_dot));
  find("dots").replaceChildren(picture);
  const ramp = make("span", { class: "ramp", style: `background: linear-gradient(90deg, ${RAMP})` });
  const colours = unit ? ["Area: tokens per second. Colour: 0 ", ramp, ` ${unit}`] : [];
  find("legend").replaceChildren(ends, ...colours);
  find("detail").textContent = detail;
}

function draw_dot({ dot, x, y, r, fill }) {
  const shape =
    dot.status === "ok"
      ? make("circle", { class: "dot", cx: x, cy: y, r, fill, tabindex: 0 })
      : make("path", { class: "dot cross", d: `M${x - r},${y - r} l10,10 m-10,0 l10,-10`, tabindex: 0 });
  shape.append(make("title", {}, described(dot)));
  const choose = () => {
    document.querySelectorAll(".chosen").forEach((each) => each.classList.remove("chosen"));
    shape.classList.add("chosen");
    find("detail").textContent = described(dot);
  };
  for (const event of ["click", "focus"]) shape.addEventListener(event, choose); // focus: with the keyboard
  return shape;
}

// ---- begin ---------------------------------------------------------------------------------------------------------

function open_view(name) {
  for (const view of ["layout", "runs"]) {
    find(view).hidden = view !== name;
    find(`show-${view}`).setAttribute("aria-pressed", view === name);
  }
}

build_controls();
find("controls").addEventListener("input", show_layout);
find("show-layout").addEventListener("click", () => open_view("layout"));
find("show-runs").addEventListener("click", () => open_view("runs"));
find("grid").append(...[...new Set(DOTS.map((dot) => dot.grid))].map((name) => make("option", {}, name)));
find("grid").addEventListener("input", show_runs);
open_view("layout");
show_layout();
show_runs();
