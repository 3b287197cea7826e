// Replaying an answer: the same request with the reported seed, compared token by token.

/** Where two lists differ first; the length of the shorter where one begins with the other. */
function firstDifference(one, other) {
  const length = Math.min(one.length, other.length);
  for (let at = 0; at < length; at++) if (one[at] !== other[at]) return at;
  return length;
}

/**
 * Ask for `first` again, telling `shown` of the second answer as it grows.
 *
 * An answer that its reader stopped is replayed as far as it had come. The result holds the second answer,
 * whether it is the same, and that in words.
 */
export async function replay(first, signal, shown) {
  const second = first.again();
  const cut = first.ending === "stopped";
  await second.fill(signal, shown, (answer) => cut && answer.tokens.length >= first.tokens.length);
  if (signal.aborted) return { second, same: null, words: "The replay was stopped." };
  return { second, ...verdict(first, second, cut) };
}

function verdict(first, second, cut) {
  const [one, other] = [first.tokens, cut ? second.tokens.slice(0, first.tokens.length) : second.tokens];
  const at = firstDifference(one, other);
  if (at < one.length || at < other.length) {
    return { same: false, words: `Different from token ${at + 1} on${changed(first, second)}.` };
  }
  if (!cut && (first.text !== second.text || first.ending !== second.ending)) {
    return { same: false, words: "The same tokens, and yet another text or ending." };
  }
  const extent = cut ? "as far as it had come" : "to the last token";
  return { same: true, words: `The same ${extent}: ${one.length} of ${one.length} tokens.` };
}

function changed(first, second) {
  return first.fingerprint === second.fingerprint ? "" : `: the fingerprint is now ${second.fingerprint}`;
}
