// Bundles the page's program and styles into the wheel's assets.
//
// The first line of the program names the hash of the sources, by which the tests find a stale one.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";

const assets = "../src/parloom/report/page/assets";

function files(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    const path = join(folder, entry.name);
    return entry.isDirectory() ? files(path) : [path];
  });
}

const hash = createHash("sha256");
for (const path of ["package.json", "package-lock.json", "build.mjs", ...files("src").sort()]) {
  hash.update(readFileSync(path));
}

const built = await build({
  entryPoints: ["src/main.ts"],
  bundle: true,
  minify: true,
  write: false,
  format: "iife",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
});
const text = built.outputFiles[0].text.replaceAll("</script", "<\\/script");
writeFileSync(join(assets, "report.js"), `// sources ${hash.digest("hex")}\n${text}`);
writeFileSync(join(assets, "report.css"), readFileSync("src/report.css", "utf8"));
