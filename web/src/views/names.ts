import type { ParameterCard, Plan } from "../data";
import { details, h, table } from "../dom";
import { bytes, count } from "../format";
import type { Selection } from "../select";

const SHOWN = 12;

/** Operators and parameters by a part of their names, in the words of the user's modules. */
export function finder(plan: Plan, selection: Selection): HTMLElement {
  const ids = new Map<string, string>();
  for (const [id, card] of Object.entries(plan.cards)) for (const name of card.alike) ids.set(name, id);
  const names = [...ids.keys()];
  const found = h("ul", { class: "found", "aria-live": "polite" });
  const input = h("input", { type: "search", placeholder: "lm_head", input: show }) as HTMLInputElement;
  function show(): void {
    const wanted = input.value.trim().toLowerCase();
    let near = wanted ? names.filter((name) => name.toLowerCase().includes(wanted)) : [];
    near.sort((a, b) => rank(a, wanted) - rank(b, wanted) || a.length - b.length);
    near = near.filter((name, index) => near.findIndex((other) => ids.get(other) === ids.get(name)) === index);
    const lines: (HTMLElement | string)[] = near.slice(0, SHOWN).map((name) =>
      h("button", { type: "button", class: "link", click: () => selection.select(ids.get(name)!) }, `${name}${like(plan, ids.get(name)!)}`),
    );
    if (near.length > SHOWN) lines.push(`${near.length - SHOWN} more`);
    if (wanted && near.length === 0) lines.push("no operator or parameter has this in its name");
    found.replaceChildren(...lines.map((line) => h("li", {}, line)));
  }
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") found.querySelector("button")?.click();
  });
  return h("div", { class: "finder" }, h("label", { class: "choice" }, "find an operator or a parameter ", input), found);
}

function like(plan: Plan, id: string): string {
  const others = plan.cards[id]!.alike.length - 1;
  return others > 0 ? ` and ${others} alike` : "";
}

/** Names that begin so come before those that only have it inside. */
function rank(name: string, wanted: string): number {
  return name.toLowerCase().startsWith(wanted) ? 0 : 1;
}

/** Where every parameter lives, those that are alike in one row. */
export function parameters(plan: Plan, selection: Selection): HTMLElement {
  const cards = Object.entries(plan.cards).filter((own): own is [string, ParameterCard] => own[1].kind === "parameter");
  const size = (card: ParameterCard) => card.shape.reduce((all, side) => all * side, 1) * card.alike.length;
  cards.sort((a, b) => size(b[1]) - size(a[1]));
  const rows = cards.map(([id, card]) => [
    h("button", { type: "button", class: "link", click: () => selection.select(id) }, card.name),
    card.alike.length > 1 ? `and ${card.alike.length - 1} more` : "",
    count(size(card)),
    card.layout,
    ...(["weight", "gradient", "optimizer"] as const).map((role) => `${card.stored[role].words}, ${bytes(card.stored[role].bytes)}`),
  ]);
  const head = ["parameter", "alike", "elements", "computed as", "weight", "gradient", "optimizer"];
  return details("Parameters: where they live", table("Parameters, the largest first; bytes of one on each device", head, rows));
}
