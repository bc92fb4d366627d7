"""Values of Unity's expressions at a degree, with no regard to devices: a second reading."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from published_rules import RELU, Tree

from parloom.rewrite.modular import PRIME, Ints, Numbers


@dataclass(frozen=True)
class Value:
    """The whole of a parallel tensor, and where it was concatenated along each dim."""

    array: Ints
    cuts: Mapping[int, int]


def value(
    tree: Tree, inputs: Mapping[str, Ints], degrees: Sequence[int], *, strided: bool
) -> Value:
    """What a tree computes, with no regard to devices: a partition and a combination are nothing.

    With `strided`, copies and terms of sums are `degree` neighbors, not chunks.
    """
    if isinstance(tree, str):
        return Value(inputs[tree], {})
    name, attributes, operands, result = tree
    found = [value(own, inputs, degrees, strided=strided) for own in operands]
    (x, *more), cuts = [own.array for own in found], found[0].cuts
    at = attributes[0] if attributes else 0
    if name in ("partition", "combine"):
        return found[0]
    if name == "replicate":
        made = np.repeat(x, degrees[at], at) if strided else np.concatenate([x] * degrees[at], at)
    elif name == "reduce":
        k, m = degrees[at], x.shape[at] // degrees[at]
        apart = x.reshape(*x.shape[:at], *((m, k) if strided else (k, m)), *x.shape[at + 1 :])
        made = apart.sum(at + 1 if strided else at) % PRIME
    elif name == "linear":
        made = _linear(x, more[0])
        made = Numbers().opaque("relu", made) if attributes == (RELU,) else made
    elif name == "relu":
        made = Numbers().opaque("relu", x)
    elif name == "concat":
        made, cuts = np.concatenate([x, *more], at), {**cuts, at: x.shape[at]}
    elif name == "split":
        made = np.split(x, [cuts[at] if at in cuts else x.shape[at] // 2], at)[result]
    else:
        made = (x + more[0] if name == "ew_add" else x * more[0]) % PRIME
    if name == "linear":  # the outputs of weights that were concatenated
        cuts = {d: own for d, own in ((1, cuts.get(1)), (2, found[1].cuts.get(1))) if own}
    return Value(made, cuts)


def _linear(x: Ints, weight: Ints) -> Ints:
    """Copy `i` of `x` with part `i` of the outputs of the weight, and the other way round."""
    (copies, samples, channels), (of_weight, outputs, _) = x.shape, weight.shape
    one = x.reshape(copies, of_weight, samples // of_weight, channels)
    other = weight.reshape(of_weight, copies, outputs // copies, channels)
    names = [["i", "j", "b", "c"], ["j", "i", "o", "c"]]
    made = Numbers().product(names, ["j", "b", "i", "o"], [one, other])
    return made.reshape(1, samples, outputs)
