// Words, sizes, places and colours of what one sees, from numbers alone; view.js makes elements of them.
"use strict";

const short = (number) => {
  const [unit, name] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([each]) => number >= each) || [1, ""];
  return `${Number((number / unit).toPrecision(3))}${name}`;
};
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(1)} GB`;
const duration = (seconds) => (seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(1)} ms`);
const thousands = (number) => Math.round(number).toLocaleString("en");

// ---- one layout ----------------------------------------------------------------------------------------------------

// Whether it fits: a class of style.css, and a line. `fullest`: bytes of the fullest rank, `memory`: of a GPU
function verdict(fullest, memory, most_full) {
  const of_memory = `${gigabytes(fullest)} of ${gigabytes(memory)} predicted on the fullest rank`;
  if (fullest > memory) return ["bad", `Does not fit: ${of_memory}`];
  if (fullest > most_full * memory) return ["tight", `Too tight: ${of_memory}; CUDA and NCCL need some, too`];
  return ["good", `Should fit: ${of_memory}`];
}

// What a step takes longest for, beside its computation, which comes first: [name, seconds]
const longest_of_the_rest = (times) =>
  Object.entries(times).slice(1).reduce((most, each) => (each[1] > most[1] ? each : most));

// The parts of a bar that `whole` would fill: [name, size, percent of the width]
const pieces = (parts, whole) =>
  Object.entries(parts).filter(([, size]) => size > 0).map(([name, size]) => [name, size, (100 * size) / whole]);

// What fills the bars of ranks that hold so many bytes, and where on them, in percent, the two marks stand
function memory_scale(held, memory, most_full) {
  const whole = 1.02 * Math.max(memory, ...held);
  return { whole, most: (100 * most_full * memory) / whole, all: (100 * memory) / whole };
}

// "" or a sentence on the layers of a pipeline's stages
function unevenness(layers) {
  const few = Math.min(...layers), many = Math.max(...layers);
  return few < many ? `Stages have ${few} to ${many} layers, the last one ${layers.at(-1)} and the head.` : "";
}

// ---- many runs -----------------------------------------------------------------------------------------------------

const RAMP = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"]; // viridis
const SIZE = 34; // of a cell, pixels
const ended = (dots) => dots.filter((dot) => dot.status === "ok");
const value = (dot) => dot.mfu ?? dot.speed; // what a CPU reaches has no MFU
const in_order = (names) => [...new Set(names)].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));

function colour(share) {
  const place = Math.min(0.999, Math.max(0, share)) * (RAMP.length - 1), index = Math.floor(place);
  return `color-mix(in srgb, ${RAMP[index + 1]} ${100 * (place - index)}%, ${RAMP[index]})`;
}

// The picture of these runs: its size, the names of rows and columns and where they stand, and of each dot its middle,
// radius and colour. Its area, not its radius, is as large as the speed; the smallest can still be clicked
function picture_of(dots) {
  const rows = in_order(dots.map((dot) => dot.row)), columns = in_order(dots.map((dot) => dot.column));
  const longest = (names) => Math.max(...names.map((name) => name.length));
  const left = 8 + 7 * longest(rows), top = 16 + 6 * longest(columns); // pixels for their names
  const best = Math.max(...ended(dots).map(value)), fastest = Math.max(...ended(dots).map((dot) => dot.speed));
  const marks = dots.map((dot) => {
    const x = left + SIZE * (columns.indexOf(dot.column) + 0.5), y = top + SIZE * (rows.indexOf(dot.row) + 0.5);
    if (dot.status !== "ok") return { dot, x, y, r: 5 };
    const r = Math.max(2, (SIZE / 2 - 2) * Math.sqrt(dot.speed / fastest));
    return { dot, x, y, r, fill: colour(value(dot) / best) };
  });
  const [width, height] = [left + SIZE * columns.length + 0.7 * top, top + SIZE * rows.length + 4];
  return { rows, columns, left, top, width, height, marks };
}

// What stands above it: how many ended, what a full colour is, and the best run
function legend_of(dots) {
  const some = ended(dots), best = some.reduce((most, dot) => (most && value(most) >= value(dot) ? most : dot), null);
  const ends = `${some.length} of ${dots.length} runs ended; a cross failed. Click one for its numbers. `;
  if (!best) return { ends, unit: "", detail: "" };
  const up_to = best.mfu ? `MFU up to ${percent(best.mfu)}` : `up to ${short(best.speed)} tokens/s per rank`;
  return { ends, unit: up_to, detail: `The best: ${described(best)}` };
}

function described(dot) {
  const words = [`${dot.row}, ${dot.column}`];
  if (dot.status !== "ok") return `${words}: ${dot.status} (${dot.line})`;
  if (dot.mfu) words.push(`MFU ${percent(dot.mfu)}` + (dot.predicted ? ` (predicted ${percent(dot.predicted)})` : ""));
  words.push(`${thousands(dot.speed)} tokens/s per rank`);
  if (dot.memory) words.push(gigabytes(dot.memory));
  return words.join(" · ");
}

const looks = { short, percent, gigabytes, duration, verdict, longest_of_the_rest, pieces };
Object.assign(looks, { memory_scale, unevenness, colour, picture_of, legend_of, described });
if (typeof module !== "undefined") module.exports = looks; // in node, for the test
