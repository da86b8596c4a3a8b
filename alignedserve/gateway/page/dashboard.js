"use strict";
const byId = (id) => document.getElementById(id);
const pollMs = 1000, keptMs = 180000, windowMs = 60000, rateMs = 5000;
const samples = [];  // documents of the last minutes, oldest first, each with `at`: when it came
let key = sessionStorage.getItem("alignedserve-key") || "";
let chosen = sessionStorage.getItem("alignedserve-live-model");
let ownBatches = null, usage = null, polls = 0;
const maxKeys = 8, usagePolls = 10, daySeconds = 86400;

// --- elements: text is only ever set as text

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    element.setAttribute(attribute, value);
  }
  element.append(...children);
  return element;
}

function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) {
    element.setAttribute(attribute, value);
  }
  element.append(...children);
  return element;
}

function fill(id, note, ...children) {
  const section = byId(id);
  section.hidden = false;
  section.querySelector(".head span").textContent = note;
  section.lastElementChild.replaceChildren(...children);
}

function table(headings, rows) {
  const isNumber = headings.map((_, column) => rows.every((row) => typeof row[column] === "string" && /^[\d–]/.test(row[column])));
  const cell = (kind, column, one) => make(kind, isNumber[column] ? { class: "number" } : {}, one);
  const lines = rows.map((row) => make("tr", {}, ...row.map((one, column) => cell("td", column, one))));
  const top = make("tr", {}, ...headings.map((one, column) => cell("th", column, one)));
  return make("table", {}, make("thead", {}, top), make("tbody", {}, ...lines));
}

function meter(share, text, kind = "") {
  const inner = make("i");
  inner.style.width = (100 * Math.min(Math.max(share, 0), 1)).toFixed(1) + "%";
  const holder = document.createDocumentFragment();
  holder.append(make("span", { class: "meter " + kind }, inner), text);
  return holder;
}

// Parts: [name, value, colour, text]; those of nothing are left out of the bar.
function stacked(parts, total) {
  const bar = make("div", { class: "bar", role: "img", "aria-label": parts.map(([name, , , text]) => name + " " + text).join(", ") });
  for (const [, value, colour] of parts.filter((one) => one[1] > 0)) {
    const piece = make("i", { class: colour });
    piece.style.width = (100 * value / Math.max(total, 1e-9)).toFixed(2) + "%";
    bar.append(piece);
  }
  const legend = make("div", { class: "legend" }, ...parts.map(([name, , colour, text]) => make("span", {}, make("b", { class: colour }), name + " " + text)));
  return [bar, legend];
}

// --- numbers

const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => {  // what is neither whole nor none never reads so
  let digits = share > 0 && share < 0.1 ? 1 : 0;
  while (share > 0 && share < 1 && digits < 8 && [0, 100].includes(Number((100 * share).toFixed(digits)))) digits++;
  return (100 * share).toFixed(digits) + " %";
};
const seconds = (value) => value === null ? "–" : value < 1 ? Math.round(value * 1000) + " ms" : value < 100 ? value.toFixed(1) + " s" : Math.round(value / 60) + " min";
const modelOf = (sample) => sample && sample.models.find((one) => one.name === chosen);
const loadOf = (sample) => { const model = modelOf(sample); return model ? model.load : null; };

function before(ms) {
  const last = samples[samples.length - 1];
  return samples.find((one) => last.at - one.at <= ms) || last;
}

// What a counter gained from one document to another; null where there are not two, or its process restarted.
function gain(first, last, read) {
  const from = read(first), to = read(last);
  return first === last || from === null || to === null || from === undefined || to === undefined || to < from ? null : to - from;
}

function rate(first, last, read) {
  const gained = gain(first, last, read);
  return gained === null || last.time_s <= first.time_s ? null : gained / (last.time_s - first.time_s);
}

// The value below which that share of a window's requests lies, between two edges in proportion.
function quantile(first, last, name, share) {
  const of = (sample) => modelOf(sample) && modelOf(sample)[name];
  if (!of(last)) {
    return null;
  }
  const { edges, counts } = of(last);
  const from = first !== last && of(first) ? of(first).counts : counts.map(() => 0);
  const gained = counts.map((count, index) => count - from[index]);
  const total = gained[gained.length - 1];
  if (total <= 0) {
    return null;
  }
  const index = gained.findIndex((count) => count >= share * total);
  if (index >= edges.length) {
    return edges[edges.length - 1];
  }
  const low = index ? edges[index - 1] : 0, below = index ? gained[index - 1] : 0;
  return low + (edges[index] - low) * (share * total - below) / (gained[index] - below);
}

// --- parts of the page

