"use strict";
// The live page: polls /v1/state once a second and draws what it says. No libraries.

const byId = (id) => document.getElementById(id);
const SPAN = 300; // seconds shown
const SVG = "http://www.w3.org/2000/svg";
let rows = [];
let uptime = null;

function headers(admin) {
  const out = {};
  if (byId("stream").value) out["X-Stream-Id"] = byId("stream").value;
  if (byId("key").value) out["X-API-Key"] = byId("key").value;
  if (admin) out.Authorization = `Bearer ${byId("token").value}`;
  return out;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

function element(parent, name, attributes = {}, text = null) {
  const svg = parent.namespaceURI === SVG || name === "svg";
  const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

// --- charts -------------------------------------------------------------------------------------

const CHARTS = [
  ["c-requests", [["answered", (r) => r.requests], ["refused", (r) => r.refused]]],
  ["c-latency", [["p50", (r) => r.p50], ["p95", (r) => r.p95], ["p99", (r) => r.p99]]],
  ["c-queue", [["waiting", (r) => r.queue]]],
  ["c-batches", [["all", (r) => r.batches], ["learnt from", (r) => r.learnt]]],
  ["c-entropy", [["entropy", (r) => r.entropy]]],
  ["c-concentration", [["share", (r) => (r.concentration === null ? null : 100 * r.concentration)]]],
];
const WIDE = 340, HIGH = 120, LEFT = 38, BOTTOM = 19, TOP = 6;

function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= value * 0.999);
}

function chart(id, series) {
  const svg = byId(id);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
  svg.setAttribute("role", "img");
  const end = uptime ?? 0, begin = end - SPAN;
  const shown = rows.filter((r) => r.t >= begin);
  const values = shown.flatMap((r) => series.map(([, f]) => f(r))).filter((v) => v !== null);
  const top = ceiling(Math.max(0, ...values));
  const x = (t) => LEFT + ((t - begin) / SPAN) * (WIDE - LEFT - 4);
  const y = (v) => HIGH - BOTTOM - (v / top) * (HIGH - BOTTOM - TOP);
  for (const share of [0, 0.5, 1]) {
    element(svg, "line", { class: "grid", x1: LEFT, x2: WIDE - 4, y1: y(top * share), y2: y(top * share) });
    element(svg, "text", { x: LEFT - 4, y: y(top * share) + 4, "text-anchor": "end" }, number(top * share));
  }
  element(svg, "text", { x: LEFT, y: HIGH - 5 }, "5 min ago");
  element(svg, "text", { x: WIDE - 4, y: HIGH - 5, "text-anchor": "end" }, "now");
  series.forEach(([, f], which) => {
    let path = "", last = null;
    for (const row of shown) {
      const value = f(row);
      // A second without a value breaks the line: nothing was measured there.
      if (value !== null) path += `${last === null ? "M" : "L"}${x(row.t).toFixed(1)} ${y(value).toFixed(1)}`;
      last = value;
    }
    element(svg, "path", { class: `s${which}`, d: path });
  });
  const caption = svg.parentElement.querySelector("figcaption");
  let legend = caption.querySelector(".legend");
  if (!legend) legend = element(caption, "span", { class: "legend" });
  legend.replaceChildren();
  const latest = shown[shown.length - 1];
  const said = [];
  series.forEach(([name, f], which) => {
    if (series.length > 1) {
      element(legend, "i", { class: `s${which}` });
      legend.append(`${name} `);
    }
    const value = latest ? number(f(latest)) : "–";
    legend.append(value);
    said.push(`${name} ${value}`);
  });
  svg.setAttribute("aria-label", `${caption.firstChild.textContent}, now: ${said.join(", ")}`);
}

