/** The options of a request that a visitor may set; what is left empty is the model's own. */

import type { JsonObject } from "./trace";

export class Options {
  seed = $state<number | null>(1);
  maxTokens = $state<number | null>(null);
  temperature = $state<number | null>(null);
  preset = $state("");
  decode = $state("");
  steps = $state<number | null>(null);
  acceptance = $state("");
  entropyBound = $state<number | null>(null);
  minConfidence = $state<number | null>(null);
  acceptPerStep = $state<number | null>(null);
  alternatives = $state(false);

  constructor(given: Partial<Options> = {}) {
    Object.assign(this, given);
  }

  /** sampling: those of the sampler, which all endpoints but decisions take. */
  get sampling(): JsonObject {
    return filled({
      seed: this.seed,
      temperature: this.temperature,
      preset: this.preset,
      max_denoising_steps: this.steps,
      acceptance: this.acceptance,
      entropy_bound: this.acceptance === "" || this.acceptance === "entropy_bound" ? this.entropyBound : null,
      min_confidence: this.acceptance === "confidence" ? this.minConfidence : null,
      accept_per_step: this.acceptance === "fixed" ? this.acceptPerStep : null,
    });
  }

  get writing(): JsonObject {
    return { ...this.sampling, ...filled({ max_tokens: this.maxTokens, decode: this.decode }) };
  }
}

function filled(values: { [name: string]: string | number | null | undefined }): JsonObject {
  const found: JsonObject = {};
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "" && !Number.isNaN(value)) found[name] = value;
  }
  return found;
}
