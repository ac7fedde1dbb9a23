// The formulas of memory once more; see plan.js, whose `constants`, `sum` and `total` they use. Python's ledgers have
// tensors by name. Here an event is the sums of theirs: [there, left, weight, stored, communication, arrived]
//   there          bytes that it makes, and what events before it should have left, but have not
//   left           bytes that stay when it is over; negative if more is released than made
//   weight         of these, gradients of weights while they are added to the sums; stored: how many
//   communication  of all bytes: in buffers that a collective has filled or is sending; arrived: those that stay
"use strict";

// ---- step08_5d/planning/memory/sizes.py -----------------------------------------------------------------------------

function sizes_of(model, layout) {
  const [w, high] = constants.WIDTHS, { tokens: t, tp } = layout, d = model.head_width;
  const stream = (t * model.hidden) / tp;
  return {
    whole: t * model.hidden * w,
    stream: stream * w,
    wide: stream * high,
    queries: ((t * model.heads * d) / tp) * w,
    keys: ((t * Math.max(model.kv_heads, tp) * d) / tp) * w,
    statistics: ((t * model.heads) / tp) * high,
    one: layout.micro_batch === 1,
    as_gathered: layout.micro_batch === 1 ? t * model.hidden * w : 0,
    w,
  };
}

// ---- step08_5d/planning/memory/layer.py, linear.py ------------------------------------------------------------------

function mlp(model, layout, size, ffn, divided = true) {
  const tp = divided ? layout.tp : 1, tokens = divided ? layout.tokens : layout.tokens / layout.tp;
  const inner = ((tokens * ffn) / tp) * size.w, weight = ((model.hidden * ffn) / tp) * size.w;
  return [
    ...row_backward(size, inner, weight, tp, false),
    [2 * inner, -inner],
    [inner, -inner],
    ...columns(size, [inner, inner], [weight, weight], tp),
  ];
}

function row_backward(size, inner, weight, tp, input_stays) {
  const [gathered, as_gathered] = tp > 1 ? [size.whole, size.as_gathered] : [0, 0];
  const gather = tp > 1 ? [[2 * gathered - as_gathered, 0, 0, 0, gathered]] : [];
  return [...gather, [gathered + inner + weight, input_stays ? inner : 0, weight, 1, as_gathered]];
}

function columns(size, inner, weights, tp) {
  if (tp > 1) {
    const x = size.whole, there = 3 * x + size.stream - size.as_gathered + sum(weights);
    return [
      [3 * x, 0, 0, 0, x],
      [there, -sum(inner), sum(weights), weights.length, 2 * x + size.stream, size.stream],
    ];
  }
  const result = [];
  for (let index = inner.length - 1; index >= 0; index--) {
    const weight = weights[index];
    result.push([size.stream + weight, size.stream - inner[index], weight, 1]);
    if (index < inner.length - 1) result.push([size.stream + weight, -size.stream]);
  }
  result.at(-2)[1] -= size.stream; // the input
  return result;
}

function norm(size, added, arrived) {
  const { stream: x, wide } = size, cast = [wide, wide - x, 0, 0, arrived];
  const result = [[2 * x, -x, 0, 1, arrived], cast, [2 * wide, 0], [4 * wide, -wide], [x, x - wide]];
  return added ? [...result, [x, -x]] : result;
}

function attention(model, layout, size) {
  const { queries: q, keys: k } = size, { tp } = layout;
  const [of_q, of_k] = [model.heads, Math.max(model.kv_heads, tp)].map(
    (number) => ((model.hidden * number * model.head_width) / tp) * size.w,
  );
  const ratio = size.wide / size.stream, selective = layout.recompute === "selective";
  const kept = 2 * q + 2 * k + (selective ? 0 : size.statistics);
  const moving = layout.cp > 1 ? ring_buffers(layout.cp, k) : 0;
  let there = q + 2 * k;
  if (layout.cp > 1) there = moving + ratio * (q + 4 * k) + Math.max(q + k, q / 2 + 2 * k);
  if (selective) there += q + size.statistics + (layout.cp > 1 ? 2 * k : 0);
  return [
    ...row_backward(size, q, of_q, tp, true),
    [there, q + 2 * k - q - kept, 0, 0, moving],
    [q * (2 * ratio + 1.5), 0],
    ...columns(size, [q, k, k], [of_q, of_k, of_k], tp),
  ];
}

