// The gateway's own page: asks `status` and `decisions` once a second and draws what they say.
//
// Nothing that arrives is trusted: numbers pass `number`, and names and reasons reach the document as text only. What
// was drawn last stays when the gateway does not answer. Rates are differences of its counters by its own clock.

const POLL_MS = 1000;
const ANSWER_MS_MAX = 5000;
const STALE_AFTER_MS = 3000;
const RETRY_MS_MAX = 5000;
const LOCKED_RETRY_MS = 10_000;
const MEAN_MS = 10_000;
const MINUTE_MS = 60_000;
const KEPT_MS = 3_600_000;
const HISTORY_PERIOD_MS = 10_000;
const GAP_MS = 5000;
const DECISIONS_MAX = 50;
const WORKERS_MAX = 2000;
const ROWS_AT_ONCE = 60;
const KEY_NAME = "kvasir-administrator-key";
const COUNTERS = ["requests", "failed", "shed", "migrations", "prompt_tokens", "cached_tokens", "generated_tokens"];
const TIERS = ["device", "host", "disk", "remote"];
const NONE = "–";
const SPACE = "\u202f";

// ---- What arrives ----

const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const amount = (value) => (number(value) !== null && value >= 0 ? value : null);
const text = (value) => (typeof value === "string" && value !== "" ? value.slice(0, 400) : null);
const list = (value) => (Array.isArray(value) ? value : []);
const object = (value) => (typeof value === "object" && value !== null && !Array.isArray(value) ? value : {});

// ---- Units ----

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const three = (value) => (value >= 99.95 ? whole.format(value) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2));

function scaled(value, units, step) {
  let at = 0;
  while (at + 1 < units.length && value >= step * 0.9995) {
    value /= step;
    at += 1;
  }
  return `${three(value)}${SPACE}${units[at]}`;
}

function count(value) {
  if (value === null) return NONE;
  return value < 100_000 ? whole.format(value) : scaled(value / 1000, ["k", "M", "G", "T"], 1000);
}

const rate = (value) => (value === null ? NONE : value === 0 ? "0" : value < 99.95 ? three(value) : count(value));
const percent = (value) => (value === null ? NONE : `${(value * 100).toFixed(1)}${SPACE}%`);
const bytes = (value) =>
  value === null ? NONE : value < 1024 ? `${whole.format(value)}${SPACE}B` : scaled(value / 1024, ["KiB", "MiB", "GiB", "TiB"], 1024);
const seconds = (value) =>
  value === null ? NONE : value >= 0.9995 ? `${three(value)}${SPACE}s` : scaled(value * 1e6, ["µs", "ms"], 1000);

/** The bound of a bucket, short. */
function bound(value) {
  const [scale, unit] = value < 0.000_999_5 ? [1e6, "µs"] : value < 0.9995 ? [1e3, "ms"] : [1, "s"];
  return `${Number((value * scale).toPrecision(3))}${SPACE}${unit}`;
}

function duration(value) {
  if (value === null || value < 0) return NONE;
  const parts = [[Math.floor(value / 86_400), "d"], [Math.floor(value / 3600) % 24, "h"], [Math.floor(value / 60) % 60, "min"], [Math.floor(value) % 60, "s"]];
  const first = Math.max(0, parts.findIndex(([each]) => each > 0));
  const shown = value < 1 ? [parts[3]] : parts.slice(first, first + 2);
  return shown.map(([each, unit]) => `${each}${SPACE}${unit}`).join(" ");
}

function clock(unixMs) {
  const date = new Date(unixMs ?? NaN);
  return Number.isNaN(date.getTime()) ? NONE : date.toLocaleTimeString("en-GB");
}

// ---- The document ----

const at = (id) => document.getElementById(id);

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function draw(tag, className, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  if (className) element.setAttribute("class", className);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Writes only what changed, so that nothing is laid out for nothing. */
function put(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

function hint(element, value) {
  if (element.title !== value) element.title = value;
}

function dress(element, className) {
  if (element.className !== className) element.className = className;
}

/**
 * Rows by key: a row that stays is filled again and keeps its place. Of very many rows those in view are filled each
 * time, and the others in turn, some each time.
 */
function keyedRows(body, makeRow) {
  const rows = new Map();
  const byElement = new WeakMap();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const row = byElement.get(target);
      if (!row) continue;
      row.isSeen = isIntersecting;
      if (isIntersecting) row.fill(row.item);
    }
  });
  let turn = 0;
  return (items) => {
    const keys = new Set(items.map((item) => item.key));
    for (const [key, row] of rows) {
      if (keys.has(key)) continue;
      watcher.unobserve(row.element);
      row.element.remove();
      rows.delete(key);
    }
    if (items.length) body.querySelector(":scope > .nothing-row")?.remove();
    let next = body.firstElementChild;
    turn = items.length > ROWS_AT_ONCE ? (turn + ROWS_AT_ONCE) % items.length : 0;
    for (const [index, item] of items.entries()) {
      let row = rows.get(item.key);
      const isNew = row === undefined;
      if (isNew) {
        row = makeRow(item);
        rows.set(item.key, row);
        byElement.set(row.element, row);
      }
      row.item = item;
      const isDue = (index - turn + items.length) % items.length < ROWS_AT_ONCE;
      if (isNew || isDue || row.isSeen) row.fill(item);
      if (row.element === next) next = next.nextElementSibling;
      else body.insertBefore(row.element, next);
      if (isNew) watcher.observe(row.element);
    }
  };
}

/** A table's head from [label, class, hint] rows; roles are spelled out because narrow windows show rows as cards. */
function makeHead(columns) {
  const row = make("tr");
  row.setAttribute("role", "row");
  for (const [label, className, explained] of columns) {
    const cell = make("th", className, label);
    hint(cell, explained ?? "");
    cell.scope = "col";
    cell.setAttribute("role", "columnheader");
    row.append(cell);
  }
  const head = make("thead", "", row);
  head.setAttribute("role", "rowgroup");
  return head;
}

function makeBody() {
  const body = make("tbody");
  body.setAttribute("role", "rowgroup");
  return body;
}

function makeRow(columns, className) {
  const element = make("tr", className);
  element.setAttribute("role", "row");
  const cells = columns.map(([label, cellClass]) => {
    const cell = make("td", cellClass);
    cell.setAttribute("role", "cell");
    cell.dataset.label = label;
    element.append(cell);
    return cell;
  });
  return { element, cells };
}

/** Two lines in a cell: the value, and what belongs to it. */
function twoLines(cell, upperClass = "line", lowerClass = "under") {
  const [upper, lower] = [make("span", upperClass), make("span", lowerClass)];
  cell.append(upper, lower);
  return { upper, lower };
}

/** A value in words with a bar below it; without a fraction the bar is hatched, without a value there is none. */
function gauge(cell, tint = "") {
  const inner = make("i");
  const bar = make("span", "bar", inner);
  bar.setAttribute("aria-hidden", "true");
  const words = make("span", "line gauge");
  cell.append(words, bar);
  return (fraction, value, explained = "") => {
    bar.hidden = value === NONE;
    const share = fraction === null ? 0 : Math.min(1, Math.max(0, fraction));
    inner.style.transform = `scaleX(${share.toFixed(4)})`;
    dress(bar, `bar${tint}${fraction === null ? " is-unknown" : fraction >= 0.9 && tint === "" ? " is-full" : ""}`);
    put(words, value);
    hint(cell, explained);
  };
}

function sayNothing(body, columns, words) {
  const said = body.querySelector(":scope > .nothing-row");
  if (said?.textContent === words) return;
  const cell = make("td", "nothing", words);
  cell.colSpan = columns;
  cell.setAttribute("role", "cell");
  const row = make("tr", "nothing-row", cell);
  row.setAttribute("role", "row");
  body.replaceChildren(row);
}

// ---- What was heard so far ----

const heard = {
  samples: [],
  status: null,
  workers: [],
  tiers: new Set(),
  /** By worker: bytes sent, as [time, bytes] of the last minute. */
  sent: new Map(),
  decisions: [],
  after: null,
  last: null,
  decisionsProblem: null,
};

