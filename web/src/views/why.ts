import { Chart, ink } from "../chart";
import type { Plan, Versus } from "../data";
import { h, list, table, type Cell } from "../dom";
import { front } from "./front";
import { bytes, cause, percent, picoseconds, seconds, signed } from "../format";

/** Other plans, and by which causes they differ. */
export function why(plan: Plan): HTMLElement[] {
  const rows: Cell[][] = plan.alternatives.map((other) => [
    other.name,
    seconds(other.step_s),
    signed(percent, other.step_s / plan.summary.step_s - 1),
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
  const used = causes.filter((name) => others.some((other) => value(other, name) !== 0));
  const data: Cell[][] = used.map((name) => [name, ...others.map((other) => signed(picoseconds, value(other, name)))]);
  data.push(["together", ...others.map((other) => signed(picoseconds, other.difference_ps))]);
  const make = () => {
    const { text, faint } = ink();
    return {
      grid: { left: 150, right: 24, top: 16, bottom: 24 + 22 * Math.ceil(used.length / 2) },
      legend: { bottom: 0, textStyle: { color: text, width: 300, overflow: "truncate" } },
      xAxis: { type: "value", axisLabel: { formatter: (ps: number) => (ps ? signed(picoseconds, ps) : "0"), color: text }, splitLine: { lineStyle: { color: faint } } },
      yAxis: { type: "category", inverse: true, data: names, axisLabel: { color: text, width: 140, overflow: "truncate" } },
      tooltip: { trigger: "item", valueFormatter: (ps: number) => signed(picoseconds, ps) },
      series: used.map((name) => ({ name, type: "bar", stack: "all", data: others.map((other) => value(other, name)) })),
    };
  };
  const chart = new Chart(label, 90 + 46 * others.length + 22 * Math.ceil(used.length / 2), make, table(label, ["cause", ...names], data));
  const memory: Cell[][] = others.map((other) => [other.versus.name, bytes(other.versus.peak_bytes), other.versus.fits ? "yes" : "no", ...[other.memory.map((row) => `${row.component} ${signed(bytes, row.difference_bytes)}`).join(", ")]]);
  return [
    h("h3", {}, label),
    list(others.map((other) => other.headline)),
    chart.element,
    table("Their memory at the peak, against the plan", ["plan", "peak", "fits", "difference"], memory),
  ];
}
