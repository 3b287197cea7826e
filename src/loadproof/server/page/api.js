// The server's answers: streams of chat pieces, and errors in words.

// The page's own address without a user's name and password, which browsers refuse to fetch with.
const HERE = new URL(location.pathname, location.origin);
const UNREACHABLE = "The server can't be reached. Is it still running?";
const SILENT = "The server doesn't answer.";
const BROKEN = "The connection broke off before the answer was complete.";

/** An error whose message is for the reader of the page. */
export class ServerError extends Error {}

/** The pieces of a chat answer as they come; ends when the server says so, throws where that never comes. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const piece = JSON.parse(data);
    if (piece.error) throw new ServerError(piece.error.message);
    yield piece;
  }
  throw new ServerError(BROKEN);
}

/** What the engine does now. */
export async function engineView() {
  const response = await request("engine", { signal: AbortSignal.timeout(30_000) });
  return response.json();
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, HERE), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(error.name === "TimeoutError" ? SILENT : UNREACHABLE);
  }
  if (!response.ok) throw new ServerError(await refusal(response));
  return response;
}

async function refusal(response) {
  if (response.status === 401) return "The server wants an API key: reload the page, and give it as password.";
  const seconds = response.headers.get("retry-after");
  const later = seconds ? ` Try again in ${seconds} s.` : "";
  try {
    return (await response.json()).error.message + later;
  } catch {
    return `The server answered ${response.status} without saying why.${later}`;
  }
}

/** The data of server-sent events, each of one line. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(BROKEN);
  } finally {
    reader.cancel().catch(() => {});
  }
}