function spark(values) {
  const known = values.map((value) => value || 0), most = Math.max(...known, 1e-9), step = 100 / Math.max(known.length - 1, 1);
  const points = known.map((value, index) => (index * step).toFixed(2) + "," + (29 - 27 * value / most).toFixed(2)).join(" ");
  const line = draw("polyline", { points, class: "line" });
  return draw("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" }, draw("polygon", { points: "0,30 " + points + " 100,30", class: "area" }), line);
}

function tile(title, value, unit, below) {
  const big = make("div", { class: "big" }, value, make("small", {}, unit));
  return make("section", { class: "tile" }, make("h2", {}, title), big, below);
}

const note = (text) => make("div", { class: "soft", title: text }, text);

function showTiles(last) {
  const load = loadOf(last), recent = before(rateMs), minute = before(windowMs), model = modelOf(last);
  const total = (name) => (sample) => loadOf(sample) && loadOf(sample).totals[name];
  const history = (read) => samples.map((one, index) => index < 3 ? null : rate(samples[index - 3], one, read));
  const rates = (name) => { const now = rate(recent, last, total(name)); return now === null ? "–" : whole(now); };
  const tiers = Object.values(load.tiers), sum = (name) => tiers.reduce((all, one) => all + one[name], 0);
  const prefix = (name) => gain(minute, last, (sample) => loadOf(sample) && loadOf(sample).prefixes[name]);
  const asked = prefix("num_query_tokens"), blocks = load.workers.reduce((all, one) => all + one.num_blocks, 0);
  const used = load.workers.reduce((all, one) => all + one.num_blocks_used, 0);
  const counted = model.objectives.reduce(([held, all], one) => [held + one.held, all + one.held + one.missed], [0, 0]);
  const first = (share) => seconds(quantile(minute, last, "ttft", share)), gap = seconds(quantile(minute, last, "gap", 0.5));
  byId("tiles").replaceChildren(
    tile("Generated", rates("num_tokens"), "tokens/s", spark(history(total("num_tokens")))),
    tile("Prompts computed", rates("num_prompt_tokens"), "tokens/s", spark(history(total("num_prompt_tokens")))),
    tile("Requests", whole(sum("num_prefilling") + sum("num_pooled") + sum("num_decoding")), "at work", note(whole(sum("num_queued")) + " queued, " + whole(load.num_at_risk) + " at risk")),
    tile("First token", first(0.5), "median", note("95 %: " + first(0.95) + "; gap " + gap)),
    tile("Objectives held", counted[1] ? percent(counted[0] / counted[1]) : "–", "", note(counted[1] ? whole(counted[0]) + " of " + whole(counted[1]) : "none was named")),
    tile("Cache in use", blocks ? percent(used / blocks) : "–", "", note(asked ? percent(prefix("num_hit_tokens") / asked) + " prefix hits" : whole(load.prefixes.num_blocks) + " blocks to reuse")),
  );
}

function showQueues(load) {
  const names = { real_time: "Real-time", best_effort: "Best effort" };
  const rows = Object.entries(load.tiers).map(([name, one]) => {
    const parts = [["queued", one.num_queued, "five"], ["prefilling", one.num_prefilling, "two"], ["in a pool", one.num_pooled, "three"], ["decoding", one.num_decoding, "one"]];
    const total = parts.reduce((all, part) => all + part[1], 0);
    const waits = one.num_queued ? "oldest queued for " + seconds(one.oldest_queued_s) : total ? whole(total) : "none";
    return make("div", { class: "tier" }, make("div", { class: "head" }, names[name], make("span", {}, waits)), ...stacked(parts.map((part) => [...part, whole(part[1])]), total));
  });
  fill("queues", load.queue_wait_s > 0 ? "queue through in " + seconds(load.queue_wait_s) : "", ...rows);
}

function showLedger(last) {
  const first = before(windowMs), of = (name) => gain(first, last, (sample) => loadOf(sample) && loadOf(sample).time[name]) || 0;
  const misaligned = of("misaligned_s");
  const parts = [
    ["computing", Math.max(of("forward_s") - misaligned, 0), "one"], ["on padding of misaligned batches", misaligned, "five"], ["sampling", of("sampling_s"), "two"],
    ["preparing and deciding", of("prepare_s") + of("turnaround_s"), "four"], ["waiting for prefill or prefetch", of("waiting_for_prefill_s") + of("prefetch_not_ready_s"), "three"], ["nothing to do", of("nothing_to_do_s"), "six"],
  ];
  const total = parts.reduce((all, part) => all + part[1], 0), iterations = of("num_iterations");
  if (!total) {
    fill("ledger", "last minute", make("p", { class: "soft" }, samples.length > 1 ? "No iteration in the last minute." : "Not known yet."));
    return;
  }
  const size = iterations ? (of("num_requests") / iterations).toFixed(1) : "–";
  const line = whole(iterations) + " iterations of " + size + " requests and " + seconds(iterations ? (total - of("nothing_to_do_s")) / iterations : null) + " on average";
  fill("ledger", "last minute", ...stacked(parts.map((part) => [...part, percent(part[1] / total)]), total), make("p", { class: "soft" }, line));
}

