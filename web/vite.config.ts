import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// One script and one style file: the page is small, and a second round trip would cost more than it saves.
export default defineConfig({
  plugins: [svelte()],
  build: {
    outDir: "../src/dgemma/data/web/playground",
    emptyOutDir: true,
    assetsDir: "playground",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
    cssCodeSplit: false,
    reportCompressedSize: true,
  },
});
