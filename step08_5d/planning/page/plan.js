// The planner's formulas once more, so that the page needs no server. Functions have the names and the letters of the
// Python that they repeat, which also explains them; where Python has one name in two modules, here they are told apart
// (`rank_parameters`). A test compares both on random settings. Memory is in share.js and memory.js, which come before.
//
// The shapes of models, machines, habits and published bandwidths come from Python, as `constants` (write.py).
"use strict";

let constants; // MODELS, MACHINES, OURS, WIDTHS, BUS_GB_PER_S, ...
const use = (values) => (constants = values);
const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
const total = (kinds) => sum(Object.values(kinds));

// ---- common/counts.py: count_parameters(model) comes from Python, as model.count -----------------------------------

// FLOPs of the forward of one sequence
function count_flops(model, seq_len) {
  const { count } = model, moe_layers = expert_layers(model);
  const weights =
    model.layers * count.attention + (model.layers - moe_layers) * count.dense_mlp + moe_layers * count.moe_active;
  const attention_core = model.layers * 2 * (2 * seq_len * seq_len * model.heads * model.head_width);
  const linear = 2 * seq_len * weights, head = 2 * seq_len * model.vocab * model.hidden;
  return { linear, attention_core, head, model: 3 * (linear + attention_core + head) };
}

// ---- step08_5d/cost.py ---------------------------------------------------------------------------------------------

// A layout: seq, dp, tp, pp, cp, ep, zero, micro_batch, micro_batches and recompute, and what follows from them
function layout_of(values) {
  const { seq, dp, tp, pp, cp, ep, micro_batch } = values;
  const copies = dp * cp;
  return { ...values, copies, edp: (copies * tp) / ep, tokens: (micro_batch * seq) / cp, gpus: copies * tp * pp };
}

const expert_layers = (model) => (model.experts ? model.layers - model.dense_layers : 0);

function rank_parameters(model, layout, ends = true) {
  const { count } = model, expert = 3 * model.hidden * model.expert_ffn;
  const of_experts = expert * model.experts * expert_layers(model);
  let whole = count.norms + expert_layers(model) * (model.hidden * model.experts + expert * model.shared_experts);
  let divided = count.total - of_experts - whole;
  if (!ends) {
    whole -= model.hidden;
    divided -= count.embedding + count.head;
  }
  return [(divided / layout.tp + whole) / layout.pp, of_experts / layout.ep / layout.pp];
}

const sent = (op, size, ranks) => (((op === "all_reduce" ? 2 : 1) * (ranks - 1)) / ranks) * size;

// Of a stage in the middle: all but what stages send each other, whose time `times` takes from elsewhere
function messages(model, layout) {
  const [rest, of_experts] = rank_parameters(model, layout, false);
  const again = rest - ((model.tie_embeddings ? 1 : 2) * model.vocab + 1) * model.hidden;
  const [width, wide] = constants.WIDTHS;
  const runs = (layout.micro_batches * model.layers) / layout.pp;
  return [
    ...of_weights(rest, again, layout.copies, layout),
    ...of_weights(of_experts, of_experts, layout.edp, layout),
    ...context_messages(model, layout, width, wide, runs),
    ...of_tensors(model, layout, layout.tokens * model.hidden * width),
    ...expert_messages(model, layout, width, (layout.micro_batches * expert_layers(model)) / layout.pp),
  ];
}

function of_weights(size, again, ranks, layout) {
  if (ranks === 1 || !size) return [];
  const [narrow, wide] = constants.WIDTHS, dimension = "dp";
  if (!layout.zero) return [{ dimension, op: "all_reduce", bytes: sent("all_reduce", size * wide, ranks), count: 1 }];
  const each = layout.micro_batches, once = layout.pp > 1 || layout.zero < 3, part = (ranks - 1) / ranks;
  const result = [
    { dimension, op: "reduce_scatter", bytes: size * wide * part, count: layout.zero >= 2 ? each : 1 },
    { dimension, op: "all_gather", bytes: size * narrow * part, count: once ? 1 : each, hidden_by: "forward" },
  ];
  if (!once) result.push({ dimension, op: "all_gather", bytes: again * narrow * part, count: each });
  return result;
}

