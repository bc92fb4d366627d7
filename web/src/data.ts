// The document that `parloom report` writes into the page (report/page/document.py).

export interface Cause {
  what: string;
  transfer: string;
  level: string;
}

export interface Difference extends Cause {
  plan_ps: number;
  versus_ps: number;
  difference_ps: number;
}

export interface Versus {
  headline: string;
  plan: { name: string; step_s: number; peak_bytes: number; words: string[]; fits: boolean };
  versus: { name: string; step_s: number; peak_bytes: number; words: string[]; fits: boolean };
  difference_ps: number;
  causes: Difference[];
  memory: { component: string; plan_bytes: number; versus_bytes: number; difference_bytes: number }[];
}

export interface GraphNode {
  key: string;
  module: string;
  op: string;
  function?: string;
  source: string;
  shape: string;
  own_s: number;
  moving_s: number;
  share: number;
  splits: Record<string, string>;
}

export interface GraphFunction {
  name: string;
  /** Of its operators; of a part of a large function that of the whole. */
  place: string;
  calls: number;
  first: string;
  nodes: GraphNode[];
  edges: [number, number][];
}

export interface Grid {
  rows: string[];
  columns: string[];
  devices: string[][];
}

export interface Tensor {
  from?: string;
  name: string;
  dtype: string;
  shape: number[];
  layout: string;
  local_shape: number[];
  partial: string[];
  grid: Grid;
}

export interface Term {
  what: string;
  of: string;
  axes: string[];
  level: string;
  bytes: number;
  forward_s: number;
  backward_s: number;
  step_s: number;
}

export interface RunnerUp {
  step_s: number;
  difference_ps: number;
  why: Difference;
  peak_bytes: number;
  fits: boolean;
  splits: Record<string, string>;
}

export interface OperatorCard {
  kind: "operator";
  name: string;
  op: string;
  source: string;
  place: string;
  alike: string[];
  runs_a_step: number;
  alike_s: number;
  splits: Record<string, string>;
  operands: Tensor[];
  results: Tensor[];
  flops: number;
  bound_by: string;
  weights: { name: string; stored: Record<Role, Stored> }[];
  terms: Term[];
  ways: number;
  ways_tried: number;
  runners_up: RunnerUp[];
}

export interface Stored {
  words: string;
  bytes: number;
  grid: Grid | null;
}

export type Role = "weight" | "gradient" | "optimizer";

export interface ParameterCard extends Tensor {
  kind: "parameter";
  place: string;
  trainable: boolean;
  alike: string[];
  partial_gradient: string[];
  stored: Record<Role, Stored>;
  readers: { name: string; layout: string }[];
  terms: Term[];
}

export type Card = OperatorCard | ParameterCard;

/** Start and length in picoseconds, numbers of the name and of the kind. */
export type SliceRow = [number, number, number, number];

export interface Track {
  name: string;
  slices: SliceRow[];
}

export interface Processes {
  name: string;
  tracks: Track[];
}

export interface Steps {
  step_ps: number;
  bound_ps: number;
  processes: Processes[];
  observed: { step: number; step_ps: number; processes: Processes[] } | null;
  words: string[];
}

export interface Memory {
  components: string[];
  during: { action: string; module: string; operator: string };
  step_s: number;
  processes: {
    name: string;
    peak_bytes: number;
    limit_bytes: number;
    at_peak: Record<string, number>;
    lines: number[][];
    largest: { component: string; name: string; count: number; bytes: number }[];
  }[];
  recomputed: Recomputed[];
  left_out: number;
}

/** Calls of a block kind that make the same again in their backward passes. */
export interface Recomputed {
  stage: number;
  place: string;
  calls: string;
  count: number;
  all: boolean;
  values: string[];
  moves: string[];
  of: number;
}

export interface Network {
  devices: string;
  levels: {
    name: string;
    size: number;
    fabric: string;
    bytes_per_s: number;
    oversubscription: number;
    busy_s: number;
    share: number;
  }[];
  parts: { device: string; levels: { name: string; size: number }[] }[];
  groups: {
    name: string;
    devices: [number, number];
    count: number;
    axes: { axis: string; size: number; levels: string[] }[];
  }[];
  collectives: {
    group: string;
    place: string;
    transfer: string;
    axes: string;
    level: string;
    count: number;
    bytes: number;
    s: number;
    waited_s: number;
  }[];
  traffic: { devices_a_row: number; bytes: number[][] };
}

export interface Summary {
  step_s: number;
  band_s: [number, number];
  source: string;
  bound_s: number | null;
  gap: number | null;
  peak_bytes: number;
  limit_bytes: number;
  devices: string;
  num_devices: number;
  cluster: string;
  method: string;
  num_microbatches: number;
  num_stages: number;
  schedule: string;
  price_per_hour: number | null;
  price_per_step: number | null;
  cost: string[];
  status: string;
  model_flops: number;
  mfu: number | null;
  work: { unit: string; in_step: number };
  samples: number;
  at_once: number;
  parameters: number;
  parloom: string;
}

/** The best plan on some devices of a cluster. */
export interface FrontRow {
  cluster: string;
  devices: string;
  name: string | null;
  step_s: number;
  mfu: number | null;
  peak_bytes: number;
  pareto: boolean;
  cost: { usd: number | null; days: number | null; usd_per_step: number | null; [per: string]: number | null };
}

export interface Front {
  unit: string;
  rows: FrontRow[];
  prices: { device: string; price_per_hour: number | null; price_source: string; price_date: string }[];
}

/** What a rewrite saves, or the reason why there is no such plan without it. */
type Saved =
  | { reason: null; saved_s: number; saved_sent_bytes: number; saved_peak_bytes: number }
  | { reason: string; saved_s: null; saved_sent_bytes: null; saved_peak_bytes: null };

export type Rewrite = Saved & {
  rules: string[];
  proof: string;
  where: string;
  before: string[];
  after: string[];
  stages: { name: string; saved_computing_s: number; saved_peak_bytes: number }[];
  changed: string[];
};

export interface Plan {
  path: string;
  is_file: boolean;
  /** The path as a shell takes it. */
  word: string;
  title: string;
  model: string;
  summary: Summary;
  words: string[];
  bound_by: string;
  constraints: string[];
  assumptions: string[];
  notes: string[];
  command: string;
  causes: (Cause & { ps: number })[];
  graph: { functions: GraphFunction[] };
  cards: Record<string, Card>;
  network: Network;
  steps: Steps;
  memory: Memory;
  alternatives: { name: string; step_s: number; peak_bytes: number; fits: boolean; is_plan: boolean }[];
  front: Front | null;
  why_not: Versus[];
  rewrites: Rewrite[];
  stages: { items: string[]; devices: string; microbatches: number[]; at_once: number; reads: number[] }[];
}

export interface Report {
  format: string;
  version: number;
  plans: Plan[];
  differences: Versus[];
}

/** The document of this page; throws an Error with a message for readers. */
export async function load(): Promise<Report> {
  if (typeof DecompressionStream === "undefined") {
    throw new Error(
      "This browser cannot unpack the data of this report: it has no DecompressionStream." +
        " Chrome 80, Edge 80, Safari 16.4, Firefox 113 and later ones have it.",
    );
  }
  const packed = JSON.parse(document.getElementById("data")!.textContent!) as { gzip: string };
  const bytes = Uint8Array.from(atob(packed.gzip), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text()) as Report;
}
