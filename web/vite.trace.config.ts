import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The trace component alone, as one script and one style, for `dgemma trace html`.
export default defineConfig({
  plugins: [svelte()],
  publicDir: false,
  build: {
    outDir: "../src/dgemma/data/web/trace-page",
    emptyOutDir: true,
    target: "es2022",
    lib: {
      entry: "src/trace-page.ts",
      formats: ["iife"],
      name: "dgemmaTrace",
      fileName: () => "trace.js",
      cssFileName: "trace",
    },
  },
});
