"""Products of one operand with several weights, as one product.

`parloom.linears(x, (w, v), (b, c))` has the results of `linear(x, w, b)` and `linear(x, v, c)`,
`parloom.convs(x, (w, v), biases, stride, padding, dilation)` those of convolutions.
"""

from dataclasses import dataclass
from math import gcd

from parloom.ir.ops.opdef import Emission, SavedTensors
from parloom.ir.ops.rule import WHOLE, Site

LINEARS, CONVS = "parloom.linears", "parloom.convs"
WEIGHTS, BIASES = 1, 2
JOINS = (WEIGHTS, BIASES)
NAMES = {WEIGHTS: "weights", BIASES: "biases"}


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Rows of all weights, cut alike: in as many `parts` (factors "n r0") as there are in each."""

    sizes: dict[str, int]
    parts: tuple[str, ...]
    biases: tuple[list[str], ...]
    kinds: dict[str, str]
    added: tuple[int, ...]


def joined_rows(site: Site) -> JoinedRows:
    """How the outputs are cut."""
    count = num_weights(site)
    rows = [weight.shape[0] for weight in site.operands[1 : 1 + count]]
    common = gcd(*rows)
    parts = tuple(f"n r{i}" for i in range(count))
    sizes = {"n": common} | {f"r{i}": size // common for i, size in enumerate(rows)}
    biases = tuple([part] for part in parts[: len(site.operands) - 1 - count])
    added = tuple(range(1 + count, len(site.operands)))
    return JoinedRows(sizes, parts, biases, {f"r{i}": WHOLE for i in range(count)}, added)


def num_weights(site: Site) -> int:
    """How many weights there are."""
    weights = site.arg(1)
    assert isinstance(weights, tuple)
    return len(weights)


def joined_biases(e: Emission) -> str:
    """Code of the biases; in a partial sum each counts once."""
    biases = e.site.arg(2)
    return f"({', '.join(map(e.once, biases))},)" if isinstance(biases, tuple) else "None"


def in_place(e: Emission) -> str:
    """Code that says what is read where it lies."""
    found = tuple(NAMES[position] for position in e.adjacent)
    return f", in_place={found!r}" if found else ""


def joined_saves(site: Site) -> SavedTensors:
    """The operand and all weights."""
    return tuple(("operand", i) for i in range(1 + num_weights(site)))
