// One answer of the model: what was asked for it, what came, and what shows it.

import { streamChat } from "./api.js";

/** An answer as data, filled in while it streams. */
export class Answer {
  constructor(body) {
    this.body = body;
    this.text = "";
    this.tokens = [];
    this.seed = null;
    this.fingerprint = "";
    this.promptLength = null;
    this.usage = null; // comes last
    this.ending = null; // the server's finish reason, or "stopped"
    this.stopReason = null;
  }

  /** Ask, and take in the pieces, telling `changed` of each; `enough` may end it early. */
  async fill(signal, changed, enough = () => false) {
    try {
      for await (const piece of streamChat(this.body, signal)) {
        this.#take(piece);
        changed(this);
        if (enough(this)) return;
      }
    } catch (error) {
      if (!signal.aborted) throw error;
      this.ending ??= "stopped";
    }
  }

  #take(piece) {
    this.fingerprint = piece.system_fingerprint;
    this.promptLength = piece.prompt_token_ids?.length ?? this.promptLength;
    this.usage = piece.usage ?? this.usage;
    for (const choice of piece.choices) {
      this.seed = choice.seed ?? this.seed;
      this.text += choice.delta.content ?? "";
      this.tokens.push(...(choice.token_ids ?? []));
      this.ending = choice.finish_reason ?? this.ending;
      this.stopReason = choice.stop_reason ?? this.stopReason;
    }
  }

  /** The same request again, with the seed that this one was answered with. */
  again() {
    return new Answer({ ...this.body, seed: this.seed });
  }

  /** How it ended, in words. */
  get endingInWords() {
    if (this.ending === "stopped") return "you stopped it";
    if (this.ending === "length") return "at its limit of tokens";
    return this.stopReason === null ? "by itself" : `at the stop ${JSON.stringify(this.stopReason)}`;
  }
}