function heatMap(load) {
  const layers = Object.entries(load);
  byId("experts-none").hidden = layers.length > 0;
  const svg = byId("experts"), scale = byId("experts-scale");
  svg.replaceChildren();
  scale.hidden = layers.length === 0;
  if (!layers.length) { svg.setAttribute("width", 0); svg.setAttribute("height", 0); return; }
  const experts = Math.max(...layers.map(([, shares]) => shares.length));
  const most = Math.max(...layers.flatMap(([, shares]) => shares));
  scale.textContent = "The stronger a cell, the more of the latest images its layer sent to that expert: " +
    `from none to ${(100 * most).toFixed(0)} %.`;
  const names = 8 + 6.4 * Math.max(...layers.map(([name]) => name.length)), tall = 18;
  const room = svg.parentElement.clientWidth - names - 4; // on a phone, narrower cells show all experts
  const cell = Math.max(14, Math.min(26, Math.floor(room / experts)));
  svg.setAttribute("width", names + experts * cell + 4);
  svg.setAttribute("height", layers.length * tall + 20);
  layers.forEach(([name, shares], row) => {
    element(svg, "text", { x: names - 6, y: row * tall + 13, "text-anchor": "end" }, name);
    shares.forEach((share, column) => {
      const at = { x: names + column * cell, y: row * tall, width: cell, height: tall };
      element(svg, "rect", { ...at, class: "empty" });
      const filled = element(svg, "rect", { ...at, "fill-opacity": Math.sqrt(share / most).toFixed(3) });
      element(filled, "title", {}, `${name}, expert ${column}: ${(100 * share).toFixed(1)} % of images`);
    });
  });
  for (let column = 0; column < experts; column++) {
    element(svg, "text", { x: names + (column + 0.5) * cell, y: layers.length * tall + 14, "text-anchor": "middle" }, column);
  }
}

// --- the state ----------------------------------------------------------------------------------

function show(state) {
  if (uptime !== null && state.uptime < uptime) rows = []; // the service was restarted
  uptime = state.uptime;
  rows = rows.concat(state.rows).slice(-600);
  const stream = state.stream, last = rows[rows.length - 1];
  byId("what").textContent = `${state.model}, ${state.classes} classes` +
    (stream.method ? `, ${stream.method}${stream.guarded ? " with guard" : ""}` : "");
  const pill = byId("adapting"), reason = state.adapting.reason;
  pill.textContent = state.ready ? reason : "not ready";
  pill.className = `pill ${!state.ready ? "bad" : reason.startsWith("learning") ? "good" : "warn"}`;
  byId("rate").textContent = last ? number(last.requests) : "–";
  for (const name of ["p50", "p95", "p99"]) byId(name).textContent = last ? number(last[name]) : "–";
  byId("queue").textContent = state.queue.images;
  byId("step").textContent = number(stream.step, 6);
  for (const [id, series] of CHARTS) chart(id, series);
  heatMap(stream.expert_load ?? {});
  const events = stream.guard_events ?? [];
  byId("events-none").hidden = events.length > 0;
  byId("events-none").textContent = stream.guarded === false ? "No guard watches this stream." : "None.";
  byId("events").replaceChildren();
  for (const event of events.slice().reverse()) element(byId("events"), "li", {}, event.text);
  byId("token-label").hidden = !state.admin;
  byId("admin-off").hidden = state.admin;
  facts(state, stream);
}

function facts(state, stream) {
  const list = byId("facts");
  list.replaceChildren();
  const add = (name, value) => { element(list, "dt", {}, name); element(list, "dd", {}, value); };
  add("Stream", stream.name + (stream.in_memory ? "" : " (not in memory)"));
  add("Streams", `${state.streams.in_memory} in memory, ${state.streams.known} known, at most ${state.streams.limit}`);
  if (stream.in_memory) {
    add("Images", `${number(stream.images, 9)} answered since it came into memory, ${number(stream.images_learnt_from, 9)} learnt from in all`);
    add("Pool", `${stream.pool.images} of ${stream.pool.needed} images for the next update`);
    add("Snapshots", stream.snapshots.length ? `${stream.snapshots.join(", ")}; ${stream.unsaved_updates} update${stream.unsaved_updates === 1 ? "" : "s"} since` : "none yet");
  }
  add("Learning stops", `above ${state.queue.learning_stops_above} waiting images; at ${state.queue.limit} requests are refused`);
  add("Up for", `${Math.round(state.uptime)} s, version ${state.version}`);
}