// step06_context_parallel/cost.py: the ring, zigzag. With more tensor ranks than K/V heads, each of these has one head
function context_messages(model, layout, beta, beta_sum, count) {
  const ranks = layout.cp, dimension = "cp", op = "send";
  if (ranks === 1) return [];
  const kv_heads = Math.max(1, Math.floor(model.kv_heads / layout.tp));
  const part = Math.floor((layout.micro_batch * layout.seq) / ranks) * kv_heads * model.head_width;
  return [
    { dimension, op, bytes: part * beta, count: count * 4 * (ranks - 1) },
    { dimension, op, bytes: part * beta_sum, count: count * 2 * ranks },
  ];
}

function of_tensors(model, layout, stream) {
  const { tp, pp } = layout, dimension = "tp", wide = constants.WIDTHS[1];
  if (tp === 1) return [];
  const sublayers = (2 * model.layers - expert_layers(model)) / pp;
  const bytes = ((tp - 1) / tp) * stream, each = layout.micro_batches;
  const beside_experts = model.hidden * (model.experts + 3 * model.shared_experts * model.expert_ffn);
  let whole = (2 * model.layers * model.hidden + expert_layers(model) * beside_experts) / pp;
  whole /= layout.zero ? layout.copies : 1;
  return [
    { dimension, op: "all_gather", bytes, count: each * 3 * sublayers },
    { dimension, op: "reduce_scatter", bytes, count: each * 2 * sublayers },
    { dimension, op: "all_reduce", bytes: sent("all_reduce", wide * whole, tp), count: 1 },
  ];
}

// step07_expert_parallel/cost.py
function expert_messages(model, layout, width, count) {
  const { ep } = layout, dimension = "ep", op = "all_to_all";
  if (ep === 1) return [];
  const rows = sent(op, model.top_k * (layout.tokens / layout.tp) * model.hidden * width, ep);
  return [
    { dimension, op, bytes: sent(op, 8 * model.experts, ep), count },
    { dimension, op, bytes: rows, count: 4 * count },
  ];
}

// ---- step08_5d/planning/time/speed.py, the pace of a pipeline under 1F1B --------------------------------------------

// The slowest rank: its layers, whether it has the head, and for how many micro-batches it waits
function pace(model, layout, layer, head) {
  const others = layers_of_ranks(model, layout), last = others.pop(), most = Math.max(0, ...others);
  if (last * layer + head >= most * layer)
    return { layers: last, has_head: 1, waits: (sum(others) * layer) / (last * layer + head) };
  return { layers: most, has_head: 0, waits: ((sum(others) - most + last) * layer + head) / (most * layer) };
}

// ---- step08_5d/planning/time/speed.py -------------------------------------------------------------------------------

function bus_bandwidth(op, gpus) {
  const table = constants.BUS_GB_PER_S[op], numbers = Object.keys(table).map(Number);
  gpus = Math.min(Math.max(gpus, Math.min(...numbers)), Math.max(...numbers));
  const below = Math.max(...numbers.filter((n) => n <= gpus)), above = Math.min(...numbers.filter((n) => n >= gpus));
  const share = above > below ? Math.log(gpus / below) / Math.log(above / below) : 0;
  return 1e9 * table[below] * (table[above] / table[below]) ** share;
}

function spans(layout, dimension, machine, order) {
  const axes = order.split(",");
  const first = { ep: layout.ep <= layout.tp ? "tp" : "cp", dp: layout.cp > 1 ? "cp" : "dp" }[dimension] || dimension;
  const before = axes.slice(0, axes.indexOf(first)).reduce((ranks, axis) => ranks * layout[axis], 1);
  const size = dimension === "dp" ? layout.copies : layout[dimension];
  const together = Math.min(size, Math.max(1, Math.floor(machine.gpus / before)));
  return [Math.ceil(size / together), together];
}