function showWorkers(last) {
  const load = loadOf(last), recent = before(rateMs), nodes = new Set(load.workers.map((one) => one.node));
  const hasElastic = load.workers.some((one) => one.is_elastic);
  const rows = load.workers.map((one) => {
    const read = (name) => (sample) => { const found = loadOf(sample) && loadOf(sample).workers.find((other) => other.worker === one.worker); return found ? found[name] : null; };
    const tokens = rate(recent, last, read("num_tokens")), prompts = rate(recent, last, read("num_prompt_tokens"));
    const wall = gain(recent, last, read("wall_s")), compute = gain(recent, last, read("compute_s"));
    const role = one.is_elastic ? "elastic" : one.can_prefill && one.can_decode ? "both phases" : one.can_prefill ? "prefill" : "decode";
    const badges = make("span", {}, make("span", { class: "badge" }, role), one.is_draining ? make("span", { class: "badge warn" }, "draining") : "");
    return [
      ...(nodes.size > 1 ? [one.node || "–"] : []), one.worker, badges, one.can_decode ? meter(one.num_running / Math.max(one.num_places, 1), one.num_running + " of " + one.num_places) : "–", whole(one.num_waiting),
      meter(one.num_blocks ? one.num_blocks_used / one.num_blocks : 0, whole(one.num_blocks_used) + " of " + whole(one.num_blocks), "two"), ...(hasElastic ? [one.is_elastic ? meter(one.lean, percent(one.lean)) : "–"] : []),
      tokens === null ? "–" : whole(tokens), prompts === null ? "–" : whole(prompts), wall ? percent(compute / wall) : "–",
    ];
  });
  const headings = ["worker", "role", "running", "waiting", "blocks", ...(hasElastic ? ["time for prompts"] : []), "tokens/s", "prompt tokens/s", "computing"];
  const counts = load.workers.length === 1 ? "1 worker" : load.workers.length + " workers";
  fill("workers", counts + (nodes.size > 1 ? " on " + nodes.size + " nodes" : ""), rows.length ? table([...(nodes.size > 1 ? ["node"] : []), ...headings], rows) : make("p", { class: "soft" }, "No worker is connected."));
}

