// Bundles the page's program and styles into the wheel's assets.
//
// The first line of the program names the hash of the sources, by which the tests find a stale one.
import { createHash } from "node:crypto";
import { existsSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
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
  metafile: true,
});

// The licenses of all packages of which something is in the bundle.
const packages = new Set(
  Object.keys(built.metafile.inputs).flatMap((path) => {
    const found = path.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//);
    return found ? [found[1]] : [];
  }),
);
const licenses = [...packages].sort().map((name) => {
  const folder = join("node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const texts = ["LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"].map((file) => join(folder, file));
  const text = texts.filter(existsSync).map((path) => readFileSync(path, "utf8").trim());
  return `${name} ${version} (${license})\n\n${text.join("\n\n")}\n`;
});
const text = built.outputFiles[0].text.replaceAll("</script", "<\\/script");
writeFileSync(join(assets, "report.js"), `// sources ${hash.digest("hex")}\n${text}`);
writeFileSync(join(assets, "LICENSES.txt"), licenses.join(`\n${"-".repeat(80)}\n\n`));
writeFileSync(join(assets, "report.css"), readFileSync("src/report.css", "utf8"));
