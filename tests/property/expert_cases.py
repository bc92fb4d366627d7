"""Example calls of mixtures of experts and their parts.

Rows of the parts lie in other operators' layouts here, which only even routing allows: every token
goes to every expert once. The whole operator is given any routing, one that leaves experts without
a token included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parloom.ir.graph import Dtype
from tests.property.operator_cases import Case, Operand, case, index, real

TOKENS, EXPERTS = 12, 6
PAIRS = TOKENS * EXPERTS
DOUBLE = Dtype("float64")


@dataclass(frozen=True, eq=False)
class Given(Operand):
    """An integer operand with these values."""

    values: Callable[[], Tensor] = lambda: torch.zeros(0)

    def draw(self, generator: torch.Generator) -> Tensor:
        return self.values()


def given(values: Callable[[], Tensor]) -> Operand:
    shape = tuple(values().shape)
    return Given(shape, role="batch", dtype="int64", values=values)


def _everywhere() -> Tensor:
    """Every token to every expert, in slots of any order."""
    generator = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(TOKENS)])


def _places() -> Tensor:
    pairs = torch.arange(PAIRS).view(TOKENS, EXPERTS)
    return (_everywhere() * PAIRS + pairs).flatten().sort().values


def _dispatch(tokens: Tensor, ids: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    places = _places()
    return tokens[places % PAIRS // ids.shape[1]], places


def _grouped_mm(
    rows: Tensor, matrices: Tensor, places: Tensor, experts: Tensor, pairs: int
) -> Tensor:
    return torch.einsum("rk,rkn->rn", rows, matrices[places // pairs])


def _expert_rows(table: Tensor, places: Tensor, experts: Tensor, pairs: int) -> Tensor:
    return table[places // pairs]


def _collect(rows: Tensor, places: Tensor, weights: Tensor, ids: Tensor, experts: Tensor) -> Tensor:
    pair = places % PAIRS
    weighted = rows * weights.flatten()[pair].unsqueeze(1)
    total = rows.new_zeros(len(weights), rows.shape[1])
    return total.index_add(0, pair // weights.shape[1], weighted)


def _step(op: str, *args: Any, to: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    return (op, args, (), ((to, DOUBLE, shape),))


def gated(pairs: int) -> tuple[Any, ...]:
    """A gated unit: `$0` is [expert, 2 x 12, 4], `$1` [expert, 6, 12], as libraries store them."""
    halves = (("gate", DOUBLE, (pairs, 12)), ("up", DOUBLE, (pairs, 12)))
    return (
        _step("transpose", "$0", 1, 2, to="first", shape=(EXPERTS, 4, 24)),
        _step("parloom.grouped_mm", "$rows", "$first", to="both", shape=(pairs, 24)),
        ("split", ("$both", 12, -1), (), halves),
        _step("silu", "$gate", to="active", shape=(pairs, 12)),
        _step("mul", "$active", "$up", to="inner", shape=(pairs, 12)),
        _step("transpose", "$1", 1, 2, to="second", shape=(EXPERTS, 12, 6)),
        _step("parloom.grouped_mm", "$inner", "$second", to="out", shape=(pairs, 6)),
    )


def biased(pairs: int) -> tuple[Any, ...]:
    """Plain matrices `$0`, `$2` with biases `$1`, `$3`, and a norm with one weight `$4`."""
    return (
        _step("parloom.grouped_mm", "$rows", "$0", to="product", shape=(pairs, 12)),
        _step("parloom.expert_rows", "$1", to="bias", shape=(pairs, 12)),
        _step("add", "$product", "$bias", to="sum", shape=(pairs, 12)),
        _step("tanh", "$sum", to="inner", shape=(pairs, 12)),
        _step("parloom.grouped_mm", "$inner", "$2", to="back", shape=(pairs, 6)),
        _step("parloom.expert_rows", "$3", to="shift", shape=(pairs, 6)),
        _step("add", "$back", "$shift", to="shifted", shape=(pairs, 6)),
        _step("mean", "$shifted", (-1,), True, to="mean", shape=(pairs, 1)),
        _step("sub", "$shifted", "$mean", to="centred", shape=(pairs, 6)),
        _step("mul", "$centred", "$4", to="out", shape=(pairs, 6)),
    )


def cases() -> list[Case]:
    ids, places = given(_everywhere), given(_places)
    experts = given(lambda: torch.arange(EXPERTS))
    rows, weights = real(PAIRS, 4), real(TOKENS, EXPERTS)
    matrices, tokens = real(EXPERTS, 4, 6), real(TOKENS, 4)
    gate, table = (real(EXPERTS, 24, 4), real(EXPERTS, 6, 12)), real(EXPERTS, 6)
    two, one = real(TOKENS, 2), real(TOKENS, 1)
    biases = (real(EXPERTS, 4, 12), real(EXPERTS, 12), real(EXPERTS, 12, 6), table, real(6))
    name = "parloom.experts"
    return [
        replace(case("parloom.dispatch", tokens, ids, experts), oracle=_dispatch),
        replace(
            case("parloom.grouped_mm", rows, matrices, places, experts, PAIRS), oracle=_grouped_mm
        ),
        replace(
            case("parloom.expert_rows", table, places, experts, PAIRS), oracle=_expert_rows
        ),
        replace(case("parloom.collect", rows, places, weights, ids, experts), oracle=_collect),
        case(name, tokens, index(EXPERTS, TOKENS, 2), two, experts, gate, gated(2 * TOKENS)),
        case(name, tokens, index(2, TOKENS, 2), two, experts, gate, gated(2 * TOKENS),
             label="idle"),
        case(name, tokens, index(EXPERTS, TOKENS, 1), one, experts, biases, biased(TOKENS),
             label="bias"),
    ]  # fmt: skip
