// The live picture of the engine, asked for once a second while somebody can see it.

import { engineView } from "./api.js";

const PERIOD = 1000;
const PERIOD_AFTER_ERROR = 5000;
const MOST_ROWS = 5;
const TRACE = 60;

const panel = document.getElementById("engine");
const rates = [];
let before = null;
let timer = null;
let asking = false;

function set(id, text) {
  document.getElementById(id).textContent = text;
}

function number(value) {
  return value.toLocaleString("en");
}

function watched() {
  return document.visibilityState === "visible" && panel.open;
}

/** Ask if somebody watches, and again a second after the answer: a slow engine is asked less often. */
function poll() {
  clearTimeout(timer);
  if (!asking && watched()) ask();
}

async function ask() {
  asking = true;
  let pause = PERIOD;
  try {
    show(await engineView());
    health("", "Ready");
  } catch (error) {
    before = null;
    pause = PERIOD_AFTER_ERROR;
    health("bad", error.message);
  } finally {
    asking = false;
  }
  timer = setTimeout(poll, pause);
}

/** Write the status only where it changes: screen readers say it each time. */
function health(kind, words) {
  const status = document.getElementById("health");
  status.className = kind;
  if (status.textContent !== words) status.textContent = words;
}

function show(view) {
  set("model", view.model);
  showBlocks(view.blocks);
  set("running", number(view.num_running));
  set("waiting", number(view.num_waiting));
  showCounters(view.counters);
  showRate(view);
  showRequests(view);
}

function showBlocks(blocks) {
  for (const state of ["held", "cached", "blank"]) {
    set(state, number(blocks[state]));
    document.querySelector(`#bar .${state}`).style.flexGrow = blocks[state] / blocks.total;
  }
  set("blocks-title", `${number(blocks.total)} KV blocks`);
}

function showCounters(counters) {
  const { prefix_cache_hits: hits, prefix_cache_queries: queries } = counters;
  set("hits", queries ? `${Math.floor((100 * hits) / queries)} %` : "–");
  document.getElementById("hits").title = `${number(hits)} of ${number(queries)} tokens`;
  set("preemptions", number(counters.num_preemptions));
  set("finished", number(counters.num_finished));
}

function showRate(view) {
  if (before) {
    const tokens = view.counters.generation_tokens - before.counters.generation_tokens;
    rates.push(Math.max(0, tokens) / (view.time - before.time));
    if (rates.length > TRACE) rates.shift();
    set("rate", number(Math.round(rates.at(-1))));
    const peak = Math.max(...rates);
    set("peak", peak >= 1 ? `, at most ${number(Math.round(peak))}` : "");
    const points = rates.map((rate, i) => `${TRACE - rates.length + i + 0.5},${19 - (18 * rate) / (peak || 1)}`);
    document.getElementById("trace").setAttribute("points", points.join(" "));
  }
  before = view;
}

function showRequests(view) {
  const rows = view.sequences.slice(0, MOST_ROWS);
  const list = document.getElementById("requests");
  while (list.children.length > rows.length) list.lastChild.remove();
  while (list.children.length < rows.length) list.append(row());
  rows.forEach((sequence, i) => fill(list.children[i], sequence));
  const others = view.sequences.length - rows.length + view.num_left_out;
  set("others", others ? `and ${number(others)} more` : rows.length ? "" : "None");
}

function row() {
  const item = document.createElement("li");
  item.append(...["name", "doing"].map((name) => {
    const part = document.createElement("span");
    part.className = name;
    return part;
  }), document.createElement("progress"));
  return item;
}

function fill(item, sequence) {
  const [name, doing, progress] = item.children;
  const { text, value, max } = stage(sequence);
  name.textContent = `#${sequence.request_id}${sequence.index ? `.${sequence.index}` : ""}`;
  doing.textContent = text;
  progress.max = max;
  progress.value = value;
  progress.setAttribute("aria-label", `Request ${name.textContent}: ${text}`);
}

/** What a sequence is at: waiting, its prompt, or its output. */
function stage(sequence) {
  const { status, num_prompt_tokens: prompt, num_output_tokens: output, max_tokens: most } = sequence;
  const answer = { value: output, max: most };
  const again = sequence.num_preemptions ? `, preempted ${sequence.num_preemptions}×` : "";
  if (status !== "running") return { text: `waiting, ${number(output)} of ${number(most)} tokens${again}`, ...answer };
  if (output === 0) {
    const value = Math.min(sequence.num_computed_tokens, prompt);
    return { text: `prompt, ${number(value)} of ${number(prompt)} tokens${again}`, value, max: prompt };
  }
  return { text: `answer, ${number(output)} of ${number(most)} tokens${again}`, ...answer };
}

/** Begin to watch. */
export function watch() {
  document.addEventListener("visibilitychange", poll);
  panel.addEventListener("toggle", poll);
  ask(); // once in any case, for the model's name
}