function forgetRun() {
  heard.samples = [];
  heard.tiers.clear();
  heard.sent.clear();
  heard.decisions = [];
  heard.after = null;
  heard.last = null;
}

const difference = (now, before) => (now === null || before === null || now < before ? null : now - before);

/** The newest sample that is at least so old; else the oldest. */
function sampleBefore(ageMs) {
  const newest = heard.samples[heard.samples.length - 1];
  // Figures of the last minute begin when the page does; its charts go back further.
  const samples = newest.isPast ? heard.samples : heard.samples.filter((sample) => !sample.isPast);
  const until = newest.at - ageMs;
  let found = samples[0];
  for (const sample of samples) {
    if (sample.at > until) break;
    found = sample;
  }
  return found;
}

function hitRate(cached, prompt) {
  return cached === null || prompt === null || prompt <= 0 ? null : Math.min(1, cached / prompt);
}

/** What happened between a sample of that age and now. */
function lately(ageMs) {
  const now = heard.samples[heard.samples.length - 1];
  const before = sampleBefore(ageMs);
  const changes = { ms: now.at - before.at, before };
  for (const name of COUNTERS) changes[name] = difference(now[name], before[name]);
  changes.hits = hitRate(changes.cached_tokens, changes.prompt_tokens);
  const perSecond = (gain) => (gain === null || changes.ms <= 0 ? null : (gain * 1000) / changes.ms);
  changes.requestsPerSecond = perSecond(changes.requests);
  changes.tokensPerSecond = perSecond(changes.generated_tokens);
  return changes;
}

function readHistogram(value) {
  const { le, counts, sum } = object(value);
  const isCounted = Array.isArray(le) && Array.isArray(counts) && le.length > 0 && le.length <= 64 && counts.length === le.length + 1;
  if (!isCounted || ![...le, ...counts].every((one) => number(one) !== null && one >= 0)) return null;
  if (le.some((one, index) => index > 0 && one <= le[index - 1])) return null;
  return { le, counts, sum: number(sum) };
}

/** Samples of the gateway's own history, before the first answer of this page. A gateway without it is no problem. */
async function askHistory() {
  const answer = await ask("history").catch(() => ({}));
  const started = number(answer.started_unix);
  for (const entry of list(answer.samples).slice(-KEPT_MS / HISTORY_PERIOD_MS)) keepSample({ ...object(entry), started_unix: started }, true);
}

function takeStatus(status) {
  keepSample(status, false);
  heard.status = status;
  heard.workers = readWorkers(status.workers);
  keepSent(number(status.now_unix_ms) ?? Date.now());
}

function keepSent(now) {
  const names = new Set();
  for (const { name, transfers } of heard.workers) {
    const bytesSent = amount(transfers.bytes_sent);
    if (bytesSent === null || names.has(name)) continue;
    names.add(name);
    const kept = heard.sent.get(name) ?? [];
    // An engine that was started anew counts from zero.
    if (kept.length && kept[kept.length - 1][1] > bytesSent) kept.length = 0;
    kept.push([now, bytesSent]);
    while (kept.length > 2 && kept[1][0] <= now - MINUTE_MS) kept.shift();
    heard.sent.set(name, kept);
  }
  for (const name of heard.sent.keys()) if (!names.has(name)) heard.sent.delete(name);
}

/** Bytes that a worker has sent in a second, over the last minute or as much of it as was seen. */
function sentPerSecond(name) {
  const kept = heard.sent.get(name) ?? [];
  if (kept.length < 2) return null;
  const [[first, before], [last, now]] = [kept[0], kept[kept.length - 1]];
  return last > first ? ((now - before) * 1000) / (last - first) : null;
}

function keepSample(status, isHistory) {
  const sample = { at: number(status.now_unix_ms) ?? Date.now(), started: number(status.started_unix), active: number(status.active), gap: isHistory ? 3 * HISTORY_PERIOD_MS : GAP_MS, isPast: isHistory };
  for (const name of COUNTERS) sample[name] = number(status[name]);
  const histograms = object(status.histograms);
  sample.histograms = {};
  for (const view of HISTOGRAMS) sample.histograms[view.name] = readHistogram(histograms[view.name]);

  const last = heard.samples[heard.samples.length - 1];
  // Seconds that the page has seen itself are replaced by nothing.
  if (isHistory && (number(status.now_unix_ms) === null || (last && sample.at <= last.at))) return;
  const isNewRun = last && (sample.started !== last.started || sample.at <= last.at || COUNTERS.some((name) => sample[name] !== null && last[name] !== null && sample[name] < last[name]));
  if (isNewRun) forgetRun();
  heard.samples.push(sample);
  while (heard.samples[0].at < sample.at - KEPT_MS - MEAN_MS) heard.samples.shift();
  const mean = lately(MEAN_MS);
  sample.means = { requests: mean.requestsPerSecond, tokens: mean.tokensPerSecond, hits: mean.hits };
  thinOut();
}

/** Samples older than the short span are needed every ten seconds only. */
function thinOut() {
  const { samples } = heard;
  const until = samples[samples.length - 1].at - SPANS_MS.short;
  const at = samples.findIndex((sample, index) => index > 0 && sample.at < until && sample.at - samples[index - 1].at < HISTORY_PERIOD_MS);
  if (at > 0 && samples[at + 1]) {
    samples.splice(at, 1);
    samples[at].gap = 3 * HISTORY_PERIOD_MS;
  }
}

const byName = new Intl.Collator("en", { numeric: true });

function readWorkers(value) {
  const times = new Map();
  const workers = list(value).slice(0, WORKERS_MAX).map((entry) => {
    const worker = object(entry);
    const name = text(worker.name) ?? "(unnamed)";
    const time = times.get(name) ?? 0;
    times.set(name, time + 1);
    const state = worker.state === "sleeping" ? "Asleep" : worker.ready !== true ? "Not ready" : worker.is_out === true ? "Out" : "Ready";
    const engine = [text(worker.engine), text(worker.version)].filter((part) => part !== null).join(" ");
    const pools = new Map();
    for (const each of list(worker.pools).slice(0, 8)) {
      const pool = object(each);
      const tier = text(pool.tier);
      if (tier === null) continue;
      pools.set(tier, { blocks: amount(pool.blocks), indexed: amount(pool.indexed) });
      if (heard.tiers.size < 8) heard.tiers.add(tier);
    }
    const role = text(worker.role) ?? NONE;
    const sought = `${name} ${engine} ${role} ${state}`.toLowerCase();
    return { key: `${name}\n${time}`, name, worker, state, engine, role, pools, sought, transfers: object(worker.transfers) };
  });
  return workers.sort((one, other) => byName.compare(one.name, other.name) || one.key.localeCompare(other.key));
}

// ---- Tiles and facts ----

const TILES = [
  ["requests", "Requests/s"],
  ["tokens", "Generated tokens/s"],
  ["hits", "Hit rate, last minute"],
  ["active", "Active"],
  ["waiting", "Waiting"],
  ["failed", "Failed"],
  ["shed", "Shed"],
  ["migrations", "Migrations"],
];
const FACTS = [
  ["prompt-tokens", "Prompt tokens"],
  ["cached-tokens", "From cache"],
  ["disaggregated", "Disaggregated"],
  ["hedged", "Hedged"],
  ["broken", "Broken streams"],
  ["index-blocks", "Index blocks"],
  ["index-nodes", "Nodes"],
  ["index-bytes", "Index size"],
];
const tiles = {};
const facts = {};

for (const [name, label] of TILES) {
  const [value, below] = [make("div", "value", NONE), make("div", "below")];
  const element = make("div", "tile", make("h3", "", label), value, below);
  element.id = `tile-${name}`;
  tiles[name] = (shown, under, isBad = false) => {
    put(value, shown);
    put(below, under);
    hint(below, under);
    dress(element, isBad ? "tile is-bad" : "tile");
  };
  at("tiles").append(element);
}

for (const [name, label] of FACTS) {
  const value = make("dd", "", NONE);
  value.id = `fact-${name}`;
  facts[name] = (shown, exact) => {
    put(value, shown);
    hint(value, exact === null ? "" : whole.format(exact));
  };
  at("facts").append(make("div", "", make("dt", "", label), value));
}