// The quad-tree: a row per level, the root above; below it what workers run now, on the same axis.
function showLengths(load) {
  const trees = load.trees.filter((one) => one.tree.max_len), spans = load.workers.filter((one) => one.batch.num_requests);
  byId("lengths").hidden = false;  // else it has no width
  const wide = byId("lengths").clientWidth - 34 || 900, left = 74, width = wide - left - 8;
  const longest = Math.max(64, ...spans.map((one) => one.batch.longest), ...trees.flatMap(({ tree }) => tree.leaves.map((leaf) => (leaf.index + 1) * tree.leaf_len)), ...trees.map(({ tree }) => tree.formed ? tree.formed.stop : 0));
  const most = trees.reduce((all, { tree }) => Math.min(all, Math.max(tree.max_len, 1)), 4 ** 10);
  let reach = most;
  while (reach / 4 >= longest) {
    reach /= 4;
  }
  const eighth = Math.max(reach / 8, 16);  // the picture ends where nothing more is, at an eighth of the root
  const root = reach;
  reach = Math.ceil(Math.max(longest, 1) / eighth) * eighth;
  const x = (length) => left + width * Math.min(length / reach, 1), rows = [];
  let y = 4;
  for (const { place, tree } of trees) {
    let size = root, drawn = 0;
    if (tree.formed) {
      const { start, stop, num_requests: count, worker } = tree.formed;
      rows.push(draw("text", { x: 0, y: y + 11 }, "last batch"), draw("rect", { class: "formed", x: x(start), y, width: Math.max(x(stop) - x(start), 3), height: 12, rx: 2 }, draw("title", {}, count + " requests of " + start + " to " + (stop - 1) + " tokens for " + worker)));
      y += 18;
    }
    while (size >= tree.leaf_len && drawn < 7) {
      const counts = new Map();
      for (const leaf of tree.leaves) {
        const index = Math.floor(leaf.index * tree.leaf_len / size);
        counts.set(index, (counts.get(index) || 0) + leaf.num_requests);
      }
      const fullest = Math.max(1, ...counts.values());
      rows.push(draw("text", { x: 0, y: y + 13 }, drawn ? whole(size) + " wide" : place || "all"), draw("rect", { class: "empty", x: left, y, width, height: 18 }));
      for (const [index, count] of counts) {
        const from = x(index * size), node = draw("rect", { class: "node", x: from, y, width: Math.max(x((index + 1) * size) - from, 2), height: 18, "fill-opacity": (0.25 + 0.75 * count / fullest).toFixed(2) });
        node.append(draw("title", {}, count + " requests of " + (index * size + 1) + " to " + (index + 1) * size + " tokens"));
        rows.push(node);
      }
      y += 19, size /= 4, drawn += 1;
    }
    y += 8;
  }
  for (const { worker, batch } of spans) {
    const from = x(batch.shortest), to = x(batch.longest);
    rows.push(draw("text", { x: 0, y: y + 11 }, worker), draw("line", { class: "axis", x1: left, x2: left + width, y1: y + 7, y2: y + 7 }), draw("rect", { class: "span", x: from, y: y + 1, width: Math.max(to - from, 4), height: 12, rx: 2 }, draw("title", {}, batch.num_requests + " requests of " + batch.shortest + " to " + batch.longest + " tokens, " + batch.mean_len.toFixed(0) + " on average")), draw("rect", { class: "mean", x: x(batch.mean_len) - 1, y, width: 2, height: 14 }));
    y += 19;
  }
  for (let part = 0; part <= 4; part += 1) {
    rows.push(draw("text", { x: left + width * part / 4, y: y + 12, "text-anchor": part === 4 ? "end" : part ? "middle" : "start" }, whole(reach * part / 4)));
  }
  const waiting = trees.reduce((all, { tree }) => all + tree.leaves.reduce((some, leaf) => some + leaf.num_requests, 0), 0);
  const words = whole(waiting) + (waiting === 1 ? " request" : " requests") + (trees.length && trees[0].place ? " in the quad-trees of the pools" : ", by context on arrival") + (spans.length ? "; below, what workers run" : "");
  fill("lengths", words, draw("svg", { id: "tree", viewBox: "0 0 " + wide + " " + (y + 18), height: y + 18, role: "img", "aria-label": words }, ...rows));
}

function showObjectives(model) {
  const tiers = { real_time: "real-time", best_effort: "best effort" }, names = { ttft: "first token", tpot: "mean gap", deadline: "deadline" };
  const rows = model.objectives.map((one) => [tiers[one.tier] || one.tier, names[one.objective] || one.objective, meter(one.held / (one.held + one.missed), percent(one.held / (one.held + one.missed))), whole(one.held), whole(one.missed)]);
  fill("objectives", "since this gateway started", rows.length ? table(["class", "objective", "share held", "held", "missed"], rows) : make("p", { class: "soft" }, "No request has named an objective (headers x-slo-ttft-ms, x-slo-tpot-ms, x-slo-deadline-ms)."));
}

function showBatches(last) {
  byId("batches").hidden = !last.has_batches;
  if (!last.has_batches) {
    return;
  }
  const totals = last.batches, lines = totals ? whole(totals.num_waiting) + " lines waiting, " + whole(totals.num_in_flight) + " at work, " + whole(totals.completed) + " done" + (totals.num_at_risk ? ", " + totals.num_at_risk + " batches late" : "") : "their state cannot be reached";
  const rows = (ownBatches || []).map((one) => {
    const { total, completed, failed } = one.request_counts;
    return [make("span", { title: one.id }, one.id.length > 18 ? one.id.slice(0, 12) + "…" + one.id.slice(-4) : one.id), one.status.replaceAll("_", " "), meter(total ? (completed + failed) / total : 0, whole(completed) + " of " + whole(total)), whole(failed), waitsFor(one), expected(one), isOver(one) ? "–" : moment(one.expires_at)];
  });
  fill("batches", lines, rows.length ? table(["batch", "state", "lines", "failed", "why it waits", "expected", "due"], rows) : make("p", { class: "soft" }, "No batches of this key."));
}

function isOver(batch) {
  return ["completed", "failed", "expired", "cancelled"].includes(batch.status);
}

function moment(seconds) {
  return new Date(1000 * seconds).toLocaleString("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" });
}

function waitsFor(batch) {
  const own = batch.alignedserve || {};
  return isOver(batch) || !own.paused ? "–" : own.paused.replace(/\d{4}-\d\d-\d\dT[\d:]+Z/, (time) => moment(Date.parse(time) / 1000));
}