// step06_context_parallel/cost.py, buffers: in the ring's backward; `keys` in bytes
function ring_buffers(ranks, keys) {
  const [beta, beta_sum] = constants.WIDTHS, part = keys / beta;
  return 2 * part * (Math.min(2, ranks - 1) * beta + 2 * beta_sum);
}

function experts_backward(model, layout, size) {
  const ratio = size.wide / size.stream, rows = model.top_k * size.stream;
  const inner = ((model.top_k * layout.tokens) / layout.tp) * model.expert_ffn * size.w;
  const weight = (model.experts / layout.ep) * model.hidden * model.expert_ffn * size.w;
  const away = layout.ep > 1, arrived = away ? rows : 0;
  const home = away ? [[rows, 0], [rows, 0, 0, 0, rows]] : [], travel = away ? [[rows, 0], [rows, 0]] : [];
  const shared = model.shared_experts ? mlp(model, layout, size, model.shared_experts * model.expert_ffn, false) : [];
  for (const each of shared) [each[2], each[3], each[4], each[5]] = [each[2] || 0, each[3] || 0, arrived, arrived];
  return [
    [size.wide + 2 * ratio * rows, 0],
    ...home,
    [inner + weight, -rows, weight, 1],
    [2 * inner, -inner],
    [inner, -inner],
    [rows + weight, rows - inner, weight, 1],
    [rows + weight, -inner, weight, 1],
    [rows, -rows],
    ...travel,
    ...shared,
    [ratio * rows + size.wide + size.stream, size.stream - rows, 0, 0, arrived],
    [size.wide, -size.wide, 0, 1],
  ];
}

function layer_backward(model, layout, size, experts) {
  const second = experts ? experts_backward(model, layout, size) : mlp(model, layout, size, model.ffn);
  const arrived = layout.tp > 1 ? size.stream : 0, first = attention(model, layout, size);
  if (layout.recompute === "full" && layout.tp > 1 && !experts) second.unshift([2 * size.whole - size.as_gathered, 0]);
  return [...second, ...norm(size, true, experts ? 0 : arrived), ...first, ...norm(size, true, arrived)];
}

// ---- step08_5d/planning/memory/ends.py ------------------------------------------------------------------------------

function head_backward(model, layout, size) {
  const [narrow, wide] = constants.WIDTHS, rows = Math.ceil(model.vocab / layout.tp), { RATIO, FEW_BYTES } = constants;
  const share = Math.floor(Math.floor((RATIO * model.hidden * wide) / narrow) / 16) * 16;
  const length = Math.max(16, share, Math.floor(FEW_BYTES / (rows * narrow)));
  const logits = Math.min(length, layout.tokens) * rows, matrix = rows * model.hidden;
  const copies = Math.max(2 * wide * logits, narrow * matrix);
  const [inputs, gathered] = layout.tp > 1 ? [size.stream + size.whole, size.as_gathered] : [size.stream, 0];
  const there = size.whole + wide * matrix + narrow * logits + copies;
  const loss = [there, size.whole + wide * matrix - inputs, 0, 0, gathered];
  const result = [loss, [narrow * matrix, -wide * matrix, narrow * matrix, 1]];
  if (layout.tp > 1) result.push([size.whole - size.as_gathered + size.stream, size.stream - size.whole]);
  return [...result, ...norm(size, false, layout.tp > 1 ? size.stream : 0)];
}

// ---- step08_5d/planning/memory/kept.py ------------------------------------------------------------------------------