function showTiles() {
  const { status } = heard;
  const now = heard.samples[heard.samples.length - 1];
  const minute = lately(MINUTE_MS);
  const inMinute = (gain) => (gain === null ? "" : `${count(gain)} in the last minute`);
  const sinceStart = (value, unit) => (value === null ? "" : `${unit(value)} since start`);
  tiles.requests(rate(now.means.requests), sinceStart(now.requests, count));
  tiles.tokens(rate(now.means.tokens), sinceStart(now.generated_tokens, count));
  tiles.hits(percent(minute.hits), sinceStart(hitRate(now.cached_tokens, now.prompt_tokens), percent));
  const recent = heard.samples.filter((sample) => sample.at >= now.at - SPANS_MS.short);
  const most = recent.reduce((most, sample) => Math.max(most, sample.active ?? 0), 0);
  tiles.active(count(now.active), `at most ${count(most)} in 3 min`);
  tiles.waiting(count(number(status.waiting)), "for a place");
  tiles.failed(count(now.failed), inMinute(minute.failed), minute.failed > 0);
  tiles.shed(count(now.shed), inMinute(minute.shed), minute.shed > 0);
  tiles.migrations(count(now.migrations), inMinute(minute.migrations));

  const index = object(status.index);
  const fact = (name, value, unit = count) => facts[name](unit(number(value)), number(value));
  fact("prompt-tokens", status.prompt_tokens);
  fact("cached-tokens", status.cached_tokens);
  fact("disaggregated", status.disaggregated);
  fact("hedged", status.hedged);
  fact("broken", status.broken_streams);
  fact("index-blocks", index.blocks);
  fact("index-nodes", index.nodes);
  fact("index-bytes", index.bytes, bytes);
}

function showAbout() {
  const { status } = heard;
  const [model, version, strategy] = [text(status.model), text(status.version), text(status.strategy)];
  for (const [id, value] of [["model", model], ["version", version], ["strategy", strategy]]) {
    put(at(id), value ?? NONE);
    hint(at(id), value ?? "");
  }
  const [started, now] = [number(status.started_unix), number(status.now_unix_ms) ?? Date.now()];
  put(at("uptime"), started === null ? NONE : duration(now / 1000 - started));
}

// ---- Charts ----

const CHARTS = [
  { name: "requests", title: "Requests/s", tint: "blue", show: rate },
  { name: "tokens", title: "Generated tokens/s", tint: "violet", show: rate },
  { name: "hits", title: "Hit rate", tint: "green", show: percent, max: 1 },
];
const SPANS_MS = { short: 180_000, long: KEPT_MS };
let chartMs = SPANS_MS.short;
const CHART = { height: 132, left: 40, right: 6, top: 6, bottom: 20 };
let pointedMs = null;

/** The next round number up, so that the scale moves seldom. */
function roundUp(value) {
  if (value <= 0) return 1;
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((factor) => factor * step).find((round) => round >= value * 0.9999) ?? value;
}

function onWidth(element, act) {
  new ResizeObserver(([entry]) => act(Math.max(120, entry.contentRect.width))).observe(element);
}

for (const chart of CHARTS) {
  chart.svg = draw("svg", "", { role: "img" });
  chart.reading = make("span", "reading", NONE);
  chart.when = make("span", "when");
  chart.grid = draw("g");
  chart.area = draw("path", "area");
  chart.curve = draw("path", "curve");
  chart.cross = draw("path", "cross");
  chart.dot = draw("circle", "dot", { r: 3.5, visibility: "hidden" });
  chart.svg.append(chart.grid, chart.area, chart.curve, chart.cross, chart.dot);
  const title = make("figcaption", "title", make("h3", "", chart.title), chart.when, chart.reading);
  const figure = make("figure", `panel chart ${chart.tint}`, title, chart.svg);
  figure.id = `chart-${chart.name}`;
  at("charts").append(figure);
  chart.width = 360;
  onWidth(chart.svg, (width) => {
    chart.width = width;
    showChart(chart);
  });
  chart.svg.addEventListener("pointermove", (event) => point(chart, event));
  chart.svg.addEventListener("pointerleave", () => {
    pointedMs = null;
    CHARTS.forEach(showChart);
  });
}

for (const input of document.querySelectorAll("input[name=span]")) {
  input.addEventListener("change", () => {
    chartMs = input.value === "60" ? SPANS_MS.long : SPANS_MS.short;
    CHARTS.forEach(showChart);
  });
}

/** A place in one chart is the same time in all. */
function point(chart, event) {
  const box = chart.svg.getBoundingClientRect();
  const share = (event.clientX - box.left - CHART.left) / (box.width - CHART.left - CHART.right);
  pointedMs = chartMs * (1 - Math.min(1, Math.max(0, share)));
  CHARTS.forEach(showChart);
}

function gridLine(group, x1, x2, y, label, className = "grid") {
  group.append(draw("line", className, { x1, x2, y1: y, y2: y }));
  const words = draw("text", "", { x: x1 - 6, y: y + 3.5, "text-anchor": "end" });
  words.textContent = label;
  group.append(words);
}

function showChart(chart) {
  const { samples } = heard;
  const now = samples[samples.length - 1]?.at ?? 0;
  const values = samples.filter((sample) => sample.at >= now - chartMs);
  const largest = values.reduce((most, sample) => Math.max(most, sample.means[chart.name] ?? 0), 0);
  const scale = chart.max ?? roundUp(largest);
  const [left, right] = [CHART.left, chart.width - CHART.right];
  const [top, base] = [CHART.top, CHART.height - CHART.bottom];
  const x = (sample) => right - ((now - sample.at) / chartMs) * (right - left);
  const y = (value) => base - (Math.min(value, scale) / scale) * (base - top);

  const key = `${scale} ${chart.width} ${chartMs}`;
  if (chart.key !== key) {
    chart.key = key;
    chart.grid.replaceChildren();
    const label = (value) => (chart.max ? `${value * 100}${SPACE}%` : value < 1000 ? String(Number(value.toPrecision(3))) : count(value));
    gridLine(chart.grid, left, right, top, label(scale));
    gridLine(chart.grid, left, right, (top + base) / 2, label(scale / 2));
    gridLine(chart.grid, left, right, base, "0", "base");
    const all = chartMs / 60_000;
    for (const minutes of [all, (all / 3) * 2, all / 3, 0]) {
      const words = draw("text", "", { x: right - (minutes / all) * (right - left), y: CHART.height - 4, "text-anchor": minutes === all ? "start" : minutes ? "middle" : "end" });
      words.textContent = minutes ? `−${minutes}${SPACE}min` : "now";
      chart.grid.append(words);
    }
  }

  let [curve, area, run] = ["", "", []];
  const close = () => {
    if (run.length === 0) return;
    const points = run.map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join("L");
    curve += `M${points}${run.length === 1 ? "h0.1" : ""}`;
    area += `M${run[0][0].toFixed(1)} ${base}L${points}L${run[run.length - 1][0].toFixed(1)} ${base}Z`;
    run = [];
  };
  let before = null;
  for (const sample of values) {
    const value = sample.means[chart.name];
    if (value === null || (before !== null && sample.at - before > sample.gap)) close();
    if (value !== null) run.push([x(sample), y(value)]);
    before = sample.at;
  }
  close();
  chart.curve.setAttribute("d", curve);
  chart.area.setAttribute("d", area);

  const newest = values[values.length - 1]?.means[chart.name] ?? null;
  let [shown, when] = [newest, ""];
  chart.cross.setAttribute("d", "");
  chart.dot.setAttribute("visibility", "hidden");
  if (pointedMs !== null && values.length) {
    const distance = (sample) => Math.abs(now - pointedMs - sample.at);
    const nearest = values.reduce((best, sample) => (distance(sample) < distance(best) ? sample : best));
    shown = nearest.means[chart.name];
    when = clock(nearest.at);
    chart.cross.setAttribute("d", `M${x(nearest).toFixed(1)} ${top}V${base}`);
    if (shown !== null) {
      chart.dot.setAttribute("cx", x(nearest).toFixed(1));
      chart.dot.setAttribute("cy", y(shown).toFixed(1));
      chart.dot.setAttribute("visibility", "visible");
    }
  }
  put(chart.reading, chart.show(shown));
  put(chart.when, when);
  const most = chart.max ? "" : `, at most ${chart.show(largest)}`;
  chart.svg.setAttribute("aria-label", `${chart.title} over the last ${chartMs / 60_000} minutes: now ${chart.show(newest)}${most}`);
}

