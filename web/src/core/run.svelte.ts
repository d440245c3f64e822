/** One request and what came of it: the trace as it happens, the committed text, the whole response. */

import { announce, headers, type Model } from "./session.svelte";
import type { ApiRequest } from "./snippets";
import { events } from "./sse";
import { Trace, TraceError, type JsonObject } from "./trace";

export type Status = "idle" | "running" | "done" | "stopped" | "failed";

export class Run {
  trace = new Trace();
  /** Changes with the trace, which itself is no state: a step of 256 tokens would be 256 proxies. */
  version = $state(0);
  status = $state<Status>("idle");
  error = $state("");
  text = $state(""); // committed
  seconds = $state(0);
  request = $state.raw<ApiRequest | null>(null);
  response = $state.raw<JsonObject | null>(null);
  #abort: AbortController | null = null;

  static of(trace: Trace): Run {
    const run = new Run();
    run.trace = trace;
    run.status = "done";
    run.text = trace.requests.at(-1)?.answer?.text ?? "";
    run.seconds = Math.max(0, ...trace.requests.map((request) => request.answer?.seconds ?? 0));
    return run;
  }

  get isRunning(): boolean {
    return this.status === "running";
  }

  /** Send it -> whether it was answered to its end. */
  async start(request: ApiRequest): Promise<boolean> {
    this.stop();
    const abort = new AbortController();
    this.#abort = abort;
    Object.assign(this, { trace: new Trace(), status: "running", error: "", text: "", seconds: 0, request, response: null });
    this.version += 1;
    let began = performance.now();
    try {
      const response = await fetch(request.base + request.path, {
        method: "POST",
        headers: { "content-type": "application/json", ...headers() },
        body: JSON.stringify(request.body),
        signal: abort.signal,
      });
      if (!response.ok) throw new Error(await reasonOf(response));
      if (response.body !== null && (response.headers.get("content-type") ?? "").startsWith("text/event-stream")) {
        began = performance.now(); // accepted: a model that was still being loaded does not count
        for await (const data of events(response.body)) {
          if (data === "[DONE]") continue;
          this.#take(JSON.parse(data) as JsonObject, performance.now() - began);
        }
      } else {
        const { trace, ...rest } = (await response.json()) as JsonObject;
        if (Array.isArray(trace)) for (const line of trace) this.trace.add(line);
        this.response = rest;
        this.version += 1;
      }
      this.status = "done";
    } catch (error) {
      if (abort.signal.aborted) this.status = "stopped";
      else {
        this.status = "failed";
        this.error = error instanceof Error ? error.message : String(error);
      }
    }
    this.seconds = (performance.now() - began) / 1000;
    return this.status === "done";
  }

  stop(): void {
    this.#abort?.abort();
  }

  #take(chunk: JsonObject, cameMs: number): void {
    if (chunk.error !== undefined) throw new Error(messageOf(chunk) ?? "the server failed.");
    if (chunk.object === "dgemma.trace") {
      try {
        this.trace.add(chunk.trace, cameMs);
      } catch (error) {
        if (!(error instanceof TraceError)) throw error;
        throw new Error(`the trace cannot be read: ${error.message}`);
      }
      this.version += 1;
      return;
    }
    const [choice] = (chunk.choices as JsonObject[] | undefined) ?? [];
    const delta = (choice?.delta as JsonObject | undefined)?.content ?? choice?.text;
    if (typeof delta === "string" && delta !== "") {
      this.text += delta;
      announce(delta);
    }
    if (choice?.dgemma !== undefined || (chunk.usage !== undefined && chunk.usage !== null)) {
      this.response = { ...this.response, ...(choice?.dgemma !== undefined ? { dgemma: choice.dgemma } : {}), ...(chunk.usage ? { usage: chunk.usage } : {}) };
    }
  }
}

/** The fields of every request of this model. */
export function traced(model: Model, body: JsonObject): JsonObject {
  return { model: model.name, ...body, ...(model.traces ? { trace: true } : {}) };
}

async function reasonOf(response: Response): Promise<string> {
  try {
    return messageOf((await response.json()) as JsonObject) ?? `the server says ${response.status}.`;
  } catch {
    return `the server says ${response.status}.`;
  }
}

function messageOf(body: JsonObject): string | null {
  const error = body.error;
  return typeof error === "object" && error !== null && !Array.isArray(error) && typeof error.message === "string" ? error.message : null;
}
