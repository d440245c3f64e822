import { mount } from "svelte";
import App from "./App.svelte";
import "./trace/trace.css";
import "./app.css";

const target = document.getElementById("app");
if (target !== null) mount(App, { target });