function seconds_of(message, layout, machine, habits) {
  const [nodes, together] = spans(layout, message.dimension, machine, habits.order);
  if (nodes === 1) return message.count * (habits.near_start + message.bytes / machine.near);
  const start = habits.far_start * (nodes - 1) ** habits.spread;
  const op = ["all_reduce", "reduce_scatter"].includes(message.op) ? message.op : "all_gather";
  const whole_nodes = (bus_bandwidth(op, nodes * machine.gpus) * machine.far) / constants.NETWORK;
  const speed = whole_nodes * (together / machine.gpus) ** habits.cards;
  return message.count * (start + message.bytes / Math.min(machine.near, speed));
}

// Seconds of a step by what they go to
function times(model, layout, machine, habits = constants.OURS) {
  const m = layout.micro_batches, mean = model.layers / layout.pp, narrow = constants.WIDTHS[0];
  const flops = count_flops(model, layout.seq), rate = machine.peak * habits.efficiency;
  const of_rank = layout.micro_batch / (layout.cp * layout.tp); // sequences
  const { AGAIN, CORE_AGAIN } = constants;
  const products =
    AGAIN[layout.recompute] * flops.linear + (CORE_AGAIN[layout.recompute] * flops.attention_core) / 2;
  const small_bytes = (layout.tokens / layout.tp) * (20 * model.hidden + 15 * model.ffn) * narrow;
  const again = AGAIN[layout.recompute] / 3, small = (again * habits.small * small_bytes) / machine.memory_bandwidth;
  const layer = ((products / model.layers) * of_rank) / rate + small;
  let head =
    (3 * flops.head * of_rank) / rate +
    (habits.small * 20 * layout.tokens * model.vocab) / layout.tp / machine.memory_bandwidth;
  const dp = [], exposed = { tp: 0, cp: 0, ep: 0, pp: 0, dp: 0 };
  for (const message of messages(model, layout)) {
    const time = seconds_of(message, layout, machine, habits);
    if (message.dimension === "dp") dp.push([message, time]);
    else exposed[message.dimension] += time;
  }
  let least = habits.launch, meanwhile = exposed.cp + exposed.ep;
  if (layout.pp > 1) {
    const [nodes] = spans(layout, "tp", machine, habits.order);
    least = Math.max(least, habits.paced * layout.tp ** habits.apart * nodes ** habits.crowd);
    meanwhile += exposed.tp;
  }
  const hops = layout.cp > 1 ? layout.cp : 0, launching = again * least * (1 + constants.RING_HOP * hops);
  let launch = Math.max(0, m * mean * (launching - layer) - meanwhile);
  const slowest = pace(model, layout, layer + (launch + total(exposed)) / (m * mean), head);
  const { layers, waits } = slowest, more = layers / mean;
  head *= slowest.has_head;
  launch *= more;
  for (const dimension in exposed) exposed[dimension] *= more;
  if (layout.pp > 1) {
    const start = spans(layout, "pp", machine, habits.order)[0] === 1 ? habits.near_start : habits.far_start;
    exposed.pp = m * ((2 * layout.tokens * model.hidden * narrow) / layout.tp / machine.far + 2 * start);
  }
  const forward = (layers * layer) / AGAIN[layout.recompute] + head / 3, both = layers * layer + head;
  exposed.dp = not_hidden(dp.map(([message, time]) => [message, more * time]), forward, both, habits);
  const compute = m * both, share = waits / (m + waits);
  const busy = compute + launch + total(exposed) - exposed.dp;
  const held = sum(rank_parameters(model, layout)) / (layout.zero ? layout.copies : 1);
  const update = (constants.UPDATE_BYTES * held) / machine.memory_bandwidth;
  return { compute, launch, ...exposed, bubble: (busy * share) / (1 - share), update };
}

