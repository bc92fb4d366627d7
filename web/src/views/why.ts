import { Chart, colorOf, ink } from "../chart";
import type { Plan, Versus } from "../data";
import { h, list, table, type Cell } from "../dom";
import { front } from "./front";
import { bytes, cause, percent, picoseconds, seconds, signed } from "../format";

/** Causes that are drawn by themselves; all are in the table. */
const MOST = 8;

/** Other plans, and by which causes they differ. */
export function why(plan: Plan): HTMLElement[] {
  // Of a plan for inference a batch of answers counts, not a step.
  const own_s = plan.alternatives.find((other) => other.is_plan)?.step_s ?? plan.summary.step_s;
  const rows: Cell[][] = plan.alternatives.map((other) => [
    `${other.name}${other.is_plan ? " (this plan)" : ""}`,
    seconds(other.step_s),
    signed(percent, other.step_s / own_s - 1),
    bytes(other.peak_bytes),
    other.fits ? "yes" : "no",
  ]);
  return [
    ...compared(plan.why_not, "Why not another plan: step time by cause, against the plan"),
    ...front(plan.front),
    table("Other plans that were priced", ["plan", "step time", "against the plan", "peak", "fits"], rows),
  ];
}

/** Differences of plans by cause: bars that add up to the difference of the steps. */
export function compared(others: Versus[], label: string): HTMLElement[] {
  if (!others.length) return [];
  const names = others.map((other) => other.versus.name);
  const causes = [...new Set(others.flatMap((other) => other.causes.map(cause)))];
  const value = (other: Versus, name: string) => other.causes.filter((found) => cause(found) === name).reduce((sum, found) => sum + found.difference_ps, 0);
  const size = (name: string) => Math.max(...others.map((other) => Math.abs(value(other, name))));
  const used = causes.filter((name) => size(name) > 0).sort((a, b) => size(b) - size(a));
  const drawn = used.length > MOST ? used.slice(0, MOST - 1) : used;
  const rest = used.filter((name) => !drawn.includes(name));
  const series = drawn.map((name) => ({ name, data: others.map((other) => value(other, name)) }));
  if (rest.length) series.push({ name: `${rest.length} other causes`, data: others.map((other) => rest.reduce((sum, name) => sum + value(other, name), 0)) });
  const height = 50 + 46 * others.length;
  const data: Cell[][] = used.map((name) => [name, ...others.map((other) => signed(picoseconds, value(other, name)))]);
  data.push(["together", ...others.map((other) => signed(picoseconds, other.difference_ps))]);
  const make = (width: number) => {
    const { text, faint } = ink();
    const left = Math.min(150, 0.3 * width);
    return {
      key: series.map(({ name }, index): [string, string] => [name, colorOf(index)]),
      grid: { left, right: 30, top: 12, bottom: 28 },
      xAxis: { type: "value", splitNumber: Math.max(2, Math.floor(width / 140)), axisLabel: { hideOverlap: true, formatter: (ps: number) => (ps ? signed(picoseconds, ps) : "0"), color: text }, splitLine: { lineStyle: { color: faint } } },
      yAxis: { type: "category", inverse: true, data: names, axisLabel: { color: text, width: left - 10, overflow: "truncate" } },
      tooltip: { trigger: "item", valueFormatter: (ps: number) => signed(picoseconds, ps) },
      series: series.map((own) => ({ ...own, type: "bar", stack: "all" })),
    };
  };
  const chart = new Chart(label, height, make, table(label, ["cause", ...names], data));
  const memory: Cell[][] = others.map((other) => [other.versus.name, bytes(other.versus.peak_bytes), other.versus.fits ? "yes" : "no", changed(other)]);
  return [
    h("h3", {}, label),
    list(others.map((other) => other.headline)),
    chart.element,
    table("Their memory at the peak, against the plan", ["plan", "peak", "fits", "difference"], memory),
  ];
}

/** Components of memory of which another plan has more or less. */
function changed(other: Versus): string {
  const rows = other.memory.filter((row) => row.difference_bytes !== 0);
  return rows.map((row) => `${row.component} ${signed(bytes, row.difference_bytes)}`).join(", ") || "none";
}
