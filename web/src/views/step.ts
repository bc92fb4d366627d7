import type { CustomSeriesRenderItemAPI, CustomSeriesRenderItemParams } from "echarts";

import { Chart, colorOf, ink } from "../chart";
import type { Plan, SliceRow, Steps, Track } from "../data";
import { choice, h, table, type Cell } from "../dom";
import { percent, picoseconds } from "../format";
import type { Selection } from "../select";

const ROW = 22;
const ACTIONS = "actions";

interface Line {
  label: string;
  track: Track;
}

/** A step over time: the actions of all groups of devices, or all streams of one; measured beside. */
export function step(plan: Plan, selection: Selection): HTMLElement[] {
  const steps = plan.steps;
  const isAlone = steps.processes.length === 1;
  const all = linesOf(steps, null);
  let lines = isAlone ? all : linesOf(steps, ACTIONS);
  let wanted = new Set<string>();
  const make = (width: number) => option(steps, lines, wanted, width);
  const height = () => 96 + ROW * lines.length;
  const chart = new Chart("Step over time", height(), make, dataOf(steps, all));
  selection.follow((id) => {
    wanted = new Set(plan.cards[id]?.alike);
    chart.change(make);
  });
  const names = steps.processes.map((process) => process.name);
  const which = choice("devices", ["all groups: actions", ...names], (index) => {
    lines = index === 0 ? linesOf(steps, ACTIONS) : linesOf(steps, null, index - 1);
    chart.change(make, height());
  });
  const whose = isAlone ? ` of ${steps.processes[0]!.name}` : "";
  const words = `Each row is a stream${whose}; the step ends after ${picoseconds(steps.step_ps)}. Drag the slider or turn the wheel to zoom. The operator that is selected is outlined.`;
  return [h("p", {}, words), ...(isAlone ? [] : [h("div", { class: "controls" }, which)]), chart.element];
}

function linesOf(steps: Steps, only: string | null, process: number | null = null): Line[] {
  const isAlone = steps.processes.length === 1;
  const label = (group: string, track: string) => (isAlone ? track || group : track ? `${group}: ${track}` : group);
  return steps.processes.flatMap((own, index) => {
    if (process !== null && process !== index) return [];
    const tracks = own.tracks.filter((track) => only === null || track.name === only);
    const seen = steps.observed?.processes[index]?.tracks ?? [];
    return [
      ...tracks.map((track) => ({ label: label(own.name, only === null ? track.name : ""), track })),
      ...seen.map((track) => ({ label: label(own.name, "observed"), track })),
    ];
  });
}

/** Whether a slice is of an operator that is selected, or that is the longest of its neighbors. */
function isOf(name: string, wanted: Set<string>): boolean {
  return wanted.has(name.replace(/ and its neighbors$/, ""));
}

function option(steps: Steps, lines: Line[], wanted: Set<string>, width: number) {
  const kinds = [...new Set(lines.flatMap((line) => line.track.slices.map((slice) => slice[3])))];
  const data = lines.flatMap((line, row) => line.track.slices.map((slice) => [row, ...slice]));
  const { text, faint } = ink();
  const left = Math.min(220, 0.34 * width);
  const longest = Math.max(steps.step_ps, steps.observed?.step_ps ?? 0);
  return {
    key: kinds.map((kind, index): [string, string] => [steps.words[kind]!, colorOf(index)]),
    grid: { left, right: 36, top: 8, bottom: 70 },
    xAxis: { type: "value", splitNumber: Math.max(2, Math.floor((width - left) / 150)), min: 0, max: longest, axisLabel: { formatter: picoseconds, color: text, hideOverlap: true }, splitLine: { lineStyle: { color: faint } } },
    yAxis: { type: "category", inverse: true, data: lines.map((line) => line.label), axisLabel: { color: text, width: left - 12, overflow: "truncate" }, axisTick: { show: false } },
    dataZoom: [
      { type: "inside", filterMode: "weakFilter" },
      { type: "slider", filterMode: "weakFilter", bottom: 12, height: 22, labelFormatter: picoseconds, textStyle: { color: text } },
    ],
    tooltip: { formatter: (params: { value: number[] }) => tip(params.value, steps) },
    series: [
      {
        type: "custom",
        progressive: 0,
        clip: true,
        encode: { x: [1, 2], y: 0 },
        data,
        dimensions: ["row", "start", "length", "name", "kind"],
        renderItem: (_: CustomSeriesRenderItemParams, api: CustomSeriesRenderItemAPI) => {
          const start = api.coord([api.value(1), api.value(0)]);
          const end = api.coord([Number(api.value(1)) + Number(api.value(2)), api.value(0)]);
          const height = ROW * 0.72;
          const color = colorOf(kinds.indexOf(Number(api.value(4))));
          const isWanted = wanted.size > 0 && isOf(steps.words[Number(api.value(3))]!, wanted);
          return {
            type: "rect",
            shape: { x: start[0]!, y: start[1]! - height / 2, width: Math.max(0.6, end[0]! - start[0]!), height },
            style: { fill: color, stroke: isWanted ? text : undefined, lineWidth: isWanted ? 2 : 0 },
          };
        },
      },
    ],
  };
}

function tip(value: number[], steps: Steps): string {
  const [, start, length, name, kind] = value as [number, number, number, number, number];
  return `${steps.words[name]}\n${steps.words[kind]}: ${picoseconds(length)}, from ${picoseconds(start)} on`;
}

function dataOf(steps: Steps, lines: Line[]): HTMLElement {
  const rows: Cell[][] = lines.map((line) => {
    const busy = line.track.slices.reduce((sum: number, slice: SliceRow) => sum + slice[1], 0);
    const longest = line.track.slices.reduce((most: SliceRow | null, slice) => (most && most[1] >= slice[1] ? most : slice), null);
    return [
      line.label,
      picoseconds(busy),
      { value: percent(busy / steps.step_ps), share: busy / steps.step_ps },
      String(line.track.slices.length),
      longest ? `${steps.words[longest[2]]}, ${picoseconds(longest[1])}` : "",
    ];
  });
  return table("Streams of the step", ["stream", "busy", "share of the step", "drawn parts", "longest part"], rows);
}
