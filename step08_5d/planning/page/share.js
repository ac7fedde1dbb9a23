// What the stage of a rank has: formulas once more; see plan.js, whose `constants` and `sum` they use.
"use strict";

// ---- step08_5d/planning/stages.py, memory/backwards.py, of 1F1B; step05_pipeline/stages.py --------------------------

// Layers of each stage: of the lightest stages, the last one takes the next layer
function layers_of_ranks(model, layout) {
  const flops = count_flops(model, layout.seq), layer = (flops.linear + flops.attention_core) / model.layers;
  const layers = Array(layout.pp).fill(1), cost = Array(layout.pp).fill(layer);
  cost[layout.pp - 1] += flops.head;
  for (let rest = model.layers - layout.pp; rest > 0; rest--) {
    const lightest = cost.lastIndexOf(Math.min(...cost));
    layers[lightest] += 1;
    cost[lightest] += layer;
  }
  return layers;
}

// One of them is the fullest
function fullest_ranks(model, layout) {
  const layers = layers_of_ranks(model, layout), last = layout.pp - 1;
  const found = layers.map((_, rank) => rank).filter((rank) => layers.indexOf(layers[rank], 1) === rank && rank < last);
  return [...new Set([0, ...found, last])];
}

// The layers [first, last) of a rank
function range_of_rank(model, layout, rank) {
  const layers = layers_of_ranks(model, layout), first = sum(layers.slice(0, rank));
  return [first, first + layers[rank]];
}

// ---- step08_5d/planning/memory/rank_parameters.py -------------------------------------------------------------------

const has_experts = (model, index) => Boolean(model.experts) && index >= model.dense_layers;

// The parameters of a rank, in the order of the forward: [elements of a rank before ZeRO, region, of experts]
function parameters_of(model, layout, share) {
  const { hidden: h, head_width: d } = model, { tp, ep } = layout;
  const queries = Math.floor((model.heads * d) / tp), keys = Math.max(1, Math.floor(model.kv_heads / tp)) * d;
  const matrix = Math.ceil(model.vocab / tp) * h, expert = model.expert_ffn * h, result = [];
  const push = (region, sizes, experts = false) => sizes.forEach((size) => result.push({ size, region, experts }));
  if (share.is_first) push(0, [matrix]);
  let region = Number(share.is_first);
  for (let index = share.layers[0]; index < share.layers[1]; index++, region++) {
    push(region, [h, queries * h, keys * h, keys * h, queries * h, h]);
    if (has_experts(model, index)) {
      push(region, [model.experts * h]);
      push(region, Array(3).fill(Math.floor(model.experts / ep) * expert), true);
      push(region, Array(model.shared_experts ? 3 : 0).fill(model.shared_experts * expert));
    } else push(region, Array(3).fill(Math.floor(model.ffn / tp) * h));
  }
  if (share.is_last) push(region, share.tied ? [h] : [h, matrix]);
  return result;
}

// `pack` of step02_data_parallel/data_parallel.py: of numbers of parameters, in the order of the backward
function fill_buckets(numbers, bytes, limit) {
  const buckets = [];
  let room = 0;
  for (const number of [...numbers].reverse()) {
    if (!buckets.length || bytes(number) > room) {
      buckets.push([]);
      room = limit;
    }
    buckets.at(-1).push(number);
    room -= bytes(number);
  }
  return buckets;
}

function share_of(model, layout, rank) {
  const share = { layers: range_of_rank(model, layout, rank), is_first: rank === 0 };
  share.is_last = rank === layout.pp - 1;
  share.tied = model.tie_embeddings && share.is_first && share.is_last;
  const listed = parameters_of(model, layout, share), wide = constants.WIDTHS[1], last = listed.length - 1;
  share.shards = [false, true].map((one) => sum(listed.filter((each) => each.experts === one).map(({ size }) => size)));
  share.regions = [];
  for (const { region, size } of listed) (share.regions[region] ||= []).push(size);

  share.units = [];
  for (const experts of [false, true]) {
    const numbers = [...listed.keys()].filter((index) => listed[index].experts === experts), by_region = new Map();
    for (const index of [...numbers].reverse()) {
      const { region } = listed[index];
      by_region.set(region, [...(by_region.get(region) || []), index]);
    }
    const ranks = experts ? layout.edp : layout.copies; // one: nothing is sent, and every parameter is alone
    const buckets = fill_buckets(numbers, (index) => wide * listed[index].size, ranks > 1 ? constants.BUCKET : 0);
    for (const group of layout.zero === 3 ? by_region.values() : buckets) {
      const size = sum(group.map((index) => listed[index].size));
      share.units.push({ size, begun: last - group[0] + 1, complete: last - group.at(-1) + 1, ranks });
    }
  }
  share.units.sort((one, other) => one.begun - other.begun);

  const by_layer = layout.zero === 3 && layout.pp === 1, ends = [];
  for (const each of [...share.regions].reverse()) ends.push((ends.at(-1) || 0) + each.length);
  let latest = 0;
  for (const unit of share.units) {
    const at = by_layer ? ends.find((end) => end >= unit.complete) : unit.complete;
    unit.sent = latest = Math.max(latest, at);
  }

  share.gradients = (stored, later) => {
    const { units } = share, begun = units.filter((unit) => unit.begun <= stored);
    const size_of = (some) => sum(some.map(({ size }) => size));
    if (layout.zero < 2) return size_of(later ? units : begun);
    const sent = units.filter((unit) => unit.sent <= stored).length;
    const done = sent - Number(sent > 0 && units[sent - 1].ranks > 1); // all others are begun or in flight
    const summed = later ? units : units.slice(0, done);
    return size_of(begun.slice(done)) + sum(summed.map(({ size, ranks }) => size / ranks));
  };
  share.gathered = (region, prefetch) => {
    if (layout.zero < 3) return 0;
    if (!by_layer) return sum(share.shards);
    const wanted = [region, ...(prefetch ? [region - 1] : [])].filter((index) => index > 0);
    const head = share.tied && wanted.includes(share.regions.length - 1) ? listed[0].size : 0;
    return head + sum(wanted.flatMap((index) => share.regions[index] || []));
  };
  share.stored_before = (region) => sum(share.regions.slice(region + 1).map((each) => each.length));
  return share;
}