// Seconds of messages between copies that hide behind no computation
function not_hidden(messages, forward, both, habits) {
  const free = { forward, backward: both - forward }, hidden = { forward: 0, backward: 0 };
  let exposed = 0;
  for (const [message, time] of messages) {
    const share = message.op === "all_gather" ? habits.prefetch : habits.hides;
    const during = message.hidden_by || "backward";
    const hides = Math.min(time, Math.max(0, share * free[during] * message.count - hidden[during]));
    hidden[during] += hides;
    exposed += time - hides;
  }
  return exposed;
}

function mfu(model, layout, seconds, machine) {
  const sequences = (layout.micro_batch * layout.micro_batches) / (layout.cp * layout.tp * layout.pp);
  return (count_flops(model, layout.seq).model * sequences) / seconds / machine.peak;
}

// Tokens per second of a GPU
const speed = (layout, seconds) => (layout.micro_batches * layout.tokens) / layout.tp / layout.pp / seconds;

// ---- the rules of stepNN/config.py, and search.py's command --------------------------------------------------------

// The line with which step 8 would refuse the layout, or ""
function refusal(name, model, layout) {
  const { seq, tp, pp, cp, ep } = layout, ranks = layout.copies * tp;
  const tokens = `--seq-len ${seq}${cp > 1 ? ` / --cp ${cp}` : ""}`;
  if (seq > model.max_positions)
    return `--seq-len ${seq} exceeds the ${model.max_positions} positions of --model ${name}`;
  if (model.heads % tp) return `--tp ${tp} does not divide --heads ${model.heads}`;
  if (model.ffn % tp) return `--tp ${tp} does not divide --ffn ${model.ffn}`;
  if (model.kv_heads % tp && tp % model.kv_heads)
    return `--tp ${tp} and --kv-heads ${model.kv_heads}: one must divide the other`;
  if (Math.floor(seq / cp) % tp) return `--tp ${tp} does not divide ${tokens}, as sequence parallelism needs`;
  if (pp > model.layers) return `--pp ${pp} with ${pp} stages in all needs as many --layers, not ${model.layers}`;
  if (seq % cp) return `--cp ${cp} does not divide --seq-len ${seq}`;
  if (cp > 1 && seq % (2 * cp))
    return `--cp ${cp} --cp-split zigzag makes ${2 * cp} parts, which does not divide --seq-len ${seq}`;
  if (!model.experts) return ep > 1 ? `--ep ${ep} needs --experts` : "";
  if (model.experts % ep) return `--ep ${ep} does not divide --experts ${model.experts}`;
  if (ranks % ep) return `--ep ${ep} does not divide the ${ranks} ranks of a stage (dp x cp x tp)`;
  return "";
}

function command(name, layout, machine) {
  const { gpus, micro_batch, recompute } = layout;
  let nodes = Math.ceil(gpus / machine.gpus);
  while (gpus % nodes) nodes++; // as many on every node
  const fewer = gpus / nodes === machine.gpus ? "" : ` --gpus-per-node ${gpus / nodes}`;
  const words = [`--model ${name} --dtype bfloat16 --seq-len ${layout.seq}`];
  words.push(`--global-batch ${layout.dp * micro_batch * layout.micro_batches} --micro-batch ${micro_batch}`);
  for (const degree of ["dp", "tp", "pp", "cp", "ep"]) {
    if (layout[degree] > 1) words.push(`--${degree} ${layout[degree]}`);
  }
  if (layout.zero) words.push(`--zero ${layout.zero}`);
  if (recompute !== "none") words.push(`--recompute ${recompute}`);
  const alone = `torchrun --nproc_per_node ${gpus} step08_5d/train.py`;
  return [nodes > 1 ? `sbatch --nodes ${nodes}${fewer} step08_5d/train.slurm` : alone, ...words].join(" ");
}

const plan = { use, layout_of, memory, of_stage, layers_of_ranks, fullest_ranks, total, times, mfu, speed, refusal, command };
if (typeof module !== "undefined") module.exports = plan; // in node, for the test