// ---- Histograms ----

const HISTOGRAMS = [
  { name: "time_to_first_token", title: "Time to first token", tint: "blue", unit: "requests" },
  { name: "inter_token", title: "Between tokens", tint: "violet", unit: "gaps" },
  { name: "routing", title: "Routing decision", tint: "green", unit: "decisions" },
];
const HISTOGRAM = { height: 148, left: 40, right: 6, top: 26, bottom: 20 };
const QUANTILES = [["p50", 0.5], ["p90", 0.9], ["p99", 0.99]];
let period = "minute";

for (const view of HISTOGRAMS) {
  view.svg = draw("svg", "", { role: "img" });
  view.grid = draw("g");
  view.columns = draw("g");
  view.marks = draw("g");
  view.svg.append(view.grid, view.columns, view.marks);
  view.total = make("span", "reading", NONE);
  view.unitText = make("span", "when", view.unit);
  view.numbers = {};
  const quantiles = make("dl", "quantiles");
  for (const name of ["p50", "p90", "p99", "mean"]) {
    view.numbers[name] = make("dd", name, NONE);
    quantiles.append(make("div", "", make("dt", "", name), view.numbers[name]));
  }
  const title = make("figcaption", "title", make("h3", "", view.title), view.total, view.unitText);
  const figure = make("figure", `panel histogram ${view.tint}`, title, quantiles, view.svg);
  figure.id = `histogram-${view.name}`;
  at("histograms").append(figure);
  view.width = 360;
  onWidth(view.svg, (width) => {
    view.width = width;
    showHistogram(view);
  });
}

for (const input of document.querySelectorAll("input[name=period]")) {
  input.addEventListener("change", () => {
    period = input.value;
    if (heard.samples.length) showLatency();
  });
}

/** What a histogram gained since an earlier one; `null` if they have not the same bounds. */
function gained(now, before) {
  if (!now || !before || now.le.join() !== before.le.join()) return null;
  const counts = now.counts.map((each, index) => each - before.counts[index]);
  if (counts.some((each) => each < 0)) return null;
  return { le: now.le, counts, sum: difference(now.sum, before.sum) };
}

/** A quantile, linear within its bucket: its value, and its place counted in buckets. */
function quantile({ le, counts }, share) {
  const total = counts.reduce((sum, each) => sum + each, 0);
  if (total === 0) return null;
  const rank = share * total;
  let below = 0;
  for (const [index, each] of counts.entries()) {
    if (each > 0 && below + each >= rank) {
      if (index === le.length) return { value: le[index - 1], isAbove: true, place: index + 0.5 };
      const within = (rank - below) / each;
      const low = index === 0 ? 0 : le[index - 1];
      return { value: low + (le[index] - low) * within, isAbove: false, place: index + within };
    }
    below += each;
  }
  return null;
}

function bucketName(le, index) {
  if (index === le.length) return `above ${bound(le[index - 1])}`;
  return index === 0 ? `up to ${bound(le[0])}` : `${bound(le[index - 1])} to ${bound(le[index])}`;
}

function showHistogram(view) {
  const isHeard = heard.samples.length > 0;
  const now = isHeard ? heard.samples[heard.samples.length - 1].histograms[view.name] : null;
  const shown = !isHeard || period === "start" ? now : gained(now, sampleBefore(MINUTE_MS).histograms[view.name]);
  const total = shown === null ? null : shown.counts.reduce((sum, each) => sum + each, 0);
  put(view.total, count(total));
  const found = QUANTILES.map(([name, share]) => [name, shown === null ? null : quantile(shown, share)]);
  for (const [name, one] of found) {
    put(view.numbers[name], one === null ? NONE : one.isAbove ? `>${SPACE}${bound(one.value)}` : seconds(one.value));
  }
  put(view.numbers.mean, shown === null || shown.sum === null || !total ? NONE : seconds(shown.sum / total));
  const spoken = found.map(([name]) => `${name} ${view.numbers[name].textContent}`).join(", ");
  view.svg.setAttribute("aria-label", `${view.title}, ${count(total)} ${view.unit}: ${spoken}`);
  drawColumns(view, shown, total, found);
}

function drawColumns(view, shown, total, found) {
  const { left, top } = HISTOGRAM;
  const [right, base] = [view.width - HISTOGRAM.right, HISTOGRAM.height - HISTOGRAM.bottom];
  const le = shown?.le ?? [];
  const wide = (right - left) / (le.length + 1);
  const largest = total ? Math.max(...shown.counts) : 0;

  const key = `${view.width} ${largest} ${le.join()} ${shown === null ? heard.status === null : total === 0}`;
  if (view.key !== key) {
    view.key = key;
    view.grid.replaceChildren();
    if (largest > 0) gridLine(view.grid, left, right, top, count(largest));
    gridLine(view.grid, left, right, base, "0", "base");
    const each = Math.max(1, Math.ceil(46 / wide));
    for (let index = each - 1; index < le.length; index += each) {
      const x = left + (index + 1) * wide;
      view.grid.append(draw("line", "base", { x1: x, x2: x, y1: base, y2: base + 3 }));
      const words = draw("text", "", { x, y: HISTOGRAM.height - 4, "text-anchor": x > right - 16 ? "end" : "middle" });
      words.textContent = bound(le[index]);
      view.grid.append(words);
    }
    if (!total) {
      const words = draw("text", "empty", { x: (left + right) / 2, y: (top + base) / 2 });
      words.textContent = shown !== null ? "Nothing in this period" : heard.status ? "The gateway does not say" : "";
      view.grid.append(words);
    }
  }

  while (view.columns.childElementCount > le.length + 1) view.columns.lastElementChild.remove();
  while (le.length && view.columns.childElementCount < le.length + 1) {
    const column = draw("rect", "column");
    column.append(draw("title"));
    view.columns.append(column);
  }
  if (!le.length) view.columns.replaceChildren();
  for (const [index, column] of [...view.columns.children].entries()) {
    const each = shown.counts[index];
    const height = each === 0 ? 0 : Math.max(2, (each / largest) * (base - top));
    const gap = Math.min(1, wide * 0.1);
    const box = { x: left + index * wide + gap, width: wide - 2 * gap, y: base - height, height };
    for (const [name, value] of Object.entries(box)) column.setAttribute(name, value.toFixed(2));
    column.dataset.count = String(each);
    put(column.firstElementChild, `${bucketName(le, index)}: ${whole.format(each)} ${view.unit}`);
  }

  view.marks.replaceChildren();
  const ends = [];
  for (const [name, one] of found) {
    if (one === null) continue;
    const x = left + one.place * wide;
    // Names stand side by side where they can, else one higher.
    const row = [0, 1, 2].find((each) => !(ends[each] > x - 14)) ?? 2;
    ends[row] = x + 14;
    const y = top - 6 - row * 10;
    view.marks.append(draw("line", `mark-line ${name}`, { x1: x, x2: x, y1: y + 2, y2: base }));
    const words = draw("text", "mark-name", { x, y, "text-anchor": x > right - 14 ? "end" : "middle" });
    words.textContent = name;
    view.marks.append(words);
  }
}

function showLatency() {
  const spanMs = lately(MINUTE_MS).ms;
  const isShort = period === "minute" && spanMs < MINUTE_MS - 2 * POLL_MS;
  put(at("latency-note"), isShort ? `so far only the ${duration(spanMs / 1000)} since this page opened` : "quantiles are interpolated within their bucket");
  HISTOGRAMS.forEach(showHistogram);
}

// ---- Workers and pools ----