function expected(batch) {
  const quote = (batch.alignedserve || {}).quote;
  return isOver(batch) || !quote ? "–" : moment(quote.expected_at);
}

// Keys with the most tokens first; the server tells a key of itself alone unless it may see all.
function showUsage() {
  byId("usage").hidden = usage === null;
  if (usage === null) {
    return;
  }
  const keys = new Map();
  for (const one of usage.flatMap((bucket) => bucket.results)) {
    const sums = keys.get(one.key) || { key: one.key, requests: 0, prompt: 0, cached: 0, output: 0, computed: 0 };
    sums.requests += one.num_model_requests, sums.prompt += one.input_tokens, sums.cached += one.input_cached_tokens, sums.output += one.output_tokens, sums.computed += one.compute_seconds;
    keys.set(one.key, sums);
  }
  const tokens = (one) => one.prompt + one.output, sorted = [...keys.values()].sort((a, b) => tokens(b) - tokens(a)), total = sorted.reduce((sum, one) => sum + tokens(one), 0);
  const rest = sorted.splice(maxKeys), others = { requests: 0, prompt: 0, cached: 0, output: 0, computed: 0 };
  for (const one of rest) {
    for (const name of Object.keys(others)) {
      others[name] += one[name];
    }
  }
  const shown = rest.length ? [...sorted, Object.assign(others, { key: rest.length + " others" })] : sorted;
  const rows = shown.map((one) => [make("span", {}, one.key || "without a key"), meter(total ? tokens(one) / total : 0, percent(total ? tokens(one) / total : 0)), whole(one.requests), whole(one.prompt), whole(one.cached), whole(one.output), seconds(one.computed)]);
  fill("usage", "last 24 hours", rows.length ? table(["key", "share of tokens", "requests", "prompt tokens", "of them cached", "generated", "computed"], rows) : make("p", { class: "soft" }, "Nothing in the last 24 hours."));
}

// --- the loop

function show() {
  const last = samples[samples.length - 1], names = last.models.map((one) => one.name);
  if (!names.includes(chosen)) {
    chosen = names[0] === undefined ? null : names[0];
  }
  const menu = byId("models"), load = loadOf(last);
  if ([...menu.options].map((one) => one.value).join("\n") !== names.join("\n")) {
    menu.replaceChildren(...names.map((name) => new Option(name, name)));
  }
  menu.value = chosen;
  menu.hidden = names.length < 2;
  byId("model").textContent = names.length < 2 ? chosen || "" : "";
  byId("nothing").hidden = load !== null;
  byId("nothing").textContent = chosen === null ? "No model is served." : "No report yet: the router of this model is not connected.";
  if (load !== null) {
    showTiles(last), showQueues(load), showLedger(last), showWorkers(last), showLengths(load), showObjectives(modelOf(last)), showBatches(last), showUsage();
  }
  say(last.not_ready ? "Not ready: " + last.not_ready : "Ready", last.not_ready ? "warn" : "good");
}

function say(text, kind) {
  byId("state").textContent = text;
  byId("state").className = kind;
  document.querySelector("main").classList.toggle("stale", kind === "bad");
}

async function get(path) {
  const response = await fetch(path, { headers: key ? { Authorization: "Bearer " + key } : {}, signal: AbortSignal.timeout(10000) });
  byId("key-form").hidden = response.status !== 401;
  if (!response.ok) {
    throw new Error(response.status === 401 ? "This server needs an API key." : "The server answered with status " + response.status + ".");
  }
  return response.json();
}

async function poll() {
  if (!document.hidden) {
    try {
      const sample = await get("v1/alignedserve/live");
      if (sample.has_batches && polls % 3 === 0) {
        ownBatches = (await get("v1/batches?limit=6")).data;
      }
      if (polls % usagePolls === 0) {
        const since = Math.floor(Date.now() / 1000) - daySeconds;
        // Not kept where batches are off: then there is no such section.
        usage = await get("v1/usage?group_by=key&bucket_width=1h&limit=25&start_time=" + since).then((found) => found.data, () => null);
      }
      polls += 1;
      samples.push(Object.assign(sample, { at: performance.now() }));
      while (samples[0].at < sample.at - keptMs) {
        samples.shift();
      }
      show();
    } catch (error) {
      say(error.message.endsWith(".") ? error.message : "No connection; trying again.", "bad");
    }
  }
  setTimeout(poll, pollMs);
}

byId("models").addEventListener("change", () => {
  chosen = byId("models").value;
  sessionStorage.setItem("alignedserve-live-model", chosen);
  show();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("alignedserve-key", key);
});
poll();
