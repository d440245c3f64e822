/** The prompt and schema of `dgemma extract`: what `dgemma/forms` does for a message. */

import type { Json, JsonObject } from "./trace";

const WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
const DAY_NAMES = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const DAYS_AHEAD = 7;
const MAX_GROUNDED = 12_000; // characters of the message times verbatim strings

/** today: as 2026-11-18. type null: the model names it. */
export function makePrompt(type: string | null, message: string, today: string): string {
  const first = day(today, 0);
  const calendar = Array.from({ length: DAYS_AHEAD }, (_, at) => {
    const next = day(today, at + 1);
    return `${at + 1}${WEEKDAYS[next.getUTCDay()]}${next.toISOString().slice(5, 10)}`;
  });
  return `${type ?? "record"} ${today} ${WEEKDAYS[first.getUTCDay()]}\n${calendar.join(" ")}\n\n${message.trim()}`;
}

/** The prompt for a model that was not trained on this schema. */
export function explain(schema: JsonObject, message: string, today: string): string {
  return (
    "Write what the message says as one JSON object of the schema, without spaces between its parts. " +
    `Write null for what it does not say. Today is ${DAY_NAMES[day(today, 0).getUTCDay()]}, ${today}.\n\n` +
    `Schema: ${JSON.stringify(schema)}\n\nMessage: ${message.trim()}`
  );
}

/** The schema with its verbatim strings bound to the words of the message; as it is, if that would be too much. */
export function grounded(schema: JsonObject, message: string): JsonObject {
  let count = 0;
  const bound = (part: Json): Json => {
    if (Array.isArray(part)) return part.map(bound);
    if (typeof part !== "object" || part === null) return part;
    const found: JsonObject = {};
    for (const [name, value] of Object.entries(part)) if (name !== "x-verbatim") found[name] = bound(value);
    if (part["x-verbatim"] === true) {
      count += 1;
      found["x-spanOf"] = message;
    }
    return found;
  };
  const made = bound(schema) as JsonObject;
  return count * message.length <= MAX_GROUNDED ? made : schema;
}

/** A record of any type, which its first field names. */
export function anySchema(types: { [name: string]: JsonObject }): JsonObject {
  return {
    anyOf: Object.entries(types).map(([type, schema]) => {
      const properties = { type: { const: type }, ...(schema.properties as JsonObject) };
      return { type: "object", properties, required: Object.keys(properties), additionalProperties: false };
    }),
  };
}

function day(today: string, ahead: number): Date {
  const found = new Date(`${today}T00:00:00Z`);
  found.setUTCDate(found.getUTCDate() + ahead);
  return found;
}

/** The local date, as 2026-11-18. */
export function localDate(now: Date = new Date()): string {
  const two = (number: number): string => String(number).padStart(2, "0");
  return `${now.getFullYear()}-${two(now.getMonth() + 1)}-${two(now.getDate())}`;
}
