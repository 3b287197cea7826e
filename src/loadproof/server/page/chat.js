// The conversation: asking, showing answers as they come, stopping, starting anew.

import { Answer } from "./answer.js";
import { ServerError } from "./api.js";
import { AnswerView, showQuestion } from "./turns.js";
import { opening, parameters, valid } from "./settings.js";

const composer = document.getElementById("composer");
const message = document.getElementById("message");
const log = document.getElementById("log");
const welcome = document.getElementById("welcome");
const [send, stop, clear] = ["send", "stop", "clear"].map((id) => document.getElementById(id));

let turns = []; // messages of the conversation so far, those of complete exchanges
let running = null; // the AbortController of the answer or replay that streams

/** Run one thing at a time that Stop can end. */
export async function exclusively(work) {
  if (running) return;
  running = new AbortController();
  show(true);
  try {
    await work(running.signal);
  } finally {
    running = null;
    show(false);
  }
}

function show(busy) {
  const hadFocus = [send, stop].includes(document.activeElement);
  send.hidden = busy;
  stop.hidden = !busy;
  log.setAttribute("aria-busy", busy);
  for (const button of log.querySelectorAll("button.replay")) button.setAttribute("aria-disabled", busy);
  if (hadFocus) (busy ? stop : message).focus();
}

async function ask(content) {
  const question = { role: "user", content };
  const answer = new Answer({
    messages: [...opening(), ...turns, question],
    ...parameters(),
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
  });
  const conversation = turns;
  welcome.hidden = true;
  const asked = showQuestion(content);
  const view = new AnswerView(answer, exclusively);
  message.value = "";
  await exclusively(async (signal) => {
    try {
      await answer.fill(signal, () => view.update());
      if (answer.tokens.length === 0) throw new ServerError("Stopped before the answer began.");
      conversation.push(question, { role: "assistant", content: answer.text });
      view.finish();
    } catch (error) {
      asked.classList.add("failed");
      view.fail(error instanceof ServerError ? error.message : `The page has failed: ${error.message}`);
      if (message.value === "") message.value = content; // to be mended and sent again
    }
  });
}

function submit() {
  if (running || message.value.trim() === "" || !valid()) return;
  ask(message.value);
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
stop.addEventListener("click", () => running?.abort());
clear.addEventListener("click", () => {
  running?.abort();
  turns = [];
  log.replaceChildren(welcome);
  welcome.hidden = false;
  message.focus();
});