const WORKER_COLUMNS = [
  ["Worker", "w-name wide", "One line for each rank"],
  ["State", "w-state"],
  ["Role", "w-role"],
  ["Requests", "w-requests number", "In flight, booked by this gateway and by its peers"],
  ["Running / waiting", "w-engine number", "As the engine reports them"],
  ["KV usage", "w-kv", "As the engine reports it"],
  ["Events", "w-events", "Whether the index follows its KV events"],
  ["Slowness", "w-slow number", "Learned: 1 is as fast as the fleet"],
  ["Ejections", "w-out number", "Times that its circuit breaker opened"],
  ["Exact", "number", "Requests whose cached tokens were predicted to the token"],
];
const STATES = {
  "Ready": ["● Ready", "line is-good", "It takes requests."],
  "Out": ["▲ Out", "line is-failed", "Its circuit breaker is open: it gets no requests until it answers again."],
  "Asleep": ["◑ Asleep", "line is-faint", "Its engine sleeps, and is woken when demand grows."],
  "Not ready": ["○ Not ready", "line is-faint", "It has not said yet what it is, or is still warming up."],
};
const workersBody = makeBody();
const poolsBody = makeBody();
at("workers").append(makeHead(WORKER_COLUMNS), workersBody);
const showWorkerRows = keyedRows(workersBody, workerRow);
let filterWords = [];
let pools = null;

function workerRow() {
  const { element, cells } = makeRow(WORKER_COLUMNS);
  const [name, state, role, requests, engine, kv, events, slowness, ejections, predictions] = cells;
  const lines = [name, requests, engine, predictions].map((cell) => twoLines(cell));
  lines[0].upper.classList.add("strong");
  const [stateLine, roleLine, eventLine, slownessLine, ejectionLine] = [state, role, events, slowness, ejections].map((cell) => {
    const line = make("span", "line");
    cell.append(line);
    return line;
  });
  const kvGauge = gauge(kv);
  const fill = (item) => {
    const { worker } = item;
    put(lines[0].upper, item.name);
    hint(name, item.name);
    put(lines[0].lower, item.engine || (item.state === "Not ready" ? "" : "engine unknown"));
    const [label, className, explained] = STATES[item.state];
    put(stateLine, label);
    dress(stateLine, className);
    hint(stateLine, explained);
    put(roleLine, item.role);
    put(lines[1].upper, count(number(worker.requests)));
    const peers = number(worker.peers_requests);
    put(lines[1].lower, peers ? `+ ${count(peers)} by peers` : "");
    const [running, waiting] = [number(worker.engine_running), number(worker.engine_waiting)];
    put(lines[2].upper, running === null && waiting === null ? NONE : `${count(running)} / ${count(waiting)}`);
    const usage = number(worker.kv_usage);
    kvGauge(usage, usage === null ? NONE : percent(usage));
    put(eventLine, typeof worker.events !== "boolean" ? NONE : worker.events ? "exact" : "approximate");
    hint(eventLine, typeof worker.events !== "boolean" ? "" : worker.events ? "The index follows its KV events." : "What it holds is guessed from what was sent to it.");
    const slow = number(worker.slowness);
    // What the kernel of its machine says of why it is slow.
    const why = text(object(worker.kernel).why) ?? "";
    const isSlow = why !== "" || (slow !== null && slow >= 1.5);
    put(slownessLine, slow === null ? NONE : `${isSlow ? "▲ " : ""}${three(slow)}×`);
    dress(slownessLine, isSlow ? "line is-warned" : "line");
    hint(slowness, why);
    const ejected = number(worker.ejections);
    put(ejectionLine, count(ejected));
    dress(ejectionLine, ejected ? "line strong" : "line");
    showPredictions(predictions, lines[3], object(worker.predictions));
  };
  return { element, fill };
}

function showPredictions(cell, { upper, lower }, predictions) {
  const [requests, exact] = [number(predictions.requests), number(predictions.exact)];
  const share = requests ? (exact ?? 0) / requests : null;
  // Rounding must not turn nearly all into all.
  put(upper, share === null ? NONE : share === 1 ? `100${SPACE}%` : percent(Math.min(share, 0.9994)));
  put(lower, requests ? `of ${count(requests)}` : "");
  const [predicted, reported] = [number(predictions.predicted_tokens), number(predictions.reported_tokens)];
  hint(cell, predicted === null ? "" : `Cached tokens: ${count(predicted)} predicted, ${count(reported)} reported by the engine.`);
}

// ---- Scaling ----

const SCALING_COLUMNS = [
  ["Role", "w-role"],
  ["Wanted", "w-short number", "Workers that the planner wants"],
  ["There are", "w-wide", "Ready workers, and those that start, drain, or have been starting for too long"],
  ["Demand", "w-short number", "Requests per second"],
  ["A worker serves", "w-short number", "Requests per second within the service level, as far as it is known"],
  ["Reason", "w-reason wide"],
];
const CHANGES_SHOWN = 5;
const PLAN_OLD_MS = 60_000;
const scalingBody = makeBody();
at("scaling").append(makeHead(SCALING_COLUMNS), scalingBody);
const showScalingRows = keyedRows(scalingBody, scalingRow);

function scalingRow() {
  const { element, cells } = makeRow(SCALING_COLUMNS);
  const lines = cells.map((cell) => {
    const line = make("span", cell === cells.at(-1) ? "reason" : "line");
    cell.append(line);
    return line;
  });
  const fill = ({ pool }) => {
    const parts = [`${count(amount(pool.ready))} ready`];
    for (const word of ["starting", "draining", "sleeping", "stuck"]) if (amount(pool[word])) parts.push(`${count(pool[word])} ${word}`);
    const values = [text(pool.pool) ?? NONE, count(amount(pool.wanted)), parts.join(", "), rate(amount(pool.rate)), rate(amount(pool.capacity)), text(pool.text) ?? NONE];
    values.forEach((value, index) => put(lines[index], value));
    dress(lines[1], "line strong");
    dress(lines[2], amount(pool.stuck) ? "line is-warned" : "line");
    hint(cells.at(-1), values.at(-1));
  };
  return { element, fill };
}

/** For each pool whose recorded demand was replayed: what each share of capacity would have cost, and attained. */
function showTrials(pools) {
  const drawn = pools.map((pool) => [text(pool.pool) ?? NONE, number(pool.utilisation), list(pool.trials).slice(0, 64).map(list)]);
  const shown = drawn.filter(([, , trials]) => trials.length > 1);
  const element = at("scaling-trials");
  const key = JSON.stringify(shown);
  if (element.dataset.shown === key) return;
  element.dataset.shown = key;
  element.replaceChildren(...shown.map(([name, chosen, trials]) => trialsChart(name, chosen, trials)));
}

function trialsChart(name, chosen, trials) {
  const [width, height, left, top, right, base] = [420, 170, 46, 16, 404, 140];
  const points = trials.map((trial) => trial.map((value) => number(value) ?? 0));
  const [workers, attained] = [points.map((point) => point[2]), points.map((point) => point[1])];
  const span = (values) => [Math.min(...values), Math.max(...values)];
  const place = (value, [low, high], from, to) => from + ((high > low ? (value - low) / (high - low) : 0.5) * (to - from));
  const x = (point) => place(point[2], span(workers), left, right);
  const y = (point) => place(point[1], span(attained), base, top);
  const svg = draw("svg", "", { role: "img", viewBox: `0 0 ${width} ${height}`, width, height });
  svg.append(draw("line", "grid", { x1: left, x2: right, y1: base, y2: base }), draw("line", "grid", { x1: left, x2: left, y1: top, y2: base }));
  const words = (value, attributes) => {
    const element = draw("text", "", attributes);
    element.textContent = value;
    svg.append(element);
  };
  for (const end of new Set(span(attained))) words(percent(end), { x: left - 4, y: place(end, span(attained), base, top) + 4, "text-anchor": "end" });
  for (const end of new Set(span(workers))) words(three(end), { x: place(end, span(workers), left, right), y: base + 14, "text-anchor": "middle" });
  words("workers", { x: (left + right) / 2, y: base + 26, "text-anchor": "middle" });
  const sorted = [...points].sort((one, other) => one[2] - other[2]);
  svg.append(draw("polyline", "curve", { points: sorted.map((point) => `${x(point).toFixed(1)},${y(point).toFixed(1)}`).join(" ") }));
  for (const point of points) {
    const isChosen = point[0] === chosen;
    const dot = draw("circle", isChosen ? "dot chosen" : "dot", { cx: x(point).toFixed(1), cy: y(point).toFixed(1), r: isChosen ? 5 : 3 });
    dot.append(draw("title"));
    put(dot.firstElementChild, `used to ${percent(point[0])}: ${percent(point[1])} in time with ${three(point[2])} workers${isChosen ? "; in force" : ""}`);
    svg.append(dot);
  }
  const title = make("figcaption", "", `${name}: recorded demand replayed in simulation, requests in time by workers`);
  svg.setAttribute("aria-label", `${title.textContent}; in force is a use of ${chosen === null ? NONE : percent(chosen)}`);
  return make("figure", "panel trials blue", title, svg);
}

