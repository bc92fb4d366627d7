import dagre from "@dagrejs/dagre";

import { Chart, COLORS, ink, isDark } from "../chart";
import type { GraphFunction, GraphNode, Plan } from "../data";
import { choice, h, table } from "../dom";
import { percent, seconds } from "../format";
import type { Selection } from "../select";
import { finder, parameters } from "./names";

const WIDTH = 150;
const HEIGHT = 34;
const LABEL = 22;
const FITTED = 0.8; // of a chart, by ECharts

/** The folded graph: block kinds once, colored by time or by layout. */
export function model(plan: Plan, selection: Selection): HTMLElement[] {
  const functions = plan.graph.functions;
  let shown = 0;
  let byLayout = false;
  let selected = "";
  const layouts = [...new Set(functions.flatMap((f) => f.nodes.map(layoutOf)))].sort();
  const make = (width: number, height: number) =>
    graphOption(functions[shown]!, byLayout ? layouts : null, selected, plan, [width, height]);
  const rows = functions.flatMap((own) => own.nodes.map((node) => nodeRow(own, node, selection)));
  const data = table(
    "Operators by place, the most expensive first",
    ["operator", "place", "time", "share of all operators", "splits", "result"],
    rows.sort((a, b) => b.share - a.share).map((row) => row.cells),
  );
  const chart = new Chart("Model as a folded graph", 560, make, data, (params) => {
    const node = params.dataType === "node" ? functions[shown]!.nodes[params.dataIndex] : undefined;
    if (node === undefined) return;
    const inner = functions.findIndex((own) => own.name === node.function);
    if (inner >= 0) show(inner);
    else selection.select(`${functions[shown]!.name}|${node.key}`);
  });
  const names = functions.map((own) => (own.calls > 1 ? `${own.name}, ${own.calls} calls` : own.name));
  const which = choice("block", names, (index) => show(index));
  function show(index: number): void {
    shown = index;
    which.querySelector("select")!.value = String(index);
    chart.change(make);
  }
  selection.follow((id) => {
    selected = id;
    const index = functions.findIndex((own) => own.name === id.slice(0, id.indexOf("|")));
    if (index >= 0) show(index);
  });
  const color = choice("color", ["time", "layout"], (index) => {
    byLayout = index === 1;
    chart.change(make);
  });
  const help = "Select an operator for its layout, costs and next best ways; select a block to look into it. Drag to move, turn the wheel to zoom.";
  const controls = h("div", { class: "controls" }, which, color);
  return [h("p", {}, help), finder(plan, selection), controls, chart.element, parameters(plan, selection)];
}

function nodeRow(own: GraphFunction, node: GraphNode, selection: Selection) {
  const open = h("button", { type: "button", class: "link", click: () => selection.select(`${own.name}|${node.key}`) }, node.key);
  const splits = Object.entries(node.splits).map(([axis, what]) => `${axis}: ${what}`).join("; ");
  return {
    share: node.share,
    cells: [
      node.function === undefined ? open : node.key,
      own.name,
      seconds(node.own_s + node.moving_s),
      { value: percent(node.share), share: node.share },
      splits || "nothing",
      node.shape,
    ],
  };
}

function layoutOf(node: GraphNode): string {
  return Object.entries(node.splits).map(([axis, what]) => `${axis}: ${what}`).join("; ") || "not split";
}

function graphOption(own: GraphFunction, layouts: string[] | null, selected: string, plan: Plan, [width, height]: [number, number]) {
  const layout = new dagre.graphlib.Graph();
  layout.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 26 });
  layout.setDefaultEdgeLabel(() => ({}));
  own.nodes.forEach((_, index) => layout.setNode(String(index), { width: WIDTH, height: HEIGHT }));
  own.edges.forEach(([source, target]) => layout.setEdge(String(source), String(target)));
  dagre.layout(layout);
  const { text, faint } = ink();
  // The whole graph would be scaled into the chart, its nodes not: what does not fit is drawn as large
  // as it is, from its top, and shrinks with its nodes where one zooms out.
  const size = layout.graph();
  const scale = Math.min(1, (FITTED * width) / (size.width! + WIDTH), (FITTED * height) / (size.height! + HEIGHT));
  const top = [size.width! / 2, Math.min(size.height!, height / 2 - HEIGHT) / 2 + (scale < 1 ? height / 4 : 0)];
  const most = Math.max(1e-12, ...own.nodes.map((node) => node.share));
  const nodes = own.nodes.map((node, index) => {
    const place = layout.node(String(index))!;
    const isSelected = selected === `${own.name}|${node.key}`;
    const [fill, letter] = layouts ? [COLORS[layouts.indexOf(layoutOf(node)) % COLORS.length]!, "#fff"] : heat(node.share / most);
    return {
      name: String(index),
      x: place.x,
      y: place.y,
      symbol: "roundRect",
      symbolSize: [WIDTH * scale, HEIGHT * scale],
      itemStyle: { color: fill, borderColor: isSelected ? text : faint, borderWidth: isSelected ? 3 : 1 },
      label: { show: true, color: letter, fontSize: 11, formatter: short(node) },
      tooltip: { formatter: () => tip(node, plan) },
    };
  });
  return {
    series: [
      {
        type: "graph",
        layout: "none",
        roam: true,
        ...(scale < 1 ? { zoom: 1 / scale, center: top } : {}),
        scaleLimit: { min: 0.1, max: 8 },
        nodeScaleRatio: 1,
        data: nodes,
        links: own.edges.map(([source, target]) => ({ source: String(source), target: String(target) })),
        // From the top down; an arrow would shorten edges by the width of a node, to nothing.
        edgeSymbol: ["none", "none"],
        lineStyle: { color: text, opacity: 0.45, curveness: 0 },
        emphasis: { focus: "adjacency" },
      },
    ],
  };
}

/** From the surface to a strong color; the letters on it. */
function heat(share: number): [string, string] {
  const strength = Math.sqrt(share);
  const from = isDark() ? [44, 48, 56] : [244, 246, 250];
  const to = isDark() ? [230, 120, 40] : [190, 70, 0];
  const mixed = from.map((value, index) => Math.round(value + (to[index]! - value) * strength));
  const light = mixed[0]! * 0.299 + mixed[1]! * 0.587 + mixed[2]! * 0.114 > 140;
  return [`rgb(${mixed.join(",")})`, light ? "#111" : "#fff"];
}

function short(node: GraphNode): string {
  const module = node.function === undefined ? node.module.split(".").pop()! : node.module;
  const name = module ? `${module}: ${node.op}` : node.op;
  return name.length > LABEL ? `${name.slice(0, LABEL - 1)}…` : name;
}

function tip(node: GraphNode, plan: Plan): string {
  const time = seconds(node.own_s + node.moving_s);
  const split = layoutOf(node);
  return `${node.key}\n${node.shape}\n${time}, ${percent(node.share)} of ${seconds(plan.graph.whole_s)}\n${split}\n${node.source}`;
}