function layer_activations(model, layout, recompute, experts) {
  const [width, high] = constants.WIDTHS, { tp } = layout, { hidden: h, head_width: d } = model;
  const tokens = layout.micro_batch * Math.floor(layout.seq / layout.cp);
  if (recompute === "full") return Math.floor((tokens * h * width) / tp);
  // step04_tensor_parallel/cost.py, block_activations
  const queries = model.heads * d, heads = (model.heads + 2 * Math.max(model.kv_heads, tp)) * d;
  const norms = Math.floor((2 * tokens * (h * (high + width) + high)) / tp);
  const inputs = Math.floor((2 * tokens * h * width) / tp);
  let attention = Math.floor((tokens * ((heads + queries) * width + model.heads * high)) / tp);
  if (recompute === "selective") attention -= Math.floor((tokens * model.heads * high) / tp);
  if (!experts) return norms + inputs + attention + Math.floor((4 * tokens * model.ffn * width) / tp);
  const mine = Math.floor(layout.tokens / tp), ffn = model.shared_experts * model.expert_ffn;
  const shared = ffn ? mine * (h + 4 * ffn) * width : 0;
  const of_experts = expert_activations(model, mine, mine * model.top_k, width, layout.ep);
  return norms + Math.floor(inputs / 2) + attention + of_experts + shared;
}

// step07_expert_parallel/cost.py, activations
function expert_activations(model, tokens, rows, width, ep) {
  const h = model.hidden, choices = model.top_k * tokens;
  let router = tokens * 4 * (h + model.experts + 1) + choices * (8 + 4 + 1);
  router += width < 4 ? 4 * model.experts * h : 0;
  const sorting = 3 * choices * 8 + tokens * 8, arrived = ep > 1 ? 2 * rows * 8 : 0;
  return router + sorting + arrived + rows * (h + 4 * model.expert_ffn) * width + choices * (h * width + 4);
}

function kept_by(model, layout, rank, share, size) {
  let layers = 0;
  for (let index = share.layers[0]; index < share.layers[1]; index++)
    layers += layer_activations(model, layout, layout.recompute, has_experts(model, index));
  const tables = ((2 * layout.seq) / layout.cp) * model.head_width * constants.WIDTHS[1];
  const data = 8 * layout.tokens * ((rank === 0) + (rank === layout.pp - 1)); // tokens or targets, or both
  const received = rank && layout.recompute !== "full" ? size.stream : 0;
  return [layers, tables + data, received];
}

// ---- step08_5d/planning/memory/peak.py ------------------------------------------------------------------------------

// Bytes by kind of the fullest rank
function memory(model, layout) {
  const found = fullest_ranks(model, layout).map((rank) => of_stage(model, layout, rank));
  return found.reduce((most, each) => (total(each) > total(most) ? each : most));
}

// Bytes by kind at the fullest moment of a rank
function of_stage(model, layout, rank) {
  const share = share_of(model, layout, rank), [narrow, wide, states] = constants.WIDTHS;
  const at_rest = (width, first) => {
    const ranks = layout.zero >= first ? [layout.copies, layout.edp] : [1, 1];
    return width * (share.shards[0] / ranks[0] + share.shards[1] / ranks[1]);
  };
  const bytes = (state) => narrow * state.gathered + wide * state.gradients + state.there;
  const fullest = moments(model, layout, rank, share).reduce((one, other) => (bytes(other) > bytes(one) ? other : one));
  const rest = fullest.there - fullest.communication, activations = Math.min(rest, fullest.kept);
  const sizes = [at_rest(narrow, 3) + narrow * fullest.gathered, wide * fullest.gradients, at_rest(states, 1)];
  const held = Object.fromEntries(constants.KINDS.map((kind, index) => [kind, sizes[index]]));
  return { ...held, communication: fullest.communication, activations, working: rest - activations };
}

