"""Recurrent layers: opaque over time and in the hidden state, parallel over the batch.

A step needs the whole hidden state of the step before, so the weights are whole, too.
"""

from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors, all_operands
from parloom.ir.ops.rule import WHOLE, Rule, Site, build, opaque

# Positions of arguments: (x, states, weights, biases, layers, p, train, both ways, batch first);
# where sequences are packed: (data, lengths, states, weights, ..).
_WEIGHTS, _BATCH_FIRST = 2, 8


def _weights(site: Site) -> int:
    """How many weight tensors there are; they are the last operands."""
    packed = isinstance(site.arg(_WEIGHTS + 1, "params"), tuple)
    given = site.arg(_WEIGHTS + packed, "params")
    return len(given) if isinstance(given, tuple) else 0


def _rule(site: Site) -> Rule:
    x = site.operands[0]
    if len(x.shape) != 3:  # packed sequences of different lengths
        return opaque(site)
    first = site.arg(_BATCH_FIRST, "batch_first", False) is True
    lead = ["b", "t"] if first else ["t", "b"]
    count = len(site.operands) - _weights(site)
    operands = [[*lead, "x"]]
    operands += [[f"l{k}", "b", f"h{k}"] for k in range(1, count)]
    operands += [[f"w{k}.{i}" for i in range(len(s.shape))]
                 for k, s in enumerate(site.operands[count:])]  # fmt: skip
    results = [[*lead, "y"], *([f"m{k}", "b", f"n{k}"] for k in range(1, len(site.results)))]
    kinds = {n: WHOLE for dims in (*operands, *results) for n in dims if n != "b"}
    return build(operands, results, site, kinds)


def _emit(e: Emission) -> str:
    return e.call(f"torch.{e.site.node.op}")


def _flops(site: Site, rule: Rule) -> float:
    """Each step multiplies every sequence's input or state by every weight matrix once."""
    x, count = site.operands[0], _weights(site)
    steps = x.num_elements // max(x.shape[-1], 1)
    matrices = [s for s in site.operands[len(site.operands) - count :] if len(s.shape) == 2]
    return 2.0 * steps * sum(s.num_elements for s in matrices)


def _saves(site: Site) -> SavedTensors:
    return (*all_operands(site), ("result", 0))


# What oneDNN keeps of every step, in widths of the state and of what is wider, input or state:
# measured over lengths of 16 and 32, 16 and 64 samples and widths of 64 to 256. What cuDNN reserves
# was not measured.
_KEPT = {"lstm": (9.5, 6.2), "gru": (7.0, 0.0), "rnn_tanh": (1.0, 0.0), "rnn_relu": (1.0, 0.0)}


def _own_bytes(site: Site, fused: bool) -> float:
    packed = isinstance(site.arg(_WEIGHTS + 1, "params"), tuple)
    layers = site.integer(4 + packed, "num_layers", 1)
    ways = 1 + (site.arg(7 + packed, "bidirectional", False) is True)
    state = max(1, site.results[0].shape[-1] // ways)
    own, wider = _KEPT[site.node.op]
    width = max(1.0, site.operands[0].shape[-1] / state)
    return site.results[0].num_bytes * layers * (own + wider * width)


OPS: tuple[OpDef, ...] = tuple(
    OpDef(n, _rule, _emit, _flops, 2.0, saved=_saves, own_bytes=_own_bytes)
    for n in ("lstm", "gru", "rnn_tanh", "rnn_relu")
)
