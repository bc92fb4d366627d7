import type { Grid, OperatorCard, ParameterCard, Plan, Role, Stored, Tensor, Term } from "../data";
import { details, h, table, type Cell } from "../dom";
import { amount, bytes, cause, percent, picoseconds, seconds, signed } from "../format";
import type { Selection } from "../select";

/** A panel with all that is known of an operator or a parameter that is selected in one of the plans. */
export function cardPanel(plans: Plan[], selections: Selection[]): HTMLElement {
  const panel = h("aside", { class: "card", hidden: true, "aria-label": "Selected operator or parameter", tabindex: "-1" });
  let last: Element | null = null;
  function close(): void {
    panel.hidden = true;
    if (last instanceof HTMLElement) last.focus();
  }
  panel.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  selections.forEach((selection, index) =>
    selection.follow((id) => {
      const card = plans[index]!.cards[id];
      if (card === undefined) return;
      last = document.activeElement;
      const button = h("button", { type: "button", class: "close", click: close, "aria-label": "Close" }, "×");
      const path = plans.length > 1 ? [h("p", { class: "path" }, plans[index]!.path)] : [];
      panel.replaceChildren(button, ...path, ...(card.kind === "operator" ? operatorOf(card) : parameterOf(card)));
      panel.hidden = false;
      panel.scrollTop = 0;
      panel.focus();
    }),
  );
  return panel;
}

function operatorOf(card: OperatorCard): HTMLElement[] {
  const alike = alikeOf(card.alike);
  const splits = Object.entries(card.splits).map(([axis, what]) => `axis ${axis} splits ${what}`);
  const parts = [
    h("h2", {}, card.name),
    h("p", {}, `${card.op}${card.source ? `, ${card.source}` : ""}; in ${card.place}${alike}; ${card.runs_a_step} forward pass${card.runs_a_step > 1 ? "es" : ""} a step`),
    h("p", {}, splits.join("; ") || "Nothing of it is split."),
    h("p", {}, `${amount(card.flops, "FLOP")} in a forward pass on one device; bound by ${card.bound_by}; all alike: ${seconds(card.alike_s)} a step`),
    h("h3", {}, "Layouts"),
    ...card.operands.map((tensor) => tensorOf(tensor, `reads ${tensor.name} from ${tensor.from ?? ""}`)),
    ...card.results.map((tensor) => tensorOf(tensor, `makes ${tensor.name}`)),
    ...card.weights.map((weight) => storedOf(`How ${weight.name} is stored, and how much of it on each device`, weight.stored)),
    costs("What one call costs", card.terms),
  ];
  if (card.runners_up.length) {
    const rows: Cell[][] = card.runners_up.map((way) => [
      Object.entries(way.splits).map(([axis, what]) => `${axis}: ${what}`).join("; ") || "not split",
      `${signed(picoseconds, way.difference_ps)} (${signed(percent, way.difference_ps / 1e12 / (way.step_s - way.difference_ps / 1e12))})`,
      cause(way.why),
      bytes(way.peak_bytes),
      way.fits ? "yes" : "no",
    ]);
    parts.push(table(`Next best of ${card.ways} ways; ${card.ways_tried} were simulated, the best are shown`, ["way", "step", "most of all", "peak", "fits"], rows));
  } else {
    parts.push(h("p", {}, card.ways ? `It could be split in ${card.ways} other ways; parloom explain PLAN '${card.name}' prices them.` : "It has no other way."));
  }
  return parts;
}

/** Where a parameter lives: as it is computed with, and as it is stored. */
function parameterOf(card: ParameterCard): HTMLElement[] {
  const stored = Object.entries(card.stored);
  const cut = stored.find(([, own]) => own.grid !== null);
  const sum = card.partial_gradient.length ? `; its gradient is a sum over ${card.partial_gradient.join(", ")}` : "";
  return [
    h("h2", {}, card.name),
    h("p", {}, `parameter in ${card.place}${alikeOf(card.alike)}${card.trainable ? "" : ", not trained"}`),
    h("h3", {}, "Computed with"),
    h("p", {}, `${liesAs(card)}${sum}`),
    gridOf(card.grid, card.name),
    h("h3", {}, "Stored"),
    storedOf("How it is stored, and how much of it on each device", card.stored),
    ...(cut ? [gridOf(cut[1].grid!, `the ${cut[0]} of each part`)] : []),
    table("Read by", ["operator", "as"], card.readers.map((reader) => [reader.name, reader.layout])),
    costs("What its gathers, its gradient and its update cost", card.terms),
  ];
}

function storedOf(title: string, stored: Record<Role, Stored>): HTMLElement {
  return table(title, ["", "how", "bytes on each device"], Object.entries(stored).map(([role, own]) => [role, own.words, bytes(own.bytes)]));
}

function alikeOf(names: string[]): string {
  return names.length > 1 ? `, as ${names.length - 1} more` : "";
}

function costs(title: string, terms: Term[]): HTMLElement {
  return table(
    title,
    ["term", "forward", "backward", "a step", "bytes sent or moved"],
    terms.map((term) => [
      `${term.what}${term.of ? ` of ${term.of}` : ""}${term.axes.length ? ` over ${term.axes.join(", ")}` : ""}${term.level ? ` (${term.level})` : ""}`,
      seconds(term.forward_s),
      seconds(term.backward_s),
      seconds(term.step_s),
      term.bytes ? bytes(term.bytes) : "",
    ]),
  );
}

function tensorOf(tensor: Tensor, title: string): HTMLElement {
  return details(title, h("p", {}, liesAs(tensor)), gridOf(tensor.grid, tensor.name));
}

function liesAs(tensor: Tensor): string {
  const partial = tensor.partial.length ? `; partial over ${tensor.partial.join(", ")}` : "";
  return `${tensor.dtype}[${tensor.shape.join(", ")}] lies as ${tensor.layout}, [${tensor.local_shape.join(", ")}] on each device${partial}`;
}

/** Which devices hold which slice. */
export function gridOf(grid: Grid, name: string): HTMLElement {
  const rows: Cell[][] = grid.rows.map((row, index) => [row, ...grid.devices[index]!]);
  const head = grid.columns.length ? grid.columns : ["devices"];
  return table(`Devices that hold each slice of ${name}`, ["slice", ...head], rows);
}
