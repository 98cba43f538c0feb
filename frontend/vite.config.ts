import { defineConfig } from "vitest/config";

// The page is shipped in the Python package, so that nobody who installs it needs Node.
export default defineConfig({
  base: "/",
  build: {
    outDir: "../src/penstock/ui/page",
    emptyOutDir: true,
    target: "es2022",
    cssTarget: "chrome123",
    modulePreload: false,
    // Whoever passes the packages on passes their licences on.
    license: { fileName: "licenses.md" },
    // Strict Content-Security-Policy: no data: URLs.
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: "assets/page-[hash].js",
        chunkFileNames: "assets/page-[hash].js",
        assetFileNames: "assets/page-[hash][extname]",
      },
    },
  },
  server: { host: "127.0.0.1", proxy: { "/api": "http://127.0.0.1:8080" } },
  test: { environment: "node", include: ["src/**/*.test.ts"] },
});
