// What shows the turns of the conversation: questions, answers with their facts, replays.

import { ServerError } from "./api.js";
import { replay } from "./replay.js";

const log = document.getElementById("log");

function append(name) {
  const turn = document.getElementById(name).content.cloneNode(true).firstElementChild;
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return turn;
}

/** Keep the end in sight for those who were looking at it. */
function following(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function span(className, text) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = text;
  return element;
}

/** Add a question to the conversation. */
export function showQuestion(content) {
  const turn = append("question");
  turn.querySelector(".text").textContent = content;
  return turn;
}

/** Shows one answer, and replays it. */
export class AnswerView {
  constructor(answer, exclusively) {
    this.answer = answer;
    this.turn = append("answer");
    this.text = this.turn.querySelector(".text");
    this.verdict = this.turn.querySelector(".verdict");
    this.turn.querySelector(".replay").addEventListener("click", () => exclusively((signal) => this.replay(signal)));
    this.turn.classList.add("streaming");
  }

  update() {
    following(() => { this.text.textContent = this.answer.text; });
  }

  finish() {
    following(() => {
      this.turn.classList.remove("streaming");
      this.turn.querySelector("footer").hidden = false;
      this.turn.querySelector(".facts").replaceChildren(...facts(this.answer));
      if (this.answer.text === "") this.text.replaceChildren(span("quiet", "(no text)"));
    });
  }

  fail(words) {
    following(() => {
      this.turn.classList.remove("streaming");
      const error = this.turn.querySelector(".error");
      error.textContent = words;
      error.hidden = false;
    });
  }

  /** Write the answer again over itself, and say whether it is the same. */
  async replay(signal) {
    this.turn.querySelector(".other")?.remove();
    this.judge(null, "Replaying …");
    try {
      const { second, same, words } = await replay(this.answer, signal, (answer) => this.overwrite(answer.text));
      this.judge(same, words);
      if (same === false) this.showOther(second.text);
    } catch (error) {
      this.judge(false, error instanceof ServerError ? error.message : `The page has failed: ${error.message}`);
    } finally {
      this.text.textContent = this.answer.text;
    }
  }

  overwrite(text) {
    this.text.replaceChildren(span("again", text), span("old", this.answer.text.slice(text.length)));
  }

  judge(same, words) {
    this.verdict.className = same === null ? "verdict" : `verdict ${same ? "same" : "different"}`;
    this.verdict.textContent = words;
  }

  showOther(text) {
    const other = document.createElement("p");
    other.className = "text other";
    other.textContent = text;
    this.verdict.after(other);
  }
}

function facts(answer) {
  const cached = answer.usage ? `, ${answer.usage.prompt_tokens_details.cached_tokens} of them cached` : "";
  return [
    ["Seed", String(answer.seed)],
    ["Fingerprint", answer.fingerprint],
    ["Prompt", `${answer.promptLength} tokens${cached}`],
    ["Answer", `${answer.tokens.length} tokens`],
    ["Ended", answer.endingInWords],
  ].map(([term, value]) => {
    const pair = document.createElement("div");
    const [name, content] = ["dt", "dd"].map((tag) => document.createElement(tag));
    name.textContent = term;
    content.textContent = value;
    pair.append(name, content);
    return pair;
  });
}