function moments(model, layout, rank, share) {
  const size = sizes_of(model, layout), [of_layers, tables, received] = kept_by(model, layout, rank, share, size);
  const beside = tables + received, each = of_layers + beside, result = [];
  const flights = Math.min(layout.pp - rank, layout.micro_batches);
  const cases = [["first", flights]];
  if (layout.micro_batches > flights) cases.push(["later", flights]);
  else if (flights > 1) cases.push(["second", flights - 1]);
  const walks = walks_of(model, layout, share, size, each, beside);
  for (const [when, in_flight] of cases) {
    for (const { region, is_loss, some } of walks) {
      const messages = messages_of(layout, rank, when, is_loss, size);
      for (const [stored, [working, moving]] of some) {
        const gathered = share.gathered(region, !is_loss), gradients = share.gradients(stored, when !== "first");
        const there = (in_flight - 1) * each + working + messages;
        const communication = moving + messages + in_flight * received;
        result.push({ gathered, gradients, there, communication, kept: in_flight * (each - received) });
      }
    }
  }
  return result;
}

function messages_of(layout, rank, when, is_loss, size) {
  if (layout.pp === 1) return 0;
  const later = rank > 0 && when !== "first" ? 1 + Number(when === "later" && !is_loss) : 0;
  return ((rank < layout.pp - 1 ? 2 : 0) + later) * size.stream;
}

// ---- step08_5d/planning/memory/walks.py -----------------------------------------------------------------------------

function walks_of(model, layout, share, size, each, beside) {
  const matrix = Math.ceil(model.vocab / layout.tp) * model.hidden * size.w, tied = share.tied ? matrix : 0;
  const result = [], [start, stop] = share.layers, { recompute } = layout;
  if (share.is_last) {
    const region = share.regions.length - 1, [loss, ...others] = head_backward(model, layout, size);
    const statistics = (layout.tokens / layout.tp) * constants.WIDTHS[1];
    const running = each + size.wide + 2 * size.stream + statistics + (layout.tp > 1 ? size.whole : 0);
    result.push({ region, is_loss: true, some: fullest_of([loss], running, 0) });
    result.push({ region, is_loss: false, some: fullest_of(others, running + loss[1], 0) });
  }
  let below = beside;
  for (let index = start; index < stop; index++) {
    const experts = has_experts(model, index), region = index - start + Number(share.is_first);
    const border = [index - 1, index + 1].some((other) => has_experts(model, other) !== experts);
    if (index === start || index === stop - 1 || border) {
      const gradient = layout.pp > 1 && !share.is_last && index === stop - 1 ? 0 : size.stream;
      const full = recompute === "full";
      const whole = layer_activations(model, layout, full ? "none" : recompute, experts) + (full ? 2 * size.stream : 0);
      const some = layer_backward(model, layout, size, experts), stored = share.stored_before(region);
      result.push({ region, is_loss: false, some: fullest_of(some, below + whole + gradient + tied, stored) });
    }
    below += layer_activations(model, layout, recompute, experts);
  }
  if (share.is_first) {
    const { whole, stream } = size, before = size.one ? stream : 0, running = stream + tied;
    const gathered = [2 * whole - before, whole - stream, 0, 0, whole];
    const embedding = layout.tp > 1 ? [gathered, [matrix, -whole, matrix, 1]] : [[matrix, -stream, matrix, 1]];
    const some = fullest_of(embedding, running, share.stored_before(0));
    result.push({ region: 0, is_loss: false, some });
  }
  return result;
}

function fullest_of(some, running, stored) {
  const result = new Map();
  const add = (size, communication) => {
    if (!result.has(stored) || size > result.get(stored)[0]) result.set(stored, [size, communication]);
  };
  for (const [there, left, weight = 0, more = 0, communication = 0, arrived = 0] of some) {
    add(running + there, communication);
    running += left;
    stored += more;
    if (weight) add(running + weight, arrived);
  }
  return result;
}
