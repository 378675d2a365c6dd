import { readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

const SHIPPED = ["preact", "@preact/signals", "@preact/signals-core", "uplot"];

function licences(): Plugin {
  const text = SHIPPED.map((name) => `${name}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`);
  return {
    name: "licences",
    generateBundle() {
      this.emitFile({ type: "asset", fileName: "LICENSES.txt", source: text.join(`\n${"-".repeat(80)}\n\n`) });
    },
  };
}

// The content security policy allows neither inline scripts nor data: addresses, so nothing is inlined.
export default defineConfig({
  base: "./",
  plugins: [licences()],
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: { outDir: "../operator/rankscope/operator/console/static", emptyOutDir: true, assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  server: { proxy: { "/api": "http://127.0.0.1:9468" } },
});
