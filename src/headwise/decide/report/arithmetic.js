// The arithmetic of headwise's predictions, on the numbers that the page carries (see headwise.decide.report.page).
// Each function is that of the same name in headwise.costs.prediction or headwise.decide.advice; tests hold them to be equal.
"use strict";

const headwise = (() => {
  const MOST = 2 ** 30;
  const MANY = 64; // headwise.costs.prediction.curves.MANY
  const STREAMS = 4;

  // headwise.costs.formulas.stages.attended_pairs, causal
  function attendedPairs(fresh, total, window, chunked = false) {
    if (chunked) return withinChunks(total, window) - withinChunks(total - fresh, window);
    const first = total - fresh + 1;
    if (window === null || window >= total) return Math.floor((fresh * (first + total)) / 2);
    if (first >= window) return fresh * window;
    const growing = window - first + 1;
    return Math.floor((growing * (first + window)) / 2) + (fresh - growing) * window;
  }

  function withinChunks(tokens, chunk) {
    const rest = tokens % chunk;
    return (Math.floor(tokens / chunk) * chunk * (chunk + 1) + rest * (rest + 1)) / 2;
  }

  // headwise.costs.formulas.stages.attended_entries
  function attendedEntries(fresh, total, rate, most) {
    const seen = (tokens) => {
      const growing = most === null ? tokens : Math.min(tokens, rate * (most + 1) - 1);
      const whole = Math.floor(growing / rate);
      return (rate * whole * (whole - 1)) / 2 + whole * ((growing % rate) + 1) + (tokens - growing) * (most ?? 0);
    };
    return seen(total) - seen(total - fresh);
  }

  function entryCounts({ rate, chosen }, fresh, total) {
    if (rate === null) return { "entry pairs": 0, chosen: 0, entries: 0, "chosen read": 0 };
    const entries = Math.floor(total / rate);
    return {
      "entry pairs": attendedEntries(fresh, total, rate, null),
      chosen: attendedEntries(fresh, total, rate, chosen),
      entries,
      "chosen read": chosen === null ? entries : Math.min(entries, fresh * chosen),
    };
  }

  function counts(reach, batch, fresh, total) {
    const { window, chunked } = reach;
    let kept = total;
    if (window !== null) kept = chunked ? fresh + ((total - fresh) % window) : Math.min(total, fresh + window - 1);
    const pairs = reach.is_causal ? attendedPairs(fresh, total, window, chunked) : fresh * kept;
    let selected = pairs;
    if (reach.most !== null && kept > reach.most) selected = Math.min(pairs, attendedPairs(fresh, kept, reach.most));
    const read = reach.most === null ? kept : Math.min(kept, fresh * reach.most);
    const numbers = { sequences: 1, new: fresh, total: kept, square: fresh * kept, pairs, selected, read };
    Object.assign(numbers, entryCounts(reach, fresh, total));
    for (const name of Object.keys(numbers)) numbers[name] *= batch;
    return numbers;
  }

  function sum(numbers, found) {
    let result = 0;
    for (const [name, number] of Object.entries(numbers)) result += number * found[name];
    return result;
  }

  const PLAIN = { is_causal: true, window: null, chunked: false, most: null, rate: null, chosen: null };

  function operator(work, pass, reach) {
    const found = counts(reach, pass.batch, pass.fresh, pass.total);
    let share = 1;
    if (work.experts !== null) {
      const [stored, used, ranks] = work.experts;
      share = (stored * (1 - (1 - used / stored) ** (pass.batch * pass.fresh))) / ranks;
    }
    return {
      name: work.name,
      part: work.part,
      times: work.times,
      formula: work.formula,
      flops: sum(work.flops, found),
      kind: work.kind,
      hiddenSize: work.hidden_size,
      weights: share * work.weights,
      weightBytes: share * ((work.weights - work.packed) * pass.width + work.packed_bytes),
      cacheBytes: sum(work.cached, found) * pass.valueBytes + work.state * pass.batch * pass.width,
      activationBytes: sum(work.moved, found) * pass.width,
      linkBytes: sum(work.sent, found) * pass.width,
    };
  }

  function memoryBytes(each) {
    return each.weightBytes + each.cacheBytes + each.activationBytes;
  }

  // The implementation with the fewest FLOPs; the first of those with as few.
  function chosen(impls, pass, reach) {
    const names = Object.keys(impls);
    if (names.length === 1) return names[0];
    const found = counts(reach, 1, pass.fresh, pass.total);
    let best = null;
    let least = Infinity;
    for (const name of names) {
      const flops = impls[name].reduce((all, work) => all + sum(work.flops, found), 0);
      if (flops < least) [best, least] = [name, flops];
    }
    return best;
  }

  // impl: null for the cheapest of each layer, or a name, for the layers that have it.
  function operators(work, pass, impl = null) {
    const found = work.body.map((each) => operator(each, pass, PLAIN));
    for (const kind of work.layers) {
      const impls = pass.fresh === 1 ? kind.step : kind.prompt;
      const name = impl !== null && impl in impls ? impl : chosen(impls, pass, kind.reach);
      for (const each of [...impls[name], ...kind.network]) found.push(operator(each, pass, kind.reach));
    }
    return found;
  }

  // A pass of `fresh` new tokens; bits of a cached value, or null for those of the dtype.
  function passOf(data, question, bits, batch, fresh, total) {
    const width = data.dtypes[question.dtype];
    const valueBytes = bits === null ? width : bits / 8;
    return { batch, fresh, total, width, valueBytes, bits: valueBytes >= width ? 0 : 8 * valueBytes };
  }

  // headwise.costs.prediction.curves.Grid.at
  function interpolated(grid, x, y) {
    const place = (axis, size) => {
      const within = Math.min(Math.max(size, axis[0]), axis[axis.length - 1]);
      let index = axis.findLastIndex((each) => each <= within);
      index = Math.min(Math.max(index, 0), axis.length - 2);
      const [low, high] = [Math.log(axis[index]), Math.log(axis[index + 1])];
      return [index, (Math.log(within) - low) / (high - low), Math.log(Math.max(size, 1e-12)) - Math.log(within)];
    };
    const [left, along, xBeyond] = place(grid.x, x);
    const [low, up, yBeyond] = place(grid.y, y);
    const corner = (side, above) => Math.log(grid.seconds[left + side][low + above]);
    const columns = [0, 1].map((above) => (1 - along) * corner(0, above) + along * corner(1, above));
    const rows = [0, 1].map((side) => (1 - up) * corner(side, 0) + up * corner(side, 1));
    const power = (ends, axis, index) =>
      Math.min(Math.max((ends[1] - ends[0]) / Math.log(axis[index + 1] / axis[index]), 0), 1);
    const found = (1 - up) * columns[0] + up * columns[1];
    return Math.exp(found + xBeyond * power(rows, grid.x, left) + yBeyond * power(columns, grid.y, low));
  }

  function within(axis, size) {
    return Math.min(Math.max(size, axis[0]), axis[axis.length - 1]);
  }

  // headwise.costs.prediction.curves.Curves.seconds: null where the operator was not measured.
  function measured(curves, each, pass, passBytes) {
    const tokens = pass.batch * pass.fresh;
    const rows = each.weights ? each.flops / (2 * each.weights) : 1;
    // A pass of few tokens waits for the bytes of weights: one of quantised weights counts as one of the dtype's.
    const weights = Math.max(rows >= MANY ? each.weights : each.weightBytes / pass.width, 1);
    if (each.kind === "linear" || each.kind === "latent input") {
      const sizes = Object.keys(curves.few).map(Number).sort((one, other) => one - other);
      const few = (size) => {
        const grid = curves.few[String(size)];
        return interpolated(grid, rows, within(grid.y, passBytes));
      };
      const isFew = sizes.length > 0 && rows < MANY;
      const column = isFew ? sizes.map(few) : [];
      const grid = isFew ? { x: [1, 2], y: sizes, seconds: [column, column] } : curves.many;
      const time = interpolated(grid, isFew ? 1 : rows, weights);
      return time + (each.kind === "linear" ? 0 : interpolated(curves.latent_input, tokens * each.hiddenSize, each.hiddenSize));
    }
    if (each.kind === "product") return interpolated(curves.product, rows, weights);
    if (each.kind === "norm" || each.kind === "embedding") {
      return interpolated(curves[each.kind], tokens * each.hiddenSize, each.hiddenSize);
    }
    if (each.kind !== "core" && each.kind !== "latent core") return null;
    const pairs = (pass.fresh * (pass.fresh + 1)) / 2;
    if (pass.fresh > 1) return interpolated(curves.prompt, pass.fresh, each.flops / pairs);
    const cached = Math.max(each.cacheBytes, 1);
    if (each.kind === "latent core" && pass.bits && Object.keys(curves.coded_latent_core).length) {
      const bits = nearest(curves.coded_latent_core, pass.bits);
      const alike = (cached * Number(bits)) / pass.bits;
      return interpolated(curves.coded_latent_core[bits], alike, each.flops / alike) + (curves.coded_latent[bits] ?? 0);
    }
    const isCore = each.kind === "core";
    const bits = isCore ? nearest(curves.core, pass.bits) : null;
    const grid = isCore ? curves.core[bits] : curves.latent_core;
    const together = Object.keys(curves.few).length ? passBytes : cached;
    const coded = isCore ? curves.coded[bits] ?? 0 : 0;
    return cached * interpolated(grid, within(grid.x, together), each.flops / cached) + coded;
  }

  // Those of the measured bits that are nearest to some.
  function nearest(measured, wanted) {
    const distance = (bits) => Math.abs(Number(bits) - wanted);
    return Object.keys(measured)
      .sort((one, other) => Number(one) - Number(other))
      .reduce((one, other) => (distance(other) < distance(one) ? other : one));
  }

  function peak(data, device, dtype) {
    const name = data.peak_names[dtype] ?? dtype;
    for (const other of [name, "bfloat16", "float16", "float32"]) {
      const isWider = data.dtypes[other] > data.dtypes[dtype];
      if (other in device.peaks && (other === name || isWider)) return device.peaks[other];
    }
    return null;
  }

  function timed(data, device, dtype, works, pass) {
    const curves = device.curves[dtype];
    const read = works.reduce((all, each) => all + each.times * (each.weightBytes + each.cacheBytes), 0);
    const passBytes = Math.max(read, 1);
    const reached = data.efficiency;
    const flopsPerSecond = peak(data, device, dtype) * reached.compute;
    return works.map((each) => {
      const link = each.linkBytes ? each.linkBytes / (device.link_bytes_per_second * reached.link) : 0;
      const times = {
        compute: each.flops / flopsPerSecond,
        memory: memoryBytes(each) / (device.bytes_per_second * reached.memory),
        link,
        overhead: reached.seconds,
      };
      const bound = Object.keys(times).reduce((one, other) => (times[other] > times[one] ? other : one));
      const longest = Math.max(times.compute, times.memory, times.link);
      const alone = (curves && measured(curves, each, pass, passBytes)) ?? longest + reached.seconds;
      return { ...each, bound, seconds: each.times * alone };
    });
  }

  function total(operations) {
    return operations.reduce((all, each) => all + each.seconds, 0);
  }

  function decodeSeconds(data, option, question, device, batch, context) {
    const pass = passOf(data, question, bitsOf(option, question), batch, 1, context);
    return total(timed(data, device, question.dtype, operators(option.work, pass), pass));
  }

  function prefillSeconds(data, option, question, device, context) {
    const size = Math.max(data.chunk, Math.ceil(context / data.most_parts));
    let seconds = 0;
    for (let begin = 0; begin < context; begin += size) {
      const end = Math.min(begin + size, context);
      const pass = passOf(data, question, bitsOf(option, question), 1, end - begin, end);
      seconds += total(timed(data, device, question.dtype, operators(option.work, pass), pass));
    }
    return seconds;
  }

  // Bits that the reader asks for hold where an option has none of its own.
  function bitsOf(option, question) {
    return option.cache_bits ?? question.bits;
  }

  function cacheBytes(data, option, question, batch, context) {
    const pass = passOf(data, question, bitsOf(option, question), batch, 1, context);
    let held = 0;
    for (const kind of option.work.layers) {
      const tokens = kind.reach.window === null ? context : Math.min(context, kind.reach.window);
      held += kind.times * (Math.ceil(batch * tokens * kind.values * pass.valueBytes) + batch * kind.state * pass.width);
    }
    return held;
  }

  function workspace(data, option, question, impl, batch, fresh, context) {
    const pass = passOf(data, question, bitsOf(option, question), batch, fresh, context);
    const stream = batch * fresh * option.work.hidden_size * pass.width;
    const moved = new Map();
    for (const each of operators(option.work, pass, impl)) {
      moved.set(each.name, Math.max(each.activationBytes, moved.get(each.name) ?? 0));
    }
    const held = [...moved.values(), (moved.get("attention") ?? 0) + (moved.get("kv_b_proj") ?? 0)];
    for (const place of ["", "shared "]) {
      const inner = (moved.get(`${place}down_proj`) ?? stream) - stream;
      held.push((moved.has(`${place}gate_proj`) ? 3 : 2) * inner);
    }
    return Math.floor(Math.max(...held)) + (STREAMS + option.work.streams - 1) * stream;
  }

  function peakMemory(data, option, question, batch, context) {
    const fresh = Math.min(data.chunk, context);
    const memory = {
      weights: option.weights.wide * data.dtypes[question.dtype] + option.weights.packed,
      cache: cacheBytes(data, option, question, batch, context),
      workspace: Math.max(
        workspace(data, option, question, "absorbed", batch, 1, context),
        workspace(data, option, question, "absorbed", 1, fresh, context),
        workspace(data, option, question, "expanded", 1, fresh, context),
      ),
    };
    return { ...memory, total: memory.weights + memory.cache + memory.workspace };
  }

  // The largest number up to MOST whose size is available.
  function largest(size, available) {
    if (size(1) > available) return 0;
    let [low, high] = [1, MOST];
    if (size(high) <= available) return MOST;
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (size(middle) <= available) low = middle;
      else high = middle;
    }
    return low;
  }

  function largestBatch(data, option, question, available) {
    return largest((batch) => peakMemory(data, option, question, batch, question.context).total, available);
  }

  function longestContext(data, option, question, available) {
    return largest((context) => peakMemory(data, option, question, question.batch, context).total, available);
  }

  function usable(question, device) {
    return Math.floor(device.memory_bytes * question.usable);
  }

  // Cost alone never recommends a loss that nobody knows: see headwise.decide.advice.advise._refusal.
  function refusal({ option, memory, available, lossAtMost, isPredicted }, question, sourceFits) {
    if (memory.total > available) {
      if (option.is_first_size) return "unknown";
      return option.weights.is_bound ? "may not fit" : "does not fit";
    }
    if (lossAtMost === null) {
      const isAsked = question.max_quality_loss !== null && !question.is_usual;
      return option.is_safe && !sourceFits && !isAsked ? null : "not measured";
    }
    if (question.max_quality_loss === null || lossAtMost <= question.max_quality_loss) return null;
    return isPredicted ? "may lose too much" : "loses too much";
  }

  // A loss, the one that is held to the limit (both null where it is not known, Infinity where the model diverged), and
  // whether it is predicted.
  function lossOf(data, option, question) {
    // Bits that the reader asks for are another cache than the one that was measured, or than the original.
    if (option.cache_bits === null && question.bits !== null && question.bits < 8 * data.dtypes[question.dtype]) {
      return { loss: null, lossAtMost: null, isPredicted: false };
    }
    const [loss, lossAtMost] = option.diverged ? [Infinity, Infinity] : [option.loss, option.loss_at_most];
    return { loss, lossAtMost, isPredicted: option.is_predicted };
  }

  function evaluated(data, option, question) {
    const device = data.devices[question.hardware];
    const available = usable(question, device);
    const memory = peakMemory(data, option, question, question.batch, question.context);
    const fitting = largestBatch(data, option, question, available);
    const many = Math.min(fitting, data.most_sequences);
    const seconds = decodeSeconds(data, option, question, device, question.batch, question.context);
    return {
      option,
      memory,
      ...lossOf(data, option, question),
      target: option.target,
      cacheBytesPerToken: memory.cache / (question.batch * question.context),
      decodeSeconds: seconds,
      largestBatch: fitting,
      tokensPerSecond: many === 0 ? 0 : many / decodeSeconds(data, option, question, device, many, question.context),
      available,
    };
  }

  function score(each, first, goal) {
    if (goal === "latency") return each.decodeSeconds;
    if (goal === "throughput") return each.tokensPerSecond ? 1 / each.tokensPerSecond : Infinity;
    if (goal === "memory") return each.cacheBytesPerToken;
    return ((each.decodeSeconds / first.decodeSeconds) * each.cacheBytesPerToken) / first.cacheBytesPerToken;
  }

  function dominates(one, other) {
    if (one.target === other.target || one.loss === null) return false;
    const pairs = [
      [one.decodeSeconds, other.decodeSeconds],
      [one.cacheBytesPerToken, other.cacheBytesPerToken],
      [one.loss, other.loss ?? 0],
    ];
    return pairs.every(([ours, its]) => ours <= its) && pairs.some(([ours, its]) => ours < its);
  }

  // All options, those that may be recommended first, by the goal.
  function ranked(data, question) {
    const running = data.options.filter((option) => option.devices.includes(question.hardware));
    const found = running.map((option) => evaluated(data, option, question));
    const sourceFits = found[0].memory.total <= found[0].available;
    for (const each of found) {
      each.refused = refusal(each, question, sourceFits);
    }
    const allowed = found.filter((each) => each.refused === null);
    const first = found[0];
    for (const each of found) {
      each.isDominated = allowed.some((other) => dominates(other, each));
      each.score = score(each, first, question.goal);
    }
    // Sorting keeps the order of equals: candidates are listed from nothing on.
    return found.sort(
      (one, other) => (one.refused !== null) - (other.refused !== null) || compare(one.score, other.score),
    );
  }

  function compare(one, other) {
    return one < other ? -1 : one > other ? 1 : 0;
  }

  return {
    counts, operators, passOf, peak, timed, total, memoryBytes, decodeSeconds, prefillSeconds, cacheBytes,
    peakMemory, largestBatch, longestContext, usable, evaluated, ranked, bitsOf,
  };
})();

if (typeof module !== "undefined") module.exports = headwise;
