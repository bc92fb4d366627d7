import type { Plan, Rewrite } from "../data";
import { h, table, type Cell } from "../dom";
import { bytes, seconds } from "../format";

function savedWords(found: Rewrite): string {
  if (found.reason !== null) return `It ${found.reason}.`;
  const less = (value: number, text: string, what: string): string[] => (value ? [`${text} ${value > 0 ? "less" : "more"} ${what}`] : []);
  const saved = [
    ...less(found.saved_s, seconds(Math.abs(found.saved_s)), "a step"),
    ...less(found.saved_sent_bytes, bytes(Math.abs(found.saved_sent_bytes)), "sent"),
    ...less(found.saved_peak_bytes, bytes(Math.abs(found.saved_peak_bytes)), "at the peak"),
  ];
  return `Against the plan without it: ${saved.join(", ") || "no difference"}.`;
}

/** Rewrites and stages, where the plan has them. */
export function changes(plan: Plan): HTMLElement[] {
  const parts: HTMLElement[] = [];
  for (const found of plan.rewrites) {
    parts.push(
      h("h3", {}, found.where),
      h("p", {}, `By ${found.rules.join(", ")}; ${found.proof}. ${savedWords(found)}`),
      h("pre", { tabindex: "0" }, [...found.before.map((line) => `- ${line}`), ...found.after.map((line) => `+ ${line}`)].join("\n")),
    );
    if (found.stages.length) {
      const rows: Cell[][] = found.stages.map((own) => [own.name, seconds(own.saved_computing_s), bytes(own.saved_peak_bytes)]);
      parts.push(table(`Saved by stage: ${found.where}`, ["stage", "computing", "at its peak"], rows));
    }
    if (found.changed.length) parts.push(h("p", {}, `Without it, what else is not as in the plan: ${found.changed.join(", ")}.`));
  }
  if (plan.stages.length) {
    const rows: Cell[][] = plan.stages.map((stage, index) => [
      `stage ${index}`,
      stage.devices,
      stage.items.length ? `${stage.items[0]}${stage.items.length > 1 ? ` to ${stage.items[stage.items.length - 1]} (${stage.items.length} items)` : ""}` : "all",
      stage.microbatches.length ? stage.microbatches.join(", ") : "all",
      String(stage.at_once),
      stage.reads.map((index) => String(index)).join(", ") || "the batch alone",
    ]);
    parts.push(table("Stages", ["stage", "devices", "items", "microbatches", "at once", "reads from stages"], rows));
  }
  return parts;
}
