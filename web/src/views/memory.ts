import { Chart, colorOf, ink } from "../chart";
import type { Memory, Plan } from "../data";
import { choice, h, table, type Cell } from "../dom";
import { bytes, byteStep, percent, seconds } from "../format";

/** Memory over the step by component, and the largest tensors. */
export function memory(plan: Plan): HTMLElement[] {
  const own = plan.memory;
  let shown = own.processes.reduce((best, process, index) => (process.peak_bytes > own.processes[best]!.peak_bytes ? index : best), 0);
  const make = (width: number) => option(own, shown, width);
  const largest = h("div", {});
  const chart = new Chart("Memory over the step", 340, make, peaks(own));
  function show(index: number): void {
    shown = index;
    largest.replaceChildren(largestOf(own, index));
    chart.change(make);
  }
  largest.append(largestOf(own, shown));
  const which = choice("devices", own.processes.map((process) => `${process.name}, ${bytes(process.peak_bytes)}`), show);
  which.querySelector("select")!.value = String(shown);
  const at = nameOf(own.during.module, own.during.operator);
  const when = peakTime(own, shown);
  const words = `Most is held ${when}, while ${own.during.action || "the step begins"}${at ? ` runs ${at}` : ""}. Times of a device are drawn in ${own.processes[0]!.lines[0]!.length} equal parts of the step; each has the most of its part.`;
  const left = own.left_out ? [h("p", {}, `${own.left_out} more groups of devices hold less.`)] : [];
  return [h("p", {}, words), ...left, h("div", { class: "controls" }, which), chart.element, components(own, shown), largest, ...recomputed(own)];
}

function peakTime(own: Memory, index: number): string {
  const process = own.processes[index]!;
  const sums = process.lines[0]!.map((_, column) => process.lines.reduce((sum, line) => sum + line[column]!, 0));
  return `after ${seconds((own.step_s * sums.indexOf(Math.max(...sums))) / sums.length)}`;
}

const MEANS: Record<string, string> = {
  weights: "parameters as they are stored between steps",
  gradients: "gradients that are added up and wait for the update",
  optimizer: "its states and master weights, and what an update works on",
  activations: "results that backward passes read, and what operators work on",
  recomputation: "results that are made again for a backward pass",
  communication: "buffers of collectives: gathered weights, gradients to be reduced, tensors that move",
  buffers: "the model's buffers, and what is computed once for all microbatches",
};

/** What holds memory at the peak, in words. */
function components(own: Memory, index: number): HTMLElement {
  const process = own.processes[index]!;
  const held = own.components.filter((name) => process.at_peak[name]).sort((a, b) => process.at_peak[b]! - process.at_peak[a]!);
  const rows: Cell[][] = held.map((name) => [name, { value: bytes(process.at_peak[name]!), share: process.at_peak[name]! / process.peak_bytes }, percent(process.at_peak[name]! / process.peak_bytes), MEANS[name] ?? ""]);
  return table(`At the peak of ${process.name}, ${bytes(process.peak_bytes)}`, ["component", "bytes", "share", "holds"], rows);
}

/** What is made again in backward passes, by calls that do the same. */
function recomputed(own: Memory): HTMLElement[] {
  if (!own.recomputed.length) return [h("p", {}, "Nothing is recomputed in backward passes.")];
  const stages = new Set(own.recomputed.map((row) => row.stage)).size > 1;
  const moves = own.recomputed.some((row) => row.moves.length);
  const rows: Cell[][] = own.recomputed.map((row) => [
    ...(stages ? [String(row.stage)] : []),
    row.calls,
    String(row.count),
    row.all ? `all ${row.of} operators` : row.values.length ? `${row.values.length} of ${row.of} operators: ${row.values.join(", ")}` : "no operator",
    ...(moves ? [row.moves.join(", ")] : []),
  ]);
  const head = [...(stages ? ["stage"] : []), "block calls", "how many", "recomputed", ...(moves ? ["sent again"] : [])];
  return [table("What is recomputed in backward passes", head, rows)];
}

/** An operator in a module: its name begins with a colon where it is the module's own. */
function nameOf(module: string, operator: string): string {
  return module && operator && !operator.startsWith(":") ? `${module}.${operator}` : `${module}${operator}`;
}

function option(own: Memory, index: number, width: number) {
  const process = own.processes[index]!;
  const { text, faint } = ink();
  const columns = process.lines[0]!.length;
  const limit = { yAxis: process.limit_bytes, label: { formatter: `limit ${bytes(process.limit_bytes)}`, color: text, position: "insideEndTop" } };
  const marks = Math.max(3, Math.floor(width / 90));
  const drawn = own.components.flatMap((name, row) => (process.lines[row]!.some((value) => value > 0) ? [{ name, row }] : []));
  const isNear = process.peak_bytes > process.limit_bytes / 3;
  const most = Math.max(process.peak_bytes, isNear ? process.limit_bytes : 0);
  const interval = byteStep(most, 5);
  return {
    key: drawn.map(({ name, row }): [string, string] => [name, colorOf(row)]),
    grid: { left: 84, right: 30, top: 16, bottom: 36 },
    xAxis: { type: "category", boundaryGap: false, data: [...Array(columns).keys()].map((i) => seconds((own.step_s * i) / columns)), axisLabel: { color: text, interval: Math.ceil(columns / marks) - 1 } },
    yAxis: { type: "value", min: 0, interval, max: interval * Math.ceil((1.04 * most) / interval), axisLabel: { formatter: bytes, color: text }, splitLine: { lineStyle: { color: faint } } },
    tooltip: { trigger: "axis", valueFormatter: (value: number) => bytes(value) },
    series: drawn.map(({ name, row }, place) => ({
      name,
      type: "line",
      stack: "all",
      step: "end",
      symbol: "none",
      lineStyle: { width: 0 },
      itemStyle: { color: colorOf(row) },
      areaStyle: { opacity: 0.85 },
      data: process.lines[row]!,
      markLine: place === 0 && isNear ? { symbol: "none", silent: true, data: [limit] } : undefined,
    })),
  };
}

function peaks(own: Memory): HTMLElement {
  const components = own.components.filter((name) => own.processes.some((process) => process.at_peak[name]));
  const rows: Cell[][] = own.processes.map((process) => [
    process.name,
    ...components.map((name) => ({ value: bytes(process.at_peak[name] ?? 0), share: (process.at_peak[name] ?? 0) / process.peak_bytes })),
    bytes(process.peak_bytes),
    percent(process.peak_bytes / process.limit_bytes),
  ]);
  return table("Memory at the peak of each group of devices", ["devices", ...components, "together", "of the limit"], rows);
}

function largestOf(own: Memory, index: number): HTMLElement {
  const process = own.processes[index]!;
  const rows: Cell[][] = process.largest.map((held) => [
    held.name,
    held.component,
    String(held.count),
    { value: bytes(held.bytes), share: held.bytes / process.peak_bytes },
    percent(held.bytes / process.peak_bytes),
  ]);
  return table("Largest tensors of these devices", ["tensor", "component", "how many", "together", "of the peak"], rows);
}
