import { h, table, type Cell } from "../dom";

const WORDS: [string, string][] = [
  ["likely", "nine steps in ten were inside such a range when predictions of this source were compared with real steps"],
  ["axis", "a dimension of the mesh of devices (x, y, ...); it splits a dim of an operator, or devices along it do the same work"],
  ["samples, positions, output features, input features", "dims that an axis splits: of the batch, of the sequence, and of a weight"],
  ["[8/y·16032, 8192]", "a layout: the first dim is cut in 8 parts over axis y, of 16032 elements each; the second is whole"],
  ["stored in parts over x", "each device along x keeps one part between steps, and parts are gathered for use (ZeRO, FSDP)"],
  ["way", "how the axes split an operator; the next best ways have one operator changed and all else as it is"],
  ["movement", "a tensor goes from the layout in which it was made to the one in which it is read, by collectives or a local copy"],
  ["waiting for ...", "time in which a device computes nothing because it waits for this collective"],
  ["slower beside collectives", "kernels run longer while collectives use the same memory and processors"],
  ["recomputation", "results that are not kept but made again for the backward pass"],
  ["F0, B0, B last, W0", "forward pass, backward pass and gradients of weights of a microbatch; in the last backward pass gradients are sent"],
  ["REDUCE, STEP, GATHER", "gradients are made whole, the optimizer updates, updated weights are gathered"],
  ["mlp.gate_proj:linear#0", "the first linear operator that module mlp.gate_proj calls; :add#0 is called by the block itself"],
  ["block, call", "a module that the model has several times is one block with as many calls; operators are shown once for all of them"],
];

/** What the words of this page mean. */
export function words(): HTMLElement[] {
  const rows: Cell[][] = WORDS.map(([word, meaning]) => [h("b", {}, word), meaning]);
  return [table("In the order of the page", ["word", "meaning"], rows)];
}
