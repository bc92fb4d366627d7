import { Chart, ink, isDark } from "../chart";
import type { Network, Plan } from "../data";
import { h, table, type Cell } from "../dom";
import { bytes, percent, rate, seconds } from "../format";

// The traffic matrix in pixels: a side at most, a cell of few devices, what is left and above of it.
const SIDE = 560;
const CELL = 64;
const LEFT = 96;
const TOP = 48;

/** Mesh axes on the topology, and the load of each level of links. */
export function devices(plan: Plan): HTMLElement[] {
  const own = plan.network;
  const levels: Cell[][] = own.levels.filter((level) => level.size > 1).reverse().map((level) => [
    level.name,
    `${level.size}, ${level.fabric.replace("_", " ")}${level.oversubscription > 1 ? `, oversubscribed ${level.oversubscription}:1` : ""}`,
    rate(level.bytes_per_s),
    seconds(level.busy_s),
    { value: percent(level.share), share: level.share },
  ]);
  const axes: Cell[][] = own.groups.flatMap((group) =>
    group.axes.filter((axis) => axis.size > 1).map((axis) => [
      `${group.name}: axis ${axis.axis}`,
      String(axis.size),
      axis.levels.join(", ") || "none",
      splitsOf(plan, axis.axis),
    ]),
  );
  return [
    h("p", {}, `${own.devices}.`),
    topology(own),
    table("Levels of the topology, the slowest first", ["level", "joins", "a device sends at most", "busy in a step", "share of the step"], levels),
    table("Axes of the mesh: levels that they cross, and the most frequent splits", ["axis", "devices", "levels", "splits"], axes),
  ];
}

function splitsOf(plan: Plan, axis: string): string {
  const found = new Map<string, number>();
  for (const own of plan.graph.functions) {
    for (const node of own.nodes) {
      const what = node.splits[axis];
      if (what !== undefined) found.set(what, (found.get(what) ?? 0) + node.share);
    }
  }
  const sorted = [...found].sort((a, b) => b[1] - a[1]).slice(0, 3);
  return sorted.map(([what, share]) => `${what} (${percent(share)})`).join(", ") || "nothing";
}

/** Levels as boxes in each other, the innermost ones drawn once; parts of a mixed cluster beside each other. */
function topology(own: Network): HTMLElement {
  const shares = new Map(own.levels.map((level) => [level.name, level.share]));
  const parts = own.parts.map((part) => nest(h("div", { class: "box device" }, part.device), part.levels, shares));
  if (parts.length === 1) return h("div", { class: "topology" }, parts[0]!);
  const joins = own.levels.filter((level) => !own.parts.some((part) => part.levels.some((inner) => inner.name === level.name)));
  return h("div", { class: "topology" }, joins.reduce((inner, level) => box(level.name, "parts", level.share, inner), h("div", { class: "row" }, ...parts)));
}

function nest(device: HTMLElement, levels: { name: string; size: number }[], shares: Map<string, number>): HTMLElement {
  return levels.reduce((inner, { name, size }) => box(name, String(size), shares.get(name) ?? 0, h("div", { class: "row" }, inner, h("div", { class: "times" }, `× ${size}`))), device);
}

function box(name: string, what: string, share: number, inner: HTMLElement): HTMLElement {
  const load = h("div", { class: "load", "aria-hidden": "true" });
  load.style.setProperty("--share", percent(Math.min(1, share)));
  return h("div", { class: "box" }, h("div", { class: "label" }, `${what} over ${name}: links busy for ${percent(share)} of the step`), load, inner);
}

/** Who sends to whom, and by which collective. */
export function traffic(plan: Plan): HTMLElement[] {
  const own = plan.network;
  const matrix = own.traffic.bytes;
  const size = own.traffic.devices_a_row;
  const names = matrix.map((_, row) => (size > 1 ? `${row * size}-${(row + 1) * size - 1}` : String(row)));
  const pairs = matrix.flatMap((row, source) => row.map((sent, target) => ({ source, target, sent })));
  const largest = pairs.filter((pair) => pair.sent > 0).sort((a, b) => b.sent - a.sent).slice(0, 40);
  const data = table("Largest flows between devices in a step", ["from", "to", "bytes"], largest.map((pair) => [names[pair.source]!, names[pair.target]!, bytes(pair.sent)]));
  const most = Math.max(1, ...pairs.map((pair) => pair.sent));
  const make = (width: number) => {
    const { text, faint, surface } = ink();
    const strong = isDark() ? "#e67828" : "#be4600";
    const side = Math.min(SIDE, width - LEFT - 24, CELL * matrix.length);
    const frame = { lineStyle: { color: faint } };
    const axis = { type: "category", data: names, axisLabel: { color: text, hideOverlap: true }, axisLine: frame, axisTick: { show: false }, splitLine: { show: matrix.length <= 16, ...frame }, nameLocation: "middle", nameTextStyle: { color: text } };
    return {
      grid: { left: LEFT, width: side, top: TOP, height: side },
      xAxis: { ...axis, name: "to device", nameGap: 28, position: "top" },
      yAxis: { ...axis, name: "from device", nameGap: LEFT - 28, inverse: true },
      visualMap: { min: 0, max: Math.sqrt(most), calculable: true, orient: "horizontal", left: LEFT, top: TOP + side + 12, inRange: { color: [surface, strong] }, textStyle: { color: text }, formatter: (root: number) => bytes(root ** 2) },
      tooltip: { formatter: (params: { value: [number, number, number] }) => `${names[params.value[1]]} to ${names[params.value[0]]}\n${bytes(params.value[2] ** 2)} a step` },
      series: [{ type: "heatmap", progressive: 0, data: pairs.filter((pair) => pair.sent > 0).map((pair) => [pair.target, pair.source, Math.sqrt(pair.sent)]) }],
    };
  };
  const chart = new Chart("Traffic between devices", TOP + Math.min(SIDE, CELL * matrix.length) + 70, make, data);
  const sums = new Map<string, number[]>();
  for (const sent of own.collectives) {
    const key = JSON.stringify([sent.transfer, sent.axes, sent.level]);
    const found = sums.get(key) ?? [0, 0, 0, 0];
    sums.set(key, [found[0]! + sent.count, found[1]! + sent.bytes, found[2]! + sent.s, found[3]! + sent.waited_s]);
  }
  const rows: Cell[][] = [...sums].sort((a, b) => b[1][3]! - a[1][3]! || b[1][2]! - a[1][2]!).map(([key, found]) => {
    const [transfer, axes, level] = JSON.parse(key) as [string, string, string];
    return [transfer, axes.replaceAll("+", ", "), level, String(found[0]), bytes(found[1]!), seconds(found[2]!), seconds(found[3]!)];
  });
  const each = size > 1 ? `A row is ${size} neighboring devices. ` : "";
  return [
    h("p", {}, `${each}A collective is drawn as a ring along its axes, an all_to_all as equal parts to all others. Colors are by the square root of bytes, so that little is seen beside much.`),
    chart.element,
    table("Collectives of a step, of one device of each group", ["collective", "over axes", "slowest level", "how many", "bytes sent", "time", "waited for"], rows),
  ];
}
