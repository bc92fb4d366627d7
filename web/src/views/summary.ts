import type { Plan, Summary } from "../data";
import { details, h, list, table } from "../dom";
import { amount, bytes, cause, count, dollars, percent, picoseconds, plain, seconds } from "../format";

const SOURCES: Record<string, string> = {
  spec: "from data sheets, not calibrated",
  calibrated: "from rates that were measured",
};

const TIGHT = 0.97; // of the limit: contexts, NCCL's buffers and fragmentation are not counted
const LONG = 300; // letters of a command with a whole cluster inside

/** What was decided, in words, with the step, its band, money and memory. */
export function summary(plan: Plan): HTMLElement[] {
  const own = plan.summary;
  const facts: [string, string, string, boolean?][] = [
    ["step time", seconds(own.step_s), `likely ${seconds(own.band_s[0])} to ${seconds(own.band_s[1])}, ${SOURCES[own.source] ?? own.source}`],
    ["peak memory", bytes(own.peak_bytes), `of ${bytes(own.limit_bytes)} on each device (${percent(own.peak_bytes / own.limit_bytes)})`, own.peak_bytes > TIGHT * own.limit_bytes],
    ["devices", own.num_devices.toLocaleString("en-US"), `${own.devices}; ${own.cluster}`],
  ];
  if (own.bound_s !== null) {
    facts.push(["no plan is below", seconds(own.bound_s), own.gap === null ? "" : `the plan is ${percent(own.gap)} above this bound`]);
  }
  if (own.mfu !== null) {
    facts.push(["model FLOP utilization", percent(own.mfu), `${amount(own.model_flops, "FLOP")} of the model in a step, of the devices' peak`]);
  }
  if (own.price_per_step !== null && own.price_per_hour !== null) {
    facts.push(["price of a step", dollars(own.price_per_step), `at ${dollars(own.price_per_hour)} an hour for ${own.num_devices} device${own.num_devices > 1 ? "s" : ""}`]);
  }
  facts.push(pipeline(own));
  const { unit, in_step } = own.work;
  facts.push([`${unit}s a second`, plain(in_step / own.step_s), `${in_step.toLocaleString("en-US")} ${unit}s a step${unit !== "sample" ? `, ${own.samples} samples` : ""}`]);
  facts.push(["parameters", count(own.parameters), "of the model, counted once where they are shared"]);
  if (own.status !== "complete") facts.push(["search", own.status, "the best plan that was found until then; others may be faster", true]);
  const cards = facts.map(([name, value, more, isWarning]) =>
    h("div", { class: isWarning ? "fact warning" : "fact" }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("span", {}, more))),
  );
  const whole = own.step_s * 1e12;
  const parts: HTMLElement[] = [h("dl", { class: "facts" }, ...cards), h("h3", {}, "Decided"), list(plan.words)];
  if (plan.bound_by) parts.push(h("p", {}, `${plan.bound_by[0]!.toUpperCase()}${plan.bound_by.slice(1)}.`));
  parts.push(
    table(
      "Where the step goes",
      ["cause", "time", "share"],
      plan.causes.filter((row) => row.ps > 0).map((row) => [
        cause(row),
        picoseconds(row.ps),
        { value: percent(row.ps / whole), share: row.ps / whole },
      ]),
    ),
  );
  if (own.cost.length) parts.push(h("h3", {}, "Cost"), list(own.cost));
  if (plan.constraints.length) parts.push(h("h3", {}, "Asked for, and its price"), list(plan.constraints));
  if (plan.notes.length) parts.push(h("h3", {}, "Notes"), list(plan.notes));
  parts.push(h("h3", {}, "Assumed"), list(plan.assumptions), ...madeBy(plan));
  return parts;
}

function pipeline(own: Summary): [string, string, string] {
  const parts = `${own.num_microbatches} microbatch${own.num_microbatches > 1 ? "es" : ""} a step`;
  const each = `; a device works on ${own.at_once} of ${own.samples} samples at a time`;
  return own.num_stages > 1 ? ["pipeline", `${own.num_stages} stages`, `schedule ${own.schedule}, ${parts}${each}`] : ["pipeline", "none", `each device runs the whole model; ${parts}${each}`];
}

function madeBy(plan: Plan): HTMLElement[] {
  const { command, word, summary: own } = plan;
  const code = h("code", {}, command);
  const made = command.length > LONG ? details(`The command that made it with parloom ${own.parloom}, with its cluster`, code) : h("p", {}, `Made with parloom ${own.parloom} by `, code);
  return plan.is_file ? [made, h("p", {}, "To prove it and to train with it: ", h("code", {}, `parloom verify ${word}`), " and ", h("code", {}, `parloom run ${word} -- train.py`))] : [made];
}
