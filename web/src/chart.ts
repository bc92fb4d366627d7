import { BarChart, CustomChart, GraphChart, HeatmapChart, LineChart } from "echarts/charts";
import {
  DataZoomComponent,
  GridComponent,
  MarkLineComponent,
  TooltipComponent,
  VisualMapComponent,
} from "echarts/components";
import * as echarts from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";

import { details, h } from "./dom";

echarts.use([
  BarChart,
  CanvasRenderer,
  CustomChart,
  DataZoomComponent,
  GraphChart,
  GridComponent,
  HeatmapChart,
  LineChart,
  MarkLineComponent,
  TooltipComponent,
  VisualMapComponent,
]);

export type Option = echarts.EChartsCoreOption;
export type Params = { dataIndex: number; dataType?: string; seriesIndex: number; value: unknown };
/** Names and colors of what is drawn, as a list below the chart. */
export type Key = [string, string][];
type Make = (width: number, height: number) => Option & { key?: Key };
type Click = (params: Params) => void;

/** Colors that are told apart by those who see no red or green (Okabe and Ito, 2008); then as many more. */
export const COLORS = [
  ...["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a100", "#7f7f7f"],
  ...["#882255", "#44aa99", "#6f5fc6", "#aa7744", "#8fbc5a", "#e58a8a", "#2f6f4f", "#b8b8d8"],
];
const drawn: Chart[] = [];

export function isDark(): boolean {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

export function colorOf(index: number): string {
  return COLORS[index % COLORS.length]!;
}

/** Letters that are read on a color, `#rrggbb` or `rgb(r,g,b)`. */
export function lettersOn(color: string): string {
  const parts = color.startsWith("#") ? [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)) : color.match(/\d+/g)!.map(Number);
  return parts[0]! * 0.299 + parts[1]! * 0.587 + parts[2]! * 0.114 > 125 ? "#111" : "#fff";
}

/** Text and lines of charts, as the page has them. */
export function ink(): { text: string; faint: string; surface: string } {
  const style = getComputedStyle(document.documentElement);
  const read = (name: string) => style.getPropertyValue(name).trim();
  return { text: read("--text"), faint: read("--line"), surface: read("--surface") };
}

/** What all charts have in common. */
function common(): Option {
  const { text, faint, surface } = ink();
  return {
    animation: false,
    color: COLORS,
    backgroundColor: "transparent",
    textStyle: { color: text, fontFamily: "system-ui, sans-serif" },
    tooltip: {
      renderMode: "richText",
      confine: true,
      backgroundColor: surface,
      borderColor: faint,
      textStyle: { color: text, fontSize: 12 },
    },
  };
}

/** A chart that is drawn anew in other colors and sizes, with its data as a table beside it. */
export class Chart {
  readonly element: HTMLElement;
  private readonly canvas: HTMLElement;
  private readonly key = h("ul", { class: "key" });
  private chart: echarts.ECharts | null = null;

  constructor(
    label: string,
    height: number,
    private make: Make,
    data: HTMLElement,
    private readonly click: Click | null = null,
  ) {
    this.canvas = h("div", { class: "chart", role: "img", "aria-label": label });
    this.canvas.style.height = `${height}px`;
    this.element = h("figure", {}, this.canvas, this.key, details(`${label}: data as a table`, data));
    drawn.push(this);
  }

  /** Draw it, once it is on the page. */
  draw(): void {
    this.chart ??= echarts.init(this.canvas, null, { renderer: "canvas" });
    const { key, ...own } = this.make(this.canvas.clientWidth, this.canvas.clientHeight);
    this.key.replaceChildren(...(key ?? []).map(([name, color]) => keyEntry(name, color)));
    const shared = common();
    const tooltip = { ...(shared.tooltip as object), ...((own.tooltip as object) ?? {}) };
    this.chart.setOption({ ...shared, ...own, tooltip }, { notMerge: true });
    this.chart.off("click");
    if (this.click !== null) this.chart.on("click", this.click as (params: unknown) => void);
  }

  /** Draw something else, in another height where one is given. */
  change(make: Make, height: number | null = null): void {
    this.make = make;
    if (height !== null) {
      this.canvas.style.height = `${height}px`;
      this.chart?.resize();
    }
    this.draw();
  }

  /** In the size that it has now: what is drawn depends on the width. */
  resize(): void {
    if (this.chart === null) return;
    this.chart.resize();
    this.draw();
  }
}

function keyEntry(name: string, color: string): HTMLElement {
  const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.background = color;
  return h("li", {}, swatch, name);
}

/** Draw all charts, and again where colors or sizes change. */
export function drawAll(): void {
  drawn.forEach((chart) => chart.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawn.forEach((chart) => chart.draw());
  });
  addEventListener("resize", () => drawn.forEach((chart) => chart.resize()));
  addEventListener("beforeprint", () => drawn.forEach((chart) => chart.resize()));
}
