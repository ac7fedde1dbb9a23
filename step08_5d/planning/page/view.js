// What one sees: controls, bars and dots. All numbers come from plan.js, or were embedded.
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

const short = (number) => {
  const [unit, name] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([each]) => number >= each) || [1, ""];
  return `${Number((number / unit).toPrecision(3))}${name}`;
};
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(1)} GB`;
const duration = (seconds) => (seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(1)} ms`);

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
  const of_memory = `${gigabytes(fullest)} of ${gigabytes(machine.memory)} predicted on the fullest rank`;
  if (fullest > machine.memory) say("bad", `Does not fit: ${of_memory}`);
  else if (fullest > MOST_FULL * machine.memory) say("tight", `Too tight: ${of_memory}; CUDA and NCCL need some, too`);
  else say("good", `Should fit: ${of_memory}`);
  const [binds, longest] = Object.entries(times).slice(1).reduce((most, each) => (each[1] > most[1] ? each : most));
  show_numbers({
    parameters: short(model.count.total),
    GPUs: layout.gpus.toLocaleString("en"),
    "tokens per batch": short(layout.dp * layout.micro_batch * layout.micro_batches * layout.seq),
    "time of a step": duration(seconds),
    "tokens/s/GPU": Math.round(plan.speed(layout, seconds)).toLocaleString("en"),
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
  const pieces = Object.entries(parts).filter(([, size]) => size > 0);
  const style = (name, size) => `width: ${(100 * size) / whole}%; background: ${COLOURS[name]}`;
  const spans = pieces.map(([name, size]) => make("span", { style: style(name, size), title: words(name, size) }));
  return make("div", { class: "bar" }, ...spans);
}

const swatch = (name) => make("span", { class: "swatch", style: `background: ${COLOURS[name]}` });
const row = (kind, ...cells) => make("tr", {}, ...cells.map((cell) => make(kind, {}, ...[cell].flat())));

function show_memory(model, layout, machine) {
  const stages = plan.fullest_ranks(model, layout).map((stage) => [stage, plan.of_stage(model, layout, stage)]);
  const whole = 1.02 * Math.max(machine.memory, ...stages.map(([, kinds]) => plan.total(kinds)));
  const bars = stages.map(([, kinds]) => bar(kinds, whole, (kind, size) => `${kind}: ${gigabytes(size)}`));
  const mark = (kind, size, title) => make("i", { class: kind, style: `left: ${(100 * size) / whole}%`, title });
  for (const each of bars) {
    each.append(mark("most", MOST_FULL * machine.memory, `${percent(MOST_FULL)} of the GPU's memory`));
    each.append(mark("", machine.memory, `the GPU's memory, ${gigabytes(machine.memory)}`));
  }
  const ends = { 0: "first stage", [layout.pp - 1]: "last stage" };
  const names = stages.length > 1 ? stages.map(([stage]) => ends[stage] || `stage ${stage}`) : ["a rank"];
  const rows = Object.keys(stages[0][1]).map((kind) =>
    row("td", [swatch(kind), kind], ...stages.map(([, kinds]) => gigabytes(kinds[kind]))),
  );
  rows.push(row("td", "all", ...stages.map(([, kinds]) => gigabytes(plan.total(kinds)))));
  const layers = plan.layers_of_ranks(model, layout), few = Math.min(...layers), many = Math.max(...layers);
  const uneven = few < many ? `Stages have ${few} to ${many} layers, the last one ${layers.at(-1)} and the head.` : "";
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

const RAMP = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"]; // viridis
const SIZE = 34; // of a cell

function colour(share) {
  const place = Math.min(0.999, Math.max(0, share)) * (RAMP.length - 1), index = Math.floor(place);
  return `color-mix(in srgb, ${RAMP[index + 1]} ${100 * (place - index)}%, ${RAMP[index]})`;
}

const in_order = (names) => [...new Set(names)].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));

function show_runs() {
  const dots = DOTS.filter((dot) => dot.grid === find("grid").value);
  const rows = in_order(dots.map((dot) => dot.row)), columns = in_order(dots.map((dot) => dot.column));
  const ended = dots.filter((dot) => dot.status === "ok");
  const value = (dot) => dot.mfu ?? dot.speed; // what a CPU reaches has no MFU
  const most = Math.max(...ended.map(value)), fastest = Math.max(...ended.map((dot) => dot.speed));
  const longest = (names) => Math.max(...names.map((name) => name.length));
  const left = 8 + 7 * longest(rows), top = 16 + 6 * longest(columns); // pixels for their names
  const [width, height] = [left + SIZE * columns.length + 0.7 * top, top + SIZE * rows.length + 4];
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
  for (const dot of dots) {
    const x = left + SIZE * (columns.indexOf(dot.column) + 0.5), y = top + SIZE * (rows.indexOf(dot.row) + 0.5);
    picture.append(draw_dot(dot, x, y, value(dot) / most, dot.speed / fastest));
  }
  find("dots").replaceChildren(picture);
  const ends = `${ended.length} of ${dots.length} runs ended; a cross failed. Click one for its numbers. `;
  const unit = ended.some((dot) => dot.mfu) ? `MFU up to ${percent(most)}` : `up to ${short(most)} tokens/s per rank`;
  const ramp = make("span", { class: "ramp", style: `background: linear-gradient(90deg, ${RAMP})` });
  const colours = ended.length ? ["Area: tokens per second. Colour: 0 ", ramp, ` ${unit}`] : [];
  find("legend").replaceChildren(ends, ...colours);
  const best = ended.find((dot) => value(dot) === most);
  find("detail").textContent = best ? `The best: ${described(best)}` : "";
}

function draw_dot(dot, x, y, share, size) {
  const r = dot.status === "ok" ? Math.max(2, (SIZE / 2 - 2) * Math.sqrt(size)) : 5;
  const shape =
    dot.status === "ok"
      ? make("circle", { class: "dot", cx: x, cy: y, r, fill: colour(share), tabindex: 0 })
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

function described(dot) {
  const words = [`${dot.row}, ${dot.column}`];
  if (dot.status !== "ok") return `${words}: ${dot.status} (${dot.line})`;
  if (dot.mfu) words.push(`MFU ${percent(dot.mfu)}` + (dot.predicted ? ` (predicted ${percent(dot.predicted)})` : ""));
  words.push(`${Math.round(dot.speed).toLocaleString("en")} tokens/s per rank`);
  if (dot.memory) words.push(gigabytes(dot.memory));
  return words.join(" · ");
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
