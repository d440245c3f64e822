/** Server-sent events out of a response's body: the data of each event. Comments are skipped. */

export async function* events(body: ReadableStream<Uint8Array<ArrayBuffer>>): AsyncGenerator<string> {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      rest += value;
      let end = rest.indexOf("\n\n");
      while (end >= 0) {
        const data = rest
          .slice(0, end)
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        rest = rest.slice(end + 2);
        if (data !== "") yield data;
        end = rest.indexOf("\n\n");
      }
    }
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}
