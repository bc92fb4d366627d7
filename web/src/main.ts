import { drawAll } from "./chart";
import { load, type Plan, type Report } from "./data";
import { h } from "./dom";
import { Selection } from "./select";
import { cardPanel } from "./views/card";
import { changes } from "./views/changes";
import { memory } from "./views/memory";
import { model } from "./views/model";
import { devices, traffic } from "./views/network";
import { step } from "./views/step";
import { summary } from "./views/summary";
import { compared, why } from "./views/why";
import { words } from "./views/words";

type View = (plan: Plan, selection: Selection) => HTMLElement[];
const VIEWS: [string, string, View][] = [
  ["decided", "What was decided", summary],
  ["model", "Model", model],
  ["devices", "Devices and links", devices],
  ["step", "Step over time", step],
  ["memory", "Memory", memory],
  ["traffic", "Traffic", traffic],
  ["why", "Alternatives, and why not", why],
  ["changes", "Rewrites and stages", changes],
];

function draw(report: Report): void {
  const page = document.getElementById("report")!;
  const beside = report.plans.length > 1;
  const selections = report.plans.map(() => new Selection());
  const bar = h("ul", {});
  const body = h("div", {});
  if (beside) {
    const parts = compared(report.differences, "Step time by cause, against the first plan");
    bar.append(h("li", {}, h("a", { href: "#differences" }, "Differences")));
    body.append(h("section", { id: "differences" }, h("h2", {}, "Differences"), ...parts));
  }
  for (const [id, title, view] of VIEWS) {
    const columns = report.plans.map((plan, index) => {
      const parts = view(plan, selections[index]!);
      const name = beside ? [h("p", { class: "path" }, plan.path)] : [];
      return parts.length ? h("div", { class: "plan" }, ...name, ...parts) : null;
    });
    if (columns.every((column) => column === null)) continue;
    bar.append(h("li", {}, h("a", { href: `#${id}` }, title)));
    const grid = h("div", { class: beside ? "beside" : "" }, ...columns);
    body.append(h("section", { id }, h("h2", {}, title), grid));
  }
  bar.append(h("li", {}, h("a", { href: "#words" }, "Words")));
  body.append(h("section", { id: "words" }, h("h2", {}, "Words of this page"), ...words()));
  const cards = cardPanel(report.plans, selections);
  const titles = report.plans.map((plan) => h("h1", {}, plan.title));
  page.replaceChildren(h("header", {}, ...titles, h("nav", { "aria-label": "Views" }, bar)), body, cards);
  drawAll();
}

load().then(draw, (error: Error) => {
  document.getElementById("report")!.prepend(h("p", { class: "fault", role: "alert" }, error.message));
});
