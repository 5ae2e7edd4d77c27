// The controls, tables and plots of a model's page. All numbers come from arithmetic.js and the data of the page.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const question = { ...data.question };
  let shown = null; // the target whose operators are listed; the recommended one when null
  const byId = (id) => document.getElementById(id);

  // ---- numbers as people read them ----

  const format = (value, digits = 1) =>
    value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  function scaled(value, step, units, digits = 1) {
    let index = 0;
    while (Math.abs(value) >= step && index < units.length - 1) [value, index] = [value / step, index + 1];
    return `${format(value, index ? digits : 0)} ${units[index]}`.trim();
  }

  const bytesText = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  const countText = (value) => scaled(value, 1000, ["", "K", "M", "G", "T", "P", "E"]);
  const whole = (value) => Math.round(value).toLocaleString("en");
  const secondsText = (value) => (value < 1 ? `${format(value * 1e3, 2)} ms` : `${format(value, 2)} s`);
  const countOrAny = (value) => (value >= 2 ** 30 ? "any number" : whole(value));

  // The loss of an option, with a ~ where it is predicted.
  function lossText({ loss, isPredicted }) {
    if (loss === null) return "not measured";
    return (isPredicted ? "~" : "") + (Number.isFinite(loss) ? `×${format(1 + loss, 3)}` : "diverged");
  }

  // ---- elements: text is always set as text ----

  function element(tag, text = "", attributes = {}) {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  function fill(table, heading, rows) {
    const head = element("thead");
    const line = element("tr");
    for (const text of heading) line.append(element("th", text, { scope: "col" }));
    head.append(line);
    const body = element("tbody");
    for (const row of rows) body.append(row);
    table.replaceChildren(head, body);
  }

  function rowOf(cells, attributes = {}) {
    const row = element("tr", "", attributes);
    for (const cell of cells) row.append(cell instanceof Node ? cell : element("td", cell));
    return row;
  }

  // ---- controls ----

  // A slider of octaves, four steps each, and a field for exact numbers.
  function octaves(name, most) {
    const [slider, field] = [byId(`${name}-slider`), byId(name)];
    slider.max = Math.floor(4 * Math.log2(most));
    field.max = most;
    const show = () => {
      slider.value = Math.round(4 * Math.log2(question[name]));
      field.value = question[name];
      slider.setAttribute("aria-valuetext", whole(question[name]));
    };
    slider.addEventListener("input", () => {
      question[name] = Math.min(most, Math.max(1, Math.round(2 ** (slider.value / 4))));
      show();
      later();
    });
    field.addEventListener("input", () => {
      const value = Number(field.value);
      const isRight = Number.isInteger(value) && value >= 1 && value <= most;
      field.setCustomValidity(isRight ? "" : `a whole number from 1 to ${whole(most)}`);
      if (!isRight) return;
      question[name] = value;
      slider.value = Math.round(4 * Math.log2(value));
      later();
    });
    show();
  }

  function choice(name, choices, labels = {}) {
    const select = byId(name);
    for (const value of choices) select.append(element("option", labels[value] ?? value, { value }));
    select.value = question[name];
    select.addEventListener("change", () => {
      question[name] = select.value;
      if (name === "dtype") showBits();
      later();
    });
  }

  function showBits() {
    const widest = 8 * data.dtypes[question.dtype];
    const slider = byId("bits");
    slider.max = widest;
    if (question.bits !== null && question.bits >= widest) question.bits = null;
    slider.value = question.bits ?? widest;
    byId("bits-text").textContent = question.bits === null ? `${widest} (the dtype's)` : `${question.bits}`;
    slider.setAttribute("aria-valuetext", byId("bits-text").textContent);
  }

  function start() {
    octaves("context", Math.min(data.most_context ?? 2 ** 21, 2 ** 21));
    octaves("batch", 4096);
    choice("dtype", data.choices);
    choice("goal", ["balanced", "latency", "throughput", "memory"]);
    choice("hardware", Object.keys(data.devices), Object.fromEntries(
      Object.entries(data.devices).map(([name, device]) => [name, device.label]),
    ));
    byId("bits").addEventListener("input", () => {
      const value = Number(byId("bits").value);
      question.bits = value >= 8 * data.dtypes[question.dtype] ? null : value;
      showBits();
      later();
    });
    showBits();
    const loss = byId("max_quality_loss");
    loss.value = question.max_quality_loss === null ? "" : 100 * question.max_quality_loss;
    loss.addEventListener("input", () => {
      question.is_usual = false;
      question.max_quality_loss = loss.value === "" ? null : Math.max(0, Number(loss.value) / 100);
      later();
    });
    byId("pass").addEventListener("change", () => update());
    byId("shown").addEventListener("change", () => {
      shown = byId("shown").value || null;
      update();
    });
    byId("json").addEventListener("click", () => save("json", JSON.stringify(documentOf(update()), null, 2)));
    byId("csv").addEventListener("click", () => save("csv", table(update())));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => update());
    addEventListener("beforeprint", () => update());
    update();
  }

  let waiting = null;

  function later() {
    if (waiting === null) waiting = requestAnimationFrame(() => update());
  }

  // ---- the page ----

  function update() {
    if (waiting !== null) cancelAnimationFrame(waiting);
    waiting = null;
    const found = headwise.ranked(data, question);
    const best = found[0].refused === null ? found[0] : null;
    const listed = found.find((each) => each.target === shown) ?? best ?? found[0];
    showVerdict(found, best);
    showOptions(found, best, listed);
    showOperators(found, listed);
    showPlots(found, best, listed);
    return found;
  }

  function verdictText(found, best) {
    if (best === null) {
      const reasons = new Map();
      for (const each of found) reasons.set(each.refused, (reasons.get(each.refused) ?? 0) + 1);
      const listed = [...reasons].map(([reason, count]) => `${reason}: ${count}`).join(", ");
      return `Nothing can be recommended (${listed})${reasons.has("not measured") ? "; measure first" : ""}.`;
    }
    if (best === original(found)) {
      return data.converted ? `Change nothing more: it fits. ${data.converted}.` : "Change nothing: as it is it fits.";
    }
    const share = format((100 * best.cacheBytesPerToken) / original(found).cacheBytesPerToken, 0);
    const bytes = `The cache takes ${share} % of the original's bytes`;
    if (best.loss === null) {
      return `It does not fit as it is: store the cache as ${best.target}. ${bytes}; other models lost at most ` +
        `${format(100 * data.safe_loss, 0)} % in 8 bits, and what this one loses is not measured.`;
    }
    const how = best.option.convert_to === null
      ? `keep the model, and store its cache as ${best.target}`
      : `headwise convert ${best.option.convert_to}`;
    const known = best.isPredicted ? `predicted, not measured: ${data.predicted_error}` : "measured";
    return `Do this: ${how}. ${bytes}; perplexity ${lossText(best)}, ${known}.`;
  }

  const original = (found) => found.find((each) => each.target === data.options[0].target);

  function showVerdict(found, best) {
    byId("verdict").textContent = verdictText(found, best);
    // Of caches that are as safe in several engines, those of each.
    const isOne = best === null || best.loss !== null;
    const allowed = isOne ? [best] : found.filter((each) => each.refused === null && each.loss === null);
    byId("commands").textContent = allowed.flatMap((each) => each?.option.commands ?? []).join("\n");
    byId("commands").hidden = byId("commands").textContent === "";
    const device = data.devices[question.hardware];
    const many = data.ranks > 1 ? `${data.ranks} × ` : "";
    const notes = [
      `${whole(question.batch)} × ${whole(question.context)} tokens on ${many}${device.label}`,
      `${bytesText(headwise.usable(question, device))} of memory may be used`,
      `goal: ${question.goal}`,
    ];
    if (data.trained_context !== null && data.trained_context < question.context) {
      notes.push(`the model was made for ${whole(data.trained_context)} tokens`);
    }
    if (data.stored !== null) notes.push(`weights as stored: ${data.stored}`);
    byId("limits").textContent = `${[...notes, ...data.notes].join("; ")}.`;
  }

  const HEADING = ["", "KiB / token", "step", "tok/s", "fit", "memory", "weights", "perplexity", "runs in"];

  // The loss, and why an option is not recommended.
  const IN_SHORT = { "loses too much": "too much", "may lose too much": "too much?" };

  function qualityText(each) {
    if (each.refused === null || each.refused === "not measured") return lossText(each);
    if (each.loss === null) return each.refused;
    return `${lossText(each)}, ${IN_SHORT[each.refused] ?? each.refused}`;
  }

  function cellsOf(each) {
    const isKnown = each.refused !== "unknown"; // the sizes that a search begins with say little of those it finds
    return [
      format(each.cacheBytesPerToken / 1024),
      secondsText(each.decodeSeconds),
      isKnown ? whole(each.tokensPerSecond) : "?",
      isKnown ? countOrAny(each.largestBatch) : "?",
      bytesText(each.memory.total),
      bytesText(each.memory.weights),
      qualityText(each),
      each.option.served_by,
    ];
  }

  function showOptions(found, best, listed) {
    const rows = found.map((each) => {
      const name = element("th", "", { scope: "row" });
      const button = element("button", each.target, { type: "button", title: each.option.label });
      button.addEventListener("click", () => {
        shown = each.target;
        update();
      });
      name.append(each === best ? "→ " : "", button, each.option.is_first_size ? " ~" : "");
      const kinds = [each === best && "best", each.isDominated && "faint", each.refused !== null && "refused"];
      if (each === listed) kinds.push("listed");
      return rowOf([name, ...cellsOf(each)], { class: kinds.filter(Boolean).join(" "), "data-target": each.target });
    });
    fill(byId("options"), HEADING, rows);
  }

  function passOf(each) {
    const bits = headwise.bitsOf(each.option, question);
    if (byId("pass").value === "decode") {
      return headwise.passOf(data, question, bits, question.batch, 1, question.context);
    }
    const fresh = Math.min(data.chunk, question.context);
    return headwise.passOf(data, question, bits, 1, fresh, question.context);
  }

  function operatorsOf(each) {
    const device = data.devices[question.hardware];
    const pass = passOf(each);
    const work = headwise.operators(each.option.work, pass);
    return headwise.timed(data, device, question.dtype, work, pass).sort((one, other) => other.seconds - one.seconds);
  }

  function showOperators(found, listed) {
    const select = byId("shown");
    const targets = data.options.map((each) => each.target).filter((name) => found.some((each) => each.target === name));
    select.replaceChildren(...targets.map((name) => element("option", name, { value: name })));
    select.value = listed.target;
    const operations = operatorsOf(listed);
    const all = headwise.total(operations);
    const rows = operations.map((each) => rowOf([
      element("th", each.name, { scope: "row" }),
      whole(each.times),
      secondsText(each.seconds),
      `${format((100 * each.seconds) / all, 0)} %`,
      each.bound,
      countText(each.times * each.flops),
      bytesText(each.times * (headwise.memoryBytes(each) + each.linkBytes)),
      each.formula,
    ]));
    fill(byId("operators"), ["", "times", "predicted", "share", "bound", "FLOPs", "bytes", "FLOPs of one"], rows);
    const device = data.devices[question.hardware];
    const prompt = headwise.prefillSeconds(data, listed.option, question, device, question.context);
    byId("sums").textContent =
      `${listed.target} (${listed.option.label}): a step ${secondsText(listed.decodeSeconds)}, ` +
      `a prompt of ${whole(question.context)} tokens ${secondsText(prompt)}.`;
  }

  // ---- plots ----

  const { COLOURS, plain, draw, ROOM } = plots;
  const MEASURED = "#2f9e76";

  function showPlots(found, best, listed) {
    if (typeof Plotly === "undefined") return;
    plotMemory(found);
    plotQuality(found, best);
    plotLatency(found, best, listed);
    plotRoofline(listed);
  }

  function plotMemory(found) {
    const device = data.devices[question.hardware];
    const names = found.map((each) => plain(each.target));
    const traces = ["weights", "cache", "workspace"].map((part, index) => ({
      type: "bar",
      orientation: "h",
      name: part,
      y: names,
      x: found.map((each) => each.memory[part] / 2 ** 30),
      marker: { color: COLOURS[index] },
      hovertemplate: `%{y}: ${part} %{x:.3~g} GiB<extra></extra>`,
    }));
    const largest = Math.max(...found.map((each) => each.memory.total));
    // Where the device's memory is far beyond all bars, it is named and not drawn.
    const end = device.memory_bytes < 4 * largest ? Math.max(device.memory_bytes, largest) : largest;
    byId("memory-text").textContent =
      `, of ${bytesText(device.memory_bytes)} (${bytesText(headwise.usable(question, device))} may be used)`;
    const limits = [headwise.usable(question, device), device.memory_bytes].map((bytes, index) => ({
      type: "line", x0: bytes / 2 ** 30, x1: bytes / 2 ** 30, y0: 0, y1: 1, yref: "paper",
      line: { width: 1.5, dash: index ? "solid" : "dot", color: "#8b919b" },
    }));
    draw("memory-plot", traces, {
      ...ROOM, barmode: "stack", shapes: limits, margin: { l: 96, r: 12, t: 36, b: 44 }, yaxis: { autorange: "reversed", dtick: 1 },
      xaxis: { title: { text: "GiB on one device" }, range: [0, (1.05 * end) / 2 ** 30] }, height: 90 + 17 * found.length,
    });
  }

  function plotQuality(found, best) {
    const known = found.filter((each) => each.loss !== null && Number.isFinite(each.loss));
    byId("quality-note").hidden = known.length > 1;
    if (data.converted) byId("quality-note").textContent = `${data.converted}. What more is done to it is not.`;
    byId("quality-plot").hidden = known.length < 2;
    if (known.length < 2) return;
    const least = 5e-4; // what loses less is drawn as if it lost this, because the axis is logarithmic
    draw("quality-plot", [{
      type: "scatter",
      mode: "markers+text",
      x: known.map((each) => each.cacheBytesPerToken / 1024),
      y: known.map((each) => Math.max(each.loss, least)),
      text: known.map((each) => (isNamed(each) ? plain(each.target) : "")),
      textposition: "top center",
      textfont: { size: 10 },
      marker: { size: 9, color: known.map((each) => (each === best ? COLOURS[1] : COLOURS[0])),
        symbol: known.map((each) => (each.isPredicted ? "circle-open" : "circle")),
        opacity: known.map((each) => (each.isDominated ? 0.4 : 1)) },
      customdata: known.map((each) => [plain(each.target), lossText(each)]),
      hovertemplate: "%{customdata[0]}: %{x:.1f} KiB a token, perplexity %{customdata[1]}<extra></extra>",
    }], {
      xaxis: { title: { text: "cache, KiB a token" }, rangemode: "tozero" },
      yaxis: { title: { text: lossTitle(known) }, type: "log", exponentformat: "none" },
    });
  }

  // Predictions are many, and the names of those that lose too much would be printed over each other.
  const isNamed = (each) => !each.isDominated && !(each.isPredicted && each.refused !== null);

  function lossTitle(known) {
    const isMixed = known.some((each) => each.isPredicted);
    return isMixed ? "perplexity ratio − 1; hollow: predicted" : "measured loss (perplexity ratio − 1)";
  }

  function plotLatency(found, best, listed) {
    const device = data.devices[question.hardware];
    const most = Math.min(data.most_context ?? 2 ** 20, Math.max(2 ** 17, 2 * question.context));
    const contexts = [];
    for (let tokens = 128; tokens < most; tokens *= 2) contexts.push(tokens);
    contexts.push(most);
    const chosen = new Set([original(found), best ?? found[0], listed]);
    for (const each of found) if (chosen.size < 7 && !each.isDominated) chosen.add(each);
    const traces = [...chosen].map((each, index) => ({
      type: "scatter",
      mode: "lines",
      name: plain(each.target),
      x: contexts,
      y: contexts.map((tokens) =>
        1e3 * headwise.decodeSeconds(data, each.option, question, device, question.batch, tokens)),
      line: { color: COLOURS[index % COLOURS.length], width: each === best ? 3 : 1.5 },
      hovertemplate: `${plain(each.target)}: %{x:,} tokens, %{y:.3~g} ms<extra></extra>`,
    }));
    for (const timed of measuredSteps()) {
      traces.push({
        type: "scatter",
        mode: "markers",
        name: `${plain(timed.target)}, measured`,
        x: [timed.context],
        y: [1e3 * timed.seconds],
        marker: { size: 10, symbol: "diamond", color: MEASURED },
        hovertemplate: `${plain(timed.target)} measured (${plain(timed.where)}): %{x:,} tokens, %{y:.3~g} ms<extra></extra>`,
      });
    }
    draw("latency-plot", traces, {
      ...ROOM,
      xaxis: { title: { text: "tokens of each sequence" }, type: "log", dtick: 1 },
      yaxis: { title: { text: "a decode step, ms (predicted)" }, type: "log" },
      shapes: [{ type: "line", x0: question.context, x1: question.context, y0: 0, y1: 1, yref: "paper",
        line: { width: 1, dash: "dot", color: "#8b919b" } }],
    });
  }

  // Timed steps of options, each with what its operators compute and move: the whole step is one point.
  function measuredSteps() {
    const steps = [];
    if (data.ranks > 1) return steps; // steps are timed on one device, and an option's work is of one rank
    for (const timed of data.steps) {
      const option = data.options.find((each) => each.target === timed.target);
      if (option === undefined || !(timed.dtype in data.dtypes)) continue;
      const asked = { ...question, bits: null, dtype: timed.dtype };
      const pass = headwise.passOf(data, asked, headwise.bitsOf(option, asked), 1, 1, timed.context);
      const work = headwise.operators(option.work, pass);
      const sum = (value) => work.reduce((all, each) => all + each.times * value(each), 0);
      steps.push({ ...timed, flops: sum((each) => each.flops), bytes: sum(headwise.memoryBytes) });
    }
    return steps;
  }

  // The names of points, without those that would be printed over another: a name is about a decade wide.
  function apart(points, place) {
    const named = [];
    return points.map((each) => {
      const [x, y] = place(each).map(Math.log10);
      const isFree = named.every(([left, top]) => Math.abs(left - x) > 1.2 || Math.abs(top - y) > 0.4);
      if (!isFree) return "";
      named.push([x, y]);
      return plain(each.name);
    });
  }

  function plotRoofline(listed) {
    const device = data.devices[question.hardware];
    const peak = headwise.peak(data, device, question.dtype);
    const points = operatorsOf(listed).filter((each) => each.flops > 0);
    const place = (each) => [each.flops / headwise.memoryBytes(each), (each.times * each.flops) / each.seconds];
    const ridge = peak / device.bytes_per_second;
    const [low, high] = [Math.min(0.1, ridge / 100), Math.max(1e4, ridge * 10)];
    const ceiling = (share, bandwidth, dash, name) => ({
      type: "scatter", mode: "lines", name, hoverinfo: "skip", line: { color: "#8b919b", width: 1.5, dash },
      x: [low, (share * ridge) / bandwidth, high],
      y: [low * device.bytes_per_second * bandwidth, peak * share, peak * share],
    });
    draw("roofline-plot", [
      ceiling(1, 1, "solid", "dense peak and bandwidth"),
      ceiling(data.efficiency.compute, data.efficiency.memory, "dot", "the shares that are assumed"),
      {
        type: "scatter",
        mode: "markers+text",
        name: "operators, predicted",
        x: points.map((each) => place(each)[0]),
        y: points.map((each) => place(each)[1]),
        text: apart(points, place),
        customdata: points.map((each) => plain(each.name)),
        textposition: "top center",
        textfont: { size: 10 },
        marker: { size: 8, color: COLOURS[0] },
        hovertemplate: "%{customdata}: %{x:.3~g} FLOPs a byte, %{y:.3~s}FLOP/s<extra></extra>",
      },
      ...measuredSteps().map((timed) => ({
        type: "scatter",
        mode: "markers",
        name: `${plain(timed.target)}, a measured step`,
        x: [timed.flops / timed.bytes],
        y: [timed.flops / timed.seconds],
        marker: { size: 10, symbol: "diamond", color: MEASURED },
        hovertemplate: `${plain(timed.target)}, a step measured (${plain(timed.where)}): %{x:.3~g} FLOPs a byte, ` +
          "%{y:.3~s}FLOP/s<extra></extra>",
      })),
    ], {
      ...ROOM,
      xaxis: { title: { text: "FLOPs a byte" }, type: "log", exponentformat: "power", dtick: 1 },
      yaxis: { title: { text: "FLOP/s" }, type: "log", exponentformat: "SI" },
    });
  }

  // ---- downloads ----

  function recordOf(each) {
    return {
      target: each.target,
      label: each.option.label,
      convert_to: each.option.convert_to,
      served_by: each.option.served_by,
      commands: each.option.commands.join("\n"),
      cache_bytes_per_token: each.cacheBytesPerToken,
      decode_seconds: each.decodeSeconds,
      tokens_per_second: each.tokensPerSecond,
      largest_batch: each.largestBatch,
      memory_bytes: each.memory.total,
      weight_bytes: each.memory.weights,
      parameters: each.option.parameters,
      loss: each.loss !== null && Number.isFinite(each.loss) ? each.loss : null,
      is_predicted: each.isPredicted,
      refused: each.refused,
      is_dominated: each.isDominated,
    };
  }

  function documentOf(found) {
    return { source: data.source, label: data.label, ranks: data.ranks, question, options: found.map(recordOf) };
  }

  function table(found) {
    const records = found.map(recordOf);
    const cell = (value) => {
      const text = value === null ? "" : String(value);
      // A spreadsheet takes a text that begins so for a formula.
      const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
      return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
    };
    const names = Object.keys(records[0]);
    return [names.join(","), ...records.map((each) => names.map((name) => cell(each[name])).join(","))].join("\r\n");
  }

  function save(kind, text) {
    const type = kind === "json" ? "application/json" : "text/csv;charset=utf-8";
    const address = URL.createObjectURL(new Blob([text], { type }));
    const link = element("a", "", { href: address, download: `headwise-options.${kind}` });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  start();
})();
