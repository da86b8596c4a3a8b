// What the page asks the server for: its models, and answers as they are generated.

let key = sessionStorage.getItem("alignedserve-key") || "";

export function useKey(value) {
  key = value;
  sessionStorage.setItem("alignedserve-key", key);
}

/** The models that write text. Throws an Error with the server's `code` and `status`. */
export async function listModels() {
  const response = await ask("v1/models", {});
  return (await response.json()).data.filter((model) => (model.supported_tasks || ["generate"]).includes("generate"));
}

/** The chunks of an answer. Throws an Error, also where the stream ends before the answer does. */
export async function* streamAnswer(body, signal) {
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw signal.aborted ? error : new Error("The connection was lost before the answer ended.");
    });
    if (done) {
      throw new Error("The connection ended before the answer did.");
    }
    const lines = (unread + value).split("\n");
    unread = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) {
        continue;  // the end of an event, or a comment while nothing comes
      }
      if (line === "data: [DONE]") {
        return;
      }
      const chunk = JSON.parse(line.slice("data: ".length));
      if (chunk.error) {
        throw new Error(chunk.error.message);
      }
      yield chunk;
    }
  }
}

async function ask(path, options) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  });
  if (!response.ok) {
    throw await failureOf(response);
  }
  return response;
}

async function failureOf(response) {
  const failure = new Error("The server answered with status " + response.status + ".");
  try {
    const { message, code } = (await response.json()).error;
    failure.message = message;
    failure.code = code;
  } catch {
    // Not an error of the API: the status says all there is.
  }
  failure.status = response.status;
  return failure;
}
