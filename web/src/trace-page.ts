// `dgemma trace html`: a page that holds a trace, and shows it.
import { mount } from "svelte";
import { Trace } from "./core/trace";
import TracePage from "./TracePage.svelte";
import "./trace/trace.css";

const trace = new Trace();
for (const line of JSON.parse(document.getElementById("trace")?.textContent ?? "[]") as unknown[]) trace.add(line);
mount(TracePage, { target: document.body, props: { trace } });
