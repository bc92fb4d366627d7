import dagre from "@dagrejs/dagre";

import { Chart, colorOf, ink, isDark, lettersOn, type Key } from "../chart";
import type { GraphFunction, GraphNode, Plan } from "../data";
import { choice, h, table, type Cell } from "../dom";
import { percent, seconds } from "../format";
import type { Selection } from "../select";
import { finder, parameters } from "./names";

// A node in pixels, letters of a line on it, and what is left around the graph.
const WIDTH = 158;
const HEIGHT = 36;
const LABEL = 24;
const MARGIN = 12;
const LOWEST = 160;
const HIGHEST = 900;
const LEAST_SCALE = 0.7; // where letters are still read
// Rows of a table; the others take little time.
const MOST_ROWS = 1000;

/** The folded graph: block kinds once, colored by time or by layout. */
export function model(plan: Plan, selection: Selection): HTMLElement[] {
  const functions = plan.graph.functions;
  let shown = 0;
  let byLayout = false;
  let selected = "";
  const layouts = [...new Set(functions.flatMap((f) => f.nodes.map(layoutOf)))].sort();
  const make = (width: number) => graphOption(functions[shown]!, byLayout ? layouts : null, selected, width);
  const height = () => Math.min(HIGHEST, Math.max(LOWEST, laid(functions[shown]!).height + 2 * MARGIN));
  const data = operators(functions, selection);
  const chart = new Chart("Model as a folded graph", height(), make, data, (params) => {
    const node = params.dataType === "node" ? functions[shown]!.nodes[params.dataIndex] : undefined;
    if (node === undefined) return;
    const inner = functions.findIndex((own) => own.name === node.function);
    if (inner >= 0) show(inner);
    else selection.select(idOf(functions[shown]!, node));
  });
  const drawnIn = new Map<string, number>();
  functions.forEach((own, index) => own.nodes.forEach((node) => drawnIn.set(idOf(own, node), index)));
  const names = functions.map((own) => (own.calls > 1 ? `${own.name}, ${own.calls} calls` : own.name));
  const which = choice("block", names, (index) => show(index));
  function show(index: number): void {
    shown = index;
    which.querySelector("select")!.value = String(index);
    chart.change(make, height());
  }
  selection.follow((id) => {
    selected = id;
    const place = id.slice(0, id.indexOf("|"));
    // What is selected may be another call of what is drawn.
    const index = drawnIn.get(id) ?? functions.findIndex((own) => own.name === place);
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

/** The card of a node: operators are named by their place and key. */
function idOf(own: GraphFunction, node: GraphNode): string {
  return `${own.place}|${node.key}`;
}

/** All operators as a table, or those that take longest. */
function operators(functions: GraphFunction[], selection: Selection): HTMLElement {
  const all = functions.flatMap((own) => own.nodes.map((node) => ({ own, node })));
  const sorted = all.sort((a, b) => b.node.share - a.node.share);
  const left = sorted.length - MOST_ROWS;
  const more = left > 0 ? `; ${left} others take less` : "";
  return table(
    `Operators by place, the most expensive first${more}`,
    ["operator", "place", "time", "share of the step", "splits", "result"],
    sorted.slice(0, MOST_ROWS).map(({ own, node }) => nodeRow(own, node, selection)),
  );
}

function nodeRow(own: GraphFunction, node: GraphNode, selection: Selection): Cell[] {
  const open = h("button", { type: "button", class: "link", click: () => selection.select(idOf(own, node)) }, node.key);
  const splits = Object.entries(node.splits).map(([axis, what]) => `${axis}: ${what}`).join("; ");
  return [
    node.function === undefined ? open : node.key,
    own.name,
    seconds(node.own_s + node.moving_s),
    { value: percent(node.share), share: node.share },
    splits || "nothing",
    node.shape,
  ];
}

function layoutOf(node: GraphNode): string {
  return Object.entries(node.splits).map(([axis, what]) => `${axis}: ${what}`).join("; ") || "not split";
}

interface Layout {
  places: { x: number; y: number }[];
  width: number;
  height: number;
}
const placed = new WeakMap<GraphFunction, Layout>();

/** A function's nodes in their places, in pixels. */
function laid(own: GraphFunction): Layout {
  const known = placed.get(own);
  if (known !== undefined) return known;
  const layout = new dagre.graphlib.Graph();
  layout.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 24 });
  layout.setDefaultEdgeLabel(() => ({}));
  own.nodes.forEach((_, index) => layout.setNode(String(index), { width: WIDTH, height: HEIGHT }));
  own.edges.forEach(([source, target]) => layout.setEdge(String(source), String(target)));
  dagre.layout(layout);
  const places = own.nodes.map((_, index) => layout.node(String(index))!).map(({ x, y }) => ({ x: x!, y: y! }));
  const { width, height } = layout.graph();
  const found = { places, width: width!, height: height! };
  placed.set(own, found);
  return found;
}

/** Where the chart's box of all nodes' middles is, so that a pixel of the layout is one of the chart, or `scale` of one. */
function boxOf({ places }: Layout, width: number, scale: number) {
  const [xs, ys] = [places.map((place) => place.x), places.map((place) => place.y)];
  const [left, right, bottom] = [Math.min(...xs), Math.max(...xs), Math.max(...ys)];
  // Of one place on an axis the chart makes two, one on each side.
  const wide = right - left ? { left: (width - (right - left) * scale) / 2, width: (right - left) * scale } : { left: width / 2 - scale, width: 2 * scale };
  const top = MARGIN + (HEIGHT / 2) * scale;
  const high = bottom - Math.min(...ys) ? { top, height: (bottom - Math.min(...ys)) * scale } : { top: top - scale, height: 2 * scale };
  return { ...wide, ...high };
}

function graphOption(own: GraphFunction, layouts: string[] | null, selected: string, width: number) {
  const layout = laid(own);
  const { text, faint } = ink();
  const scale = Math.max(LEAST_SCALE, Math.min(1, (width - 2 * MARGIN) / layout.width, (HIGHEST - 2 * MARGIN) / layout.height));
  const most = Math.max(1e-12, ...own.nodes.map((node) => node.share));
  const nodes = own.nodes.map((node, index) => {
    const place = layout.places[index]!;
    const isSelected = selected === idOf(own, node);
    const fill = layouts ? colorOf(layouts.indexOf(layoutOf(node))) : heat(node.share / most);
    return {
      name: String(index),
      x: place.x,
      y: place.y,
      symbol: "rect",
      symbolSize: [WIDTH * scale, HEIGHT * scale],
      itemStyle: { color: fill, borderColor: isSelected ? text : faint, borderWidth: isSelected ? 3 : 0 },
      label: { show: true, color: lettersOn(fill), fontSize: 11 * scale, lineHeight: 14 * scale, formatter: short(node) },
      tooltip: { formatter: () => tip(node) },
    };
  });
  const drawn = layouts?.filter((name) => own.nodes.some((node) => layoutOf(node) === name)) ?? [];
  const key: Key = layouts ? drawn.map((name) => [name, colorOf(layouts.indexOf(name))]) : [["no time", heat(0)], [`${percent(most)} of the step`, heat(1)]];
  return {
    key,
    series: [
      {
        type: "graph",
        layout: "none",
        roam: true,
        ...boxOf(layout, width, scale),
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

/** From the surface to a strong color. */
function heat(share: number): string {
  const strength = Math.sqrt(share);
  const from = isDark() ? [44, 48, 56] : [244, 246, 250];
  const to = isDark() ? [230, 120, 40] : [190, 70, 0];
  const mixed = from.map((value, index) => Math.round(value + (to[index]! - value) * strength));
  return `rgb(${mixed.join(",")})`;
}

/** The module, of which the end tells most, above the operator. */
function short(node: GraphNode): string {
  const { module } = node;
  const above = module.length > LABEL ? `…${module.slice(1 - LABEL)}` : module;
  const below = node.op.length > LABEL ? `${node.op.slice(0, LABEL - 1)}…` : node.op;
  return above ? `${above}\n${below}` : below;
}

function tip(node: GraphNode): string {
  const time = seconds(node.own_s + node.moving_s);
  const split = layoutOf(node);
  return `${node.key}\n${node.shape}\n${time}, ${percent(node.share)} of the step\n${split}\n${node.source}`;
}
