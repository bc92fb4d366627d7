type Child = Node | string | null;
type Attributes = Record<string, string | boolean | ((event: Event) => void)>;

/** An element; texts become text nodes, so that names of a model are never markup. */
export function h(tag: string, attributes: Attributes = {}, ...children: Child[]): HTMLElement {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child): child is Node | string => child !== null));
  return element;
}

export type Cell = string | Node | { value: string; share: number };

/** A table; numbers are cells with a bar of their share behind them. */
export function table(caption: string, head: string[], rows: Cell[][]): HTMLElement {
  if (!rows.length) return h("p", { class: "dim" }, `${caption}: none.`);
  const body = rows.map((row) =>
    h("tr", {}, ...row.map((cell, index) => tableCell(cell, index === 0))),
  );
  const titles = h("tr", {}, ...head.map((title) => h("th", { scope: "col" }, title)));
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption), h("thead", {}, titles), h("tbody", {}, ...body)),
  );
}

function tableCell(cell: Cell, isFirst: boolean): HTMLElement {
  const attributes: Attributes = isFirst ? { scope: "row" } : {};
  const tag = isFirst ? "th" : "td";
  if (typeof cell === "string" || cell instanceof Node) return h(tag, attributes, cell);
  const found = h(tag, { ...attributes, class: "bar" }, cell.value);
  found.style.setProperty("--share", `${(100 * Math.min(1, Math.max(0, cell.share))).toFixed(1)}%`);
  return found;
}

/** A list of lines. */
export function list(lines: string[]): HTMLElement {
  return h("ul", {}, ...lines.map((line) => h("li", {}, line.replaceAll(" -> ", " \u2192\u00a0"))));
}

/** Something that opens on demand. */
export function details(title: string, ...children: Child[]): HTMLElement {
  return h("details", {}, h("summary", {}, title), ...children);
}

/** A labeled choice; `choose` is called with the number of the chosen option. */
export function choice(
  label: string,
  options: string[],
  choose: (index: number) => void,
): HTMLElement {
  const select = h(
    "select",
    { change: (event) => choose(Number((event.target as HTMLSelectElement).value)) },
    ...options.map((option, index) => h("option", { value: String(index) }, option)),
  );
  return h("label", { class: "choice" }, `${label} `, select);
}