/** What a planner has posted; without one the section is hidden. */
function showScaling() {
  const plan = object(heard.status.plan);
  const pools = list(plan.pools).slice(0, 64).map(object);
  at("scaling-section").hidden = pools.length === 0;
  if (pools.length === 0) return;
  const age = number(heard.status.now_unix_ms) - (number(plan.unix_ms) ?? NaN);
  const acts = plan.mode === "act" ? "the planner starts and stops workers" : "the planner advises; nobody acts on it";
  put(at("scaling-note"), age > PLAN_OLD_MS ? `from ${clock(number(plan.unix_ms))}: the planner has fallen silent` : acts);
  showScalingRows(pools.map((pool, index) => ({ key: `${index}`, pool })));
  showTrials(pools);
  const changes = list(plan.changes).slice(-CHANGES_SHOWN).reverse().map(object);
  const words = changes.map((each) => `${clock(number(each.unix_ms))} ${count(amount(each.from))} → ${count(amount(each.to))}: ${text(each.text) ?? NONE}`);
  const element = at("scaling-changes");
  if (element.dataset.shown === words.join("\n")) return;
  element.dataset.shown = words.join("\n");
  element.replaceChildren(...words.map((word) => make("li", "", word)));
}

/** A table anew for each set of tiers: workers have the tiers that they have. */
function poolTable() {
  const known = TIERS.filter((tier) => heard.tiers.has(tier));
  const tiers = [...known, ...[...heard.tiers].filter((tier) => !TIERS.includes(tier)).sort()];
  const key = tiers.join("\n");
  if (pools?.key !== key) {
    const columns = [["Worker", "w-name wide"], ...tiers.map((tier) => [tier[0].toUpperCase() + tier.slice(1), "w-tier", tier])];
    poolsBody.replaceChildren();
    at("pools").replaceChildren(makeHead(columns), poolsBody);
    pools = { key, tiers, fill: keyedRows(poolsBody, (item) => poolRow(item, columns, tiers)) };
  }
  return pools;
}

function poolRow(item, columns, tiers) {
  const { element, cells } = makeRow(columns, item.isTotal ? "total" : "");
  const name = make("span", "line");
  cells[0].append(name);
  const gauges = tiers.map((tier, index) => gauge(cells[index + 1], " is-green"));
  const fill = (each) => {
    put(name, each.name);
    hint(cells[0], each.name);
    for (const [index, tier] of tiers.entries()) showPool(gauges[index], cells[index + 1], each.pools.get(tier));
  };
  return { element, fill };
}

function showPool(show, cell, pool) {
  cell.classList.toggle("is-faint", pool === undefined);
  if (pool === undefined) return show(0, NONE, "It has no such pool.");
  const { blocks, indexed, beside } = pool;
  if (blocks === null) return show(null, `${count(indexed)} · size unknown`, "How large the pool is, is not known.");
  const more = beside ? ` + ${count(beside)} unsized` : "";
  const explained = beside ? `${whole.format(beside)} more blocks are in pools whose size is not known.` : "";
  return show(blocks > 0 ? (indexed ?? 0) / blocks : 0, `${count(indexed)} of ${count(blocks)}${more}`, explained);
}

/** All workers' pools of each tier, of known size and beside. */
function poolTotals(workers) {
  const totals = new Map();
  for (const { pools: own } of workers) {
    for (const [tier, { blocks, indexed }] of own) {
      const total = totals.get(tier) ?? { blocks: null, indexed: 0, beside: 0 };
      if (blocks === null) total.beside += indexed ?? 0;
      else {
        total.blocks = (total.blocks ?? 0) + blocks;
        total.indexed += indexed ?? 0;
      }
      totals.set(tier, total);
    }
  }
  for (const total of totals.values()) {
    if (total.blocks === null) [total.indexed, total.beside] = [total.beside, 0];
  }
  return totals;
}

function showWorkers() {
  const all = heard.workers;
  const chosen = filterWords.length ? all.filter((item) => filterWords.every((word) => item.sought.includes(word))) : all;
  const states = (state) => all.filter((item) => item.state === state).length;
  const troubles = [[states("Out"), "out"], [states("Not ready"), "not ready"]].filter(([many]) => many > 0);
  const surplus = list(heard.status.workers).length - all.length;
  const of = surplus > 0 ? `${count(surplus)} more are left out; ` : filterWords.length ? `${chosen.length} of ${all.length} shown; ` : "";
  put(at("workers-note"), `${of}${[`${states("Ready")} of ${all.length} ready`, ...troubles.map(([many, word]) => `${many} ${word}`)].join(", ")}`);
  showWorkerRows(chosen);
  if (chosen.length === 0) sayNothing(workersBody, WORKER_COLUMNS.length, all.length ? "No worker matches the filter." : "The gateway has no workers.");

  const table = poolTable();
  const withPools = chosen.filter((item) => item.pools.size > 0);
  const name = filterWords.length ? `All ${withPools.length} shown` : `All ${withPools.length} workers`;
  const total = { key: "total", name, isTotal: true, pools: poolTotals(withPools) };
  table.fill(withPools.length ? [total, ...withPools.map((item) => ({ ...item, key: `worker ${item.key}` }))] : []);
  if (withPools.length === 0) sayNothing(poolsBody, table.tiers.length + 1, "No worker has said what pools it has.");
}

at("filter").addEventListener("input", (event) => {
  filterWords = event.target.value.toLowerCase().split(/\s+/).filter((word) => word !== "");
  if (heard.status) showWorkers();
});

// ---- Hand-offs ----

const TRANSFER_COLUMNS = [
  ["Worker, transport", "w-name wide"],
  ["Sent", "number", "Bytes of blocks written to other workers since the engine started; below per second, over the last minute"],
  ["Blocks received", "number", "Received and verified"],
  ["Whole", "number", "Transfers received whole"],
  ["Incomplete", "number", "Transfers that ended with blocks missing: those are computed"],
  ["Cancelled", "number", "By either side"],
  ["Expired", "number", "Outgoing transfers whose lease ended before a receiver reserved them"],
  ["Damaged", "number", "Pieces whose checksum did not match"],
  ["Lost", "number", "Connections to peers that ended; of a transport: those that ended while their peer went on over others"],
  ["Time for a KiB", "number", "Queue included, where peers have several transports of one rank"],
];
const STAGE_COLUMNS = [
  ["Stage", "w-name wide"],
  ["Count", "number"],
  ["p50", "number"],
  ["p99", "number"],
  ["Mean", "number"],
];
const STAGES = {
  reserve: "receiver: until the sender knows the slots",
  first_part: "receiver: from then until the first layers are there, the sender's computation among them",
  verify: "receiver: from when layers are announced until they are verified",
  whole: "receiver: from the expectation until every block is verified",
  write: "sender: from the push of layers until their last write is posted",
  sum: "sender: from then until their checksums are announced",
  finish: "sender: from its last word until the receiver has it",
};
const RAILS_SHOWN = 64;
const [transfersBody, stagesBody] = [makeBody(), makeBody()];
at("transfers").append(makeHead(TRANSFER_COLUMNS), transfersBody);
at("stages").append(makeHead(STAGE_COLUMNS), stagesBody);
const showTransferRows = keyedRows(transfersBody, (item) => (item.rail ? railRow() : transferRow()));
const showStageRows = keyedRows(stagesBody, stageRow);