async function poll() {
  try {
    const since = rows.length ? rows[rows.length - 1].t : 0;
    const asked = byId("stream").value;
    const answer = await fetch(`v1/state?since=${since}`, { headers: headers(false) });
    if (answer.status === 401) {
      byId("key-label").hidden = false;
      byId("what").textContent = "an API key is needed; enter it below";
    } else if (answer.ok) {
      const state = await answer.json();
      if (asked === byId("stream").value) show(state);
    } else {
      byId("what").textContent = (await answer.json()).error;
    }
  } catch {
    byId("adapting").textContent = "the service does not answer";
    byId("adapting").className = "pill bad";
  }
  setTimeout(poll, 1000);
}

// --- trying an image ----------------------------------------------------------------------------

async function tryImages(files) {
  for (const file of [...files].slice(0, 16)) {
    const card = document.createElement("div");
    card.className = "result";
    byId("results").prepend(card);
    const image = element(card, "img", { alt: "" });
    image.src = URL.createObjectURL(file);
    image.onerror = () => image.remove();
    const text = element(card, "div");
    element(text, "p", { class: "quiet" }, "…");
    const type = ["image/jpeg", "image/png", "image/webp"].includes(file.type) ? file.type : "application/octet-stream";
    let answer, said;
    try {
      answer = await fetch("v1/predict?top_k=3&explain=1", {
        method: "POST", body: file, headers: { ...headers(false), "Content-Type": type },
      });
      said = await answer.json();
    } catch {
      said = { error: "the service does not answer" };
    }
    text.replaceChildren();
    if (!answer?.ok) { element(text, "p", { class: "error" }, said.error); continue; }
    const found = said.predictions[0];
    found.labels.forEach(({ label, probability }, rank) => {
      element(text, "p", rank ? {} : { class: "best" }, `${label}: ${(100 * probability).toFixed(1)} %`);
      element(text, "progress", { value: probability, max: 1, "aria-label": label });
    });
    element(text, "p", { class: "quiet" }, `entropy ${number(found.entropy)} nats, answered at update ${said.step}`);
  }
  while (byId("results").children.length > 16) byId("results").lastChild.remove();
}

byId("file").addEventListener("change", (event) => {
  tryImages(event.target.files);
  event.target.form.reset();
});
const drop = byId("drop");
for (const name of ["dragover", "dragleave", "drop"]) {
  drop.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragover");
    if (name === "drop") tryImages(event.dataTransfer.files);
  });
}
for (const id of ["try", "access"]) byId(id).addEventListener("submit", (event) => event.preventDefault());

byId("stream").addEventListener("input", () => { rows = []; }); // entropy and concentration are the stream's

// --- admin --------------------------------------------------------------------------------------

byId("token").addEventListener("input", () => { byId("admin").hidden = !byId("token").value; });
byId("admin").addEventListener("click", async (event) => {
  const call = event.target.dataset.call;
  if (!call) return;
  if (call === "reset" && !confirm("Forget everything that this stream has learnt?")) return;
  try {
    const answer = await fetch(`v1/adapt/${call}`, { method: "POST", headers: headers(true) });
    const said = await answer.json();
    byId("said").className = answer.ok ? "" : "error";
    byId("said").textContent = answer.ok
      ? `${call}: stream ${said.stream} is at update ${said.step}` +
        (said.paused ? ", paused" : "") + (said.snapshot ? `, snapshot ${said.snapshot}` : "")
      : `${call}: ${said.error}`;
  } catch {
    byId("said").className = "error";
    byId("said").textContent = "the service does not answer";
  }
});

poll();
