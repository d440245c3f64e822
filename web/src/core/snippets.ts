/** A request as a command or a program that sends it: what the page can do, a client can. */

import type { JsonObject } from "./trace";

export interface ApiRequest {
  base: string; // what the model's paths begin with
  path: string;
  body: JsonObject;
}

export function asCurl(request: ApiRequest, origin: string, hasKey: boolean): string {
  const body = JSON.stringify(request.body).replaceAll("'", "'\\''");
  const stream = request.body.stream === true ? "-N " : "";
  const key = hasKey ? ` \\\n  -H "authorization: Bearer $DGEMMA_API_KEY"` : "";
  return `curl ${stream}${origin}${request.base}${request.path} -H 'content-type: application/json'${key} \\\n  -d '${body}'`;
}

export function asPython(request: ApiRequest, origin: string, hasKey: boolean): string {
  const body = { ...request.body };
  const isStream = body.stream === true;
  const lines = [
    ...(hasKey ? ["import os", ""] : []),
    "import httpx2",
    "",
    `url = ${literal(origin + request.base + request.path)}`,
    `body = ${literal(body)}`,
    ...(hasKey ? [`headers = {"authorization": f"Bearer {os.environ['DGEMMA_API_KEY']}"}`] : []),
  ];
  const sent = `json=body${hasKey ? ", headers=headers" : ""}, timeout=600`;
  if (isStream) {
    lines.push(`with httpx2.stream("POST", url, ${sent}) as response:`, "    for line in response.iter_lines():", '        if line.startswith("data: "):', "            print(line[6:])");
  } else lines.push(`print(httpx2.post(url, ${sent}).raise_for_status().json())`);
  return `${lines.join("\n")}\n`;
}

/** A JSON value as Python writes it. */
export function literal(value: unknown): string {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  // JSON's strings are Python's, once what cannot be seen is escaped.
  if (typeof value === "string") return JSON.stringify(value).replace(/[\u007f-\u{10ffff}]/gu, escaped);
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${literal(name)}: ${literal(item)}`).join(", ")}}`;
  }
  return String(value);
}

function escaped(char: string): string {
  if (/[\p{L}\p{N}\p{P}\p{S}]/u.test(char)) return char;
  return `\\U${char.codePointAt(0)!.toString(16).padStart(8, "0")}`;
}