function cellLines(columns, className) {
  const { element, cells } = makeRow(columns, className);
  const lines = cells.map((cell) => {
    const line = make("span", "line");
    cell.append(line);
    return line;
  });
  return { element, cells, lines };
}

function transferRow() {
  const { element, cells } = makeRow(TRANSFER_COLUMNS);
  const lines = cells.map((cell) => twoLines(cell));
  lines[0].upper.classList.add("strong");
  const fill = ({ name, engine, transfers }) => {
    put(lines[0].upper, name);
    hint(cells[0], name);
    put(lines[0].lower, engine);
    put(lines[1].upper, bytes(amount(transfers.bytes_sent)));
    const perSecond = sentPerSecond(name);
    put(lines[1].lower, perSecond === null ? "" : `${bytes(perSecond)}/s`);
    const counts = ["blocks_received", "completed", "incomplete", "cancelled", "leases_expired", "checksum_failures", "peers_lost"];
    for (const [index, field] of counts.entries()) {
      const value = amount(transfers[field]);
      const { upper } = lines[index + 2];
      put(upper, count(value));
      const isBad = field === "checksum_failures" ? "is-failed" : ["incomplete", "leases_expired"].includes(field) ? "is-warned" : "";
      dress(upper, value && isBad ? `line ${isBad}` : "line");
    }
  };
  return { element, fill };
}

function railRow() {
  const { element, cells, lines } = cellLines(TRANSFER_COLUMNS, "rail");
  const fill = ({ rail }) => {
    const isSlow = rail.is_slow === true;
    const name = text(rail.name) ?? "(unnamed)";
    put(lines[0], `${isSlow ? "▲ " : ""}${name}`);
    dress(lines[0], isSlow ? "line is-warned" : "line");
    hint(cells[0], isSlow ? `${name} takes three times as long for a KiB as the best one of equal preference.` : name);
    put(lines[1], bytes(amount(rail.bytes)));
    const failures = amount(rail.failures);
    put(lines[8], count(failures));
    const retries = amount(rail.retries);
    hint(cells[8], retries === null ? "" : `${count(retries)} slices were posted again.`);
    const pace = amount(rail.nanoseconds_per_kib);
    put(lines[9], pace ? seconds(pace / 1e9) : "");
  };
  return { element, fill };
}

function stageRow() {
  const { element, cells, lines } = cellLines(STAGE_COLUMNS);
  const fill = ({ name, times }) => {
    const total = times.counts.reduce((sum, each) => sum + each, 0);
    const shown = (found) => (found === null ? NONE : `${found.isAbove ? "> " : ""}${seconds(found.value)}`);
    put(lines[0], name.replaceAll("_", " "));
    hint(cells[0], STAGES[name] ?? "");
    put(lines[1], count(total));
    put(lines[2], shown(quantile(times, 0.5)));
    put(lines[3], shown(quantile(times, 0.99)));
    put(lines[4], total && times.sum !== null ? seconds(times.sum / total) : NONE);
  };
  return { element, fill };
}

/** Stages over all workers whose buckets have the bounds of the first. */
function stageTotals(workers) {
  const totals = new Map();
  for (const stage of workers.flatMap(({ transfers }) => list(transfers.stages).slice(0, 16).map(object))) {
    const [name, times] = [text(stage.stage), readHistogram(stage)];
    if (name === null || times === null || totals.size >= 16) continue;
    const known = totals.get(name);
    if (known === undefined) totals.set(name, { ...times, counts: [...times.counts] });
    else if (known.le.join() === times.le.join()) {
      times.counts.forEach((each, index) => (known.counts[index] += each));
      known.sum = known.sum === null || times.sum === null ? null : known.sum + times.sum;
    }
  }
  return totals;
}

/** What workers hand over; without one that has a data plane of Kvasir's the section is hidden. */
function showTransfers() {
  const chosen = heard.workers.filter((item) => amount(item.transfers.bytes_sent) !== null);
  at("transfers-section").hidden = chosen.length === 0;
  if (chosen.length === 0) return;
  const rows = chosen.flatMap((item) => {
    const rails = list(item.transfers.rails).slice(0, RAILS_SHOWN).map(object);
    return [item, ...rails.map((rail, index) => ({ key: `${item.key}\nrail ${index}`, rail }))];
  });
  showTransferRows(rows);
  const slow = rows.filter((row) => row.rail?.is_slow === true).length;
  put(at("transfers-note"), slow ? `${slow} ${slow === 1 ? "transport is" : "transports are"} slow beside others of the rank` : "blocks moved between workers, since each engine started");
  const stages = [...stageTotals(chosen)].map(([name, times]) => ({ key: name, name, times }));
  at("stages-scroll").hidden = stages.length === 0;
  showStageRows(stages);
}

// ---- Decisions ----

const DECISION_COLUMNS = [
  ["Time", "w-time"],
  ["Worker", "w-name"],
  ["Held there", "w-overlap", "Leading blocks of the prompt that the worker holds already"],
  ["Prompt tokens", "w-short number"],
  ["To compute", "w-short number", "Prompt tokens that the worker does not hold"],
  ["Predicted", "w-short number", "Time to the first token, and that of the next best worker"],
  ["Decided in", "w-short number"],
  ["Reason", "w-reason wide"],
];
const decisionsBody = makeBody();
at("decisions").append(makeHead(DECISION_COLUMNS), decisionsBody);
const showDecisionRows = keyedRows(decisionsBody, decisionRow);
let paused = null;

function decisionRow(decision) {
  const { element, cells } = makeRow(DECISION_COLUMNS);
  const [time, worker, overlap, prompt, uncached, predicted, decided, reason] = cells;
  const lines = (cell, upper, lower, explained = "") => {
    const both = twoLines(cell);
    put(both.upper, upper);
    put(both.lower, lower);
    hint(cell, explained);
    return both;
  };
  const [blocks, held] = [number(decision.blocks), number(decision.overlap_blocks)];
  const runnerUp = object(decision.runner_up);
  const [nextMs, nextName] = [number(runnerUp.predicted_ms), text(runnerUp.worker)];
  const ms = (value) => (value === null ? NONE : seconds(value / 1000));
  lines(time, clock(number(decision.unix_ms)), decision.sequence === null ? "" : `#${decision.sequence}`);
  const prefill = text(decision.prefill);
  const name = text(decision.worker) ?? NONE;
  lines(worker, name, prefill === null ? "" : `prefill: ${prefill}`, prefill === null ? name : `${name}, prefill: ${prefill}`).upper.classList.add("strong");
  gauge(overlap, " is-green")(blocks ? (held ?? 0) / blocks : 0, blocks === null ? NONE : `${count(held)} of ${count(blocks)} blocks`);
  const [tokens, toCompute] = [number(decision.prompt_tokens), number(decision.uncached_tokens)];
  lines(prompt, count(tokens), "");
  lines(uncached, count(toCompute), tokens && toCompute !== null ? `${Math.round((toCompute / tokens) * 100)}${SPACE}%` : "");
  const next = nextName === null ? "" : `Next best: ${nextName}, ${count(number(runnerUp.overlap_blocks))} blocks there, ${ms(nextMs)}`;
  lines(predicted, ms(number(decision.predicted_ms)), nextMs === null ? "" : `next ${ms(nextMs)}`, next);
  const [decidedUs, candidates] = [number(decision.decided_us), number(decision.candidates)];
  lines(decided, decidedUs === null ? NONE : seconds(decidedUs / 1e6), candidates === null ? "" : `of ${count(candidates)}`, candidates === null ? "" : `${count(candidates)} workers could have taken it.`);
  const words = text(decision.reason) ?? NONE;
  reason.append(make("span", "reason", words));
  hint(reason, words);
  return { element, fill: () => {} };
}

