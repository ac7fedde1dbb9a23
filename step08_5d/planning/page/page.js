// Sliders, and what one sees of a layout. All numbers are words that Python has written (grid.py): here they are looked
// up, shown as they are, and handed to style.css, which gives bars their widths.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const { choices, stops, lines, ends, names, colours, memory } = DATA, CHOICES = Object.keys(stops);
const find = (id) => document.getElementById(id);

// An element: make("td", { title: "..." }, "text", another element, ...)
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// ---- lines: the first word has a character for the stop of each choice ----------------------------------------------

function layout_of(line) {
  const words = lines[line].split(" "), take = (some) => Object.fromEntries(some.map((name) => [name, words.shift()]));
  const layout = { ...take(DATA.of_layout), ends: ends.map(() => take(DATA.of_end)), stages: [], values: {} };
  while (words.length) layout.stages.push(take(DATA.of_stage));
  CHOICES.forEach((name, place) => (layout.values[name] = stops[name][stop_at(layout.stops, place)]));
  return layout;
}

const stop_at = (line, place) => line.charCodeAt(place) - DATA.first;
const with_stop = (line, place, stop) =>
  line.slice(0, place) + String.fromCharCode(DATA.first + stop) + line.slice(place + 1);

// The line with these stops, or the nearest in steps of sliders; of equally near ones the best. Those at the places
// `fixed` are kept; undefined if there is no such line
function nearest(wanted, fixed) {
  let found, least = Infinity;
  lines.forEach((line, index) => {
    if (fixed.some((place) => line[place] !== wanted[place])) return;
    const apart = CHOICES.reduce((sum, _, place) => sum + Math.abs(stop_at(line, place) - stop_at(wanted, place)), 0);
    if (apart < least) [found, least] = [index, apart];
  });
  return found;
}

// ---- controls --------------------------------------------------------------------------------------------------------

let shown = 0; // line

function build_controls() {
  find("title").append(DATA.title);
  for (const [name, line] of Object.entries(DATA.picks)) {
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", () => show(line, ""));
    find("picks").append(button);
  }
  CHOICES.forEach((name, place) => {
    const last = stops[name].length - 1, slider = make("input", { id: name, type: "range", min: 0, max: last });
    const label = make("label", {}, choices[name], slider, make("output", { id: `${name}-value` }));
    slider.addEventListener("input", () => move(name, place, Number(slider.value)));
    label.hidden = !last;
    find("sliders").append(label);
  });
}

function move(name, place, stop) {
  const before = layout_of(shown), line = nearest(with_stop(before.stops, place, stop), [place]), now = layout_of(line);
  const others = CHOICES.filter((other) => other !== name && before.values[other] !== now.values[other]);
  const change = (other) => `${choices[other]} is now ${now.values[other]} instead of ${before.values[other]}`;
  show(line, others.length ? `With ${choices[name]} ${now.values[name]}, ${others.map(change).join(", ")}.` : "");
}

// The layout that the address names after #, or the nearest
function open_address() {
  const given = new URLSearchParams(location.hash.slice(1)), named = [];
  let wanted = lines[0];
  CHOICES.forEach((name, place) => {
    const stop = stops[name].map(String).indexOf(given.get(name));
    if (stop < 0) return;
    wanted = with_stop(wanted, place, stop);
    named.push(place);
  });
  const line = nearest(wanted, named);
  if (line >= 0) show(line, "");
  else show(nearest(wanted, []), "There is no layout as the address names it: this one is the nearest.");
}

// ---- one layout ------------------------------------------------------------------------------------------------------

const VERDICTS = { good: "Should fit", tight: "Too tight, as CUDA and NCCL need some, too", bad: "Does not fit" };
const joined = (words) => [...new Set(words)].join(" ... ");
const row = (kind, ...cells) => make("tr", {}, ...cells.map((cell) => make(kind, {}, ...[cell].flat())));
const swatch = (name) => make("span", { class: "swatch", style: `background: ${colours[name]}` });

function show(line, said) {
  const layout = layout_of((shown = line)), { values } = layout, range = (name) => joined(layout.ends.map((end) => end[name]));
  CHOICES.forEach((name, place) => {
    find(name).value = stop_at(layout.stops, place);
    find(`${name}-value`).textContent = values[name];
  });
  history.replaceState(null, "", `#${new URLSearchParams(values)}`);
  find("said").textContent = said;
  find("verdict").className = layout.fits;
  find("verdict").textContent = `${VERDICTS[layout.fits]}: ${layout.held} of ${memory.all} GB on the fullest rank`;
  const waits = ends.map((name, end) => [`${name} waits for`, DATA.binds[layout.ends[end].binds]]);
  show_numbers([
    ["time of a step", `${range("step")} s`],
    ["MFU", range("mfu")],
    ["tokens/s/GPU", range("speed")],
    ["slower than the best, at worst", layout.regret],
    ["micro-batches", layout.micro_batches],
    ...waits,
  ]);
  show_memory(layout.stages, DATA.pipelines[values.pp] || "");
  show_time(layout.ends);
  const given = Object.entries(DATA.flags).filter(([name, [, left_out]]) => values[name] !== left_out);
  find("command").textContent = [DATA.command, ...given.map(([name, [flag]]) => `${flag} ${values[name]}`)].join(" ");
}

function show_numbers(numbers) {
  const tiles = numbers.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  find("numbers").replaceChildren(...tiles);
}

// A bar of parts, [[name, size]], behind its label. Widths are sizes over `whole`: see style.css
function bar(label, parts, whole, unit, ...marks) {
  const spans = parts.map(([name, size]) => {
    const style = `--size: ${size}; background: ${colours[name]}`;
    return make("span", { style, title: `${names[name] || name}: ${size} ${unit}` });
  });
  const drawn = make("div", { class: "bar", style: `--whole: ${whole}` }, ...spans, ...marks);
  return make("div", { class: "labelled" }, make("small", {}, label), drawn);
}

const parts_of = (words, some) => some.filter((name) => words[name] !== "0").map((name) => [name, words[name]]);

function show_memory(stages, divided) {
  const kinds = DATA.of_stage.slice(2), { all, bar: whole, "may be filled": may } = memory;
  const mark = (size, words, name) => make("i", { class: name, style: `--size: ${size}`, title: `${words}: ${size} GB` });
  const marks = () => [mark(may, "may be filled", "may"), mark(all, "all", "")];
  const head = stages.map(({ stage }) => (stages.length > 1 ? `stage ${stage}` : "any rank"));
  const bars = stages.map((stage, place) => bar(head[place], parts_of(stage, kinds), whole, "GB", ...marks()));
  const rows = kinds.map((kind) => row("td", [swatch(kind), kind], ...stages.map((stage) => stage[kind])));
  rows.push(row("td", "all", ...stages.map((stage) => stage.all)));
  find("memory").replaceChildren(...bars, make("table", {}, row("th", "GB", ...head), ...rows), make("em", {}, divided));
}

function show_time(each) {
  const causes = DATA.of_end.slice(4), whole = `max(${each.map((end) => end.step).join(", ")})`;
  const bars = each.map((end, place) => bar(ends[place], parts_of(end, causes), whole, "s"));
  const some = causes.filter((name) => each.some((end) => end[name] !== "0"));
  const rows = some.map((name) => row("td", [swatch(name), names[name]], ...each.map((end) => end[name])));
  rows.push(row("td", "the step", ...each.map((end) => end.step)));
  find("time").replaceChildren(...bars, make("table", {}, row("th", "s", ...ends), ...rows));
}

build_controls();
open_address();