function takeDecisions(answer) {
  const last = number(answer.last);
  heard.decisionsProblem = null;
  // A gateway that started again counts from the beginning.
  if (last !== null && heard.after !== null && last < heard.after) {
    heard.decisions = [];
    heard.after = null;
    heard.last = last;
    return;
  }
  const known = new Set(heard.decisions.map((decision) => decision.sequence));
  const fresh = list(answer.decisions).map((entry) => ({ ...object(entry), sequence: number(object(entry).sequence) }));
  const added = fresh.filter((decision) => decision.sequence !== null && !known.has(decision.sequence));
  heard.decisions = [...heard.decisions, ...added].sort((one, other) => other.sequence - one.sequence).slice(0, DECISIONS_MAX);
  const newest = heard.decisions[0]?.sequence ?? null;
  heard.last = last ?? newest;
  heard.after = last ?? newest;
}

function showDecisions() {
  const shown = paused ?? heard.decisions;
  showDecisionRows(shown.map((decision) => ({ ...decision, key: `${decision.sequence} ${decision.unix_ms}` })));
  if (shown.length === 0) sayNothing(decisionsBody, DECISION_COLUMNS.length, heard.decisionsProblem ?? "No request was routed yet.");
  const newest = paused?.[0]?.sequence ?? 0;
  const behind = paused === null ? 0 : Math.max(0, (heard.last ?? 0) - newest);
  const state = paused === null ? "newest first" : `paused; ${count(behind)} since`;
  put(at("decisions-note"), !shown.length ? "" : heard.decisionsProblem ?? `the last ${shown.length}, ${state}`);
}

at("pause").addEventListener("click", () => {
  paused = paused === null ? [...heard.decisions] : null;
  at("pause").setAttribute("aria-pressed", String(paused !== null));
  put(at("pause"), paused === null ? "Pause" : "Paused");
  showDecisions();
});

// ---- Asking ----

class Problem extends Error {
  constructor(kind, status = null) {
    super(kind);
    this.kind = kind;
    this.status = status;
  }
}

const link = { key: readKey(), problem: null, answeredAt: null, answeredClock: null, failures: 0, timer: null, isAsking: false, isHurried: false };

function readKey() {
  try {
    return sessionStorage.getItem(KEY_NAME);
  } catch {
    return null;
  }
}

function keepKey(key) {
  link.key = key;
  showKey();
  try {
    if (key === null) sessionStorage.removeItem(KEY_NAME);
    else sessionStorage.setItem(KEY_NAME, key);
  } catch {
    // Without a store the key lasts as long as the page.
  }
}

async function ask(path) {
  const headers = link.key === null ? {} : { Authorization: `Bearer ${link.key}` };
  let answer;
  try {
    answer = await fetch(path, { headers, cache: "no-store", credentials: "same-origin", signal: AbortSignal.timeout(ANSWER_MS_MAX) });
  } catch {
    throw new Problem("network");
  }
  if (answer.status === 401 || answer.status === 403) throw new Problem("locked", answer.status);
  if (!answer.ok) throw new Problem("http", answer.status);
  try {
    const body = await answer.json();
    if (typeof body === "object" && body !== null) return body;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw new Problem("network");
  }
  throw new Problem("garbled");
}

async function askDecisions() {
  try {
    takeDecisions(await ask(heard.after === null ? "decisions" : `decisions?after=${heard.after}`));
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    heard.decisionsProblem = problem.status === 404 ? "This gateway does not tell its decisions." : "The decisions could not be read.";
  }
}

async function poll() {
  link.isAsking = true;
  link.isHurried = false;
  const begun = performance.now();
  try {
    const status = await ask("status");
    if (heard.status === null) await askHistory();
    takeStatus(status);
    link.problem = null;
    link.failures = 0;
    link.answeredAt = performance.now();
    link.answeredClock = Date.now();
    showState();
    await askDecisions();
    if (!document.hidden) showAll();
  } catch (problem) {
    if (!(problem instanceof Problem)) console.error(problem);
    link.problem = problem instanceof Problem ? problem : new Problem("garbled");
    link.failures += 1;
    showState();
  }
  link.isAsking = false;
  const waitMs = link.problem === null ? POLL_MS : link.problem.kind === "locked" ? LOCKED_RETRY_MS : Math.min(RETRY_MS_MAX, POLL_MS * link.failures);
  link.timer = setTimeout(poll, link.isHurried ? 0 : Math.max(100, waitMs - (performance.now() - begun)));
}

function pollNow() {
  link.isHurried = true;
  if (link.isAsking) return;
  clearTimeout(link.timer);
  poll();
}

function showAll() {
  showAbout();
  showTiles();
  CHARTS.forEach(showChart);
  showLatency();
  showWorkers();
  showScaling();
  showTransfers();
  showDecisions();
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && heard.status) showAll();
});

// ---- The state of the link ----

const SIGNS = { live: ["●", "Live"], connecting: ["○", "Connecting"], stale: ["▲", "Stale"], unreachable: ["✕", "Unreachable"], error: ["✕", "Error"], locked: ["■", "Key needed"] };

function stateNow() {
  const { problem, answeredAt } = link;
  if (problem?.kind === "locked") return "locked";
  const isFresh = answeredAt !== null && performance.now() - answeredAt < STALE_AFTER_MS;
  // One answer that is lost is no news.
  if (isFresh && link.failures <= 1) return "live";
  if (problem === null) return answeredAt === null ? "connecting" : "stale";
  return problem.kind === "network" ? "unreachable" : "error";
}

function explain(state) {
  const from = link.answeredClock === null ? "" : ` What is shown is from ${clock(link.answeredClock)}.`;
  if (state === "locked") return `An administrator’s key is needed.${from}`;
  if (state === "unreachable") return `The gateway does not answer; trying again.${from}`;
  if (state === "stale") return `The gateway is slow to answer.${from}`;
  const what = link.problem?.kind === "http" ? `The gateway answers with status ${link.problem.status}` : "The gateway’s answer is not understood";
  return `${what}; trying again.${from}`;
}

function showState() {
  const state = stateNow();
  const element = at("state");
  const isNew = element.dataset.state !== state;
  element.dataset.state = state;
  put(at("state-sign"), SIGNS[state][0]);
  put(at("state-text"), SIGNS[state][1]);
  const age = link.answeredAt === null ? null : (performance.now() - link.answeredAt) / 1000;
  put(at("state-age"), age === null ? "" : state === "live" ? "every second" : `${duration(Math.max(1, age))} ago`);
  at("main").classList.toggle("is-old", state !== "live" && link.answeredAt !== null);
  if (isNew && state === "locked") openGate();
  const isWell = state === "live" || state === "connecting";
  at("notice").hidden = isWell || (state === "locked" && at("gate").open);
  if (!isWell) {
    put(at("notice-text"), explain(state));
    put(at("notice-act"), state === "locked" ? "Enter the key" : "Try now");
    at("notice").classList.toggle("is-mild", state === "locked" || state === "stale");
  }
  const model = text(heard.status?.model);
  const title = `${isWell ? "" : `(${SIGNS[state][1].toLowerCase()}) `}Kvasir${model === null ? "" : ` · ${model}`}`;
  if (document.title !== title) document.title = title;
  if (state === "locked") {
    put(at("gate-problem"), link.key === null ? "" : link.problem.status === 403 ? "This key is valid, but not an administrator’s." : "The gateway does not know this key.");
  } else if (at("gate").open) {
    at("gate").close();
  }
}

function openGate() {
  at("key").value = "";
  if (!at("gate").open) at("gate").showModal();
  at("key").focus();
}

at("notice-act").addEventListener("click", () => (stateNow() === "locked" ? openGate() : pollNow()));
at("gate-close").addEventListener("click", () => at("gate").close());
at("gate").addEventListener("close", showState);
at("gate-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = at("key").value.trim();
  // A header takes no other letters.
  if (!/^[\x21-\x7e]+$/.test(key)) {
    put(at("gate-problem"), "A key has no spaces and only plain letters, digits and signs.");
    return;
  }
  put(at("gate-problem"), "");
  keepKey(key);
  pollNow();
});
at("forget").addEventListener("click", () => {
  keepKey(null);
  pollNow();
});

/** Links carry no key: where one is needed they lead nowhere. */
function showKey() {
  at("forget").hidden = link.key === null;
  at("numbers").hidden = link.key !== null;
}

showKey();
setInterval(showState, 1000);
poll();
