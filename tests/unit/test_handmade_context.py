"""Plans by hand with context parallelism: what the tensor axis and the context axis divide."""

from functools import lru_cache
from typing import Any

import pytest
import torch

from parloom import zoo
from parloom.capture import capture
from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import Program, program
from parloom.cost.clusters import load_cluster
from parloom.ir.graph import Graph
from parloom.ir.layout import digits

CLUSTER = load_cluster("1x8xA100")
SIZES = {"batch": 2, "seq": 4096, "width": 1024, "depth": 1, "heads": 8, "vocab": 4096}
TENSOR, CONTEXT = ("tensor",), ("context",)


@lru_cache
def graph(name: str, **sizes: Any) -> Graph:
    with torch.device("meta"):
        return capture(*zoo.build(name, **{**SIZES, **sizes}))


def built(name: str, *, sequence_parallel: bool = False, **sizes: Any) -> Program:
    chosen = Configuration(4, context=2, num_microbatches=2, sequence_parallel=sequence_parallel)
    return program(graph(name, **sizes), chosen, CLUSTER)


def axes_of(found: Program, key: str) -> dict[str, tuple[str, ...]]:
    """Factor -> axes of an operator, without digits that cut a factor."""
    node = next(n for n in found.parts[0].decisions.nodes if n.key == key)
    return {factor.rstrip("0123456789") or factor: axes for factor, axes in node.factors}


@pytest.mark.sample(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("name", "columns", "rows"),
    [
        ("gpt", ("attention.qkv", "up"), ("attention.out", "down")),
        ("llama", ("attention.q", "attention.k", "attention.v", "gate", "up"),
         ("attention.out", "down")),
    ],
)  # fmt: skip
def test_heads_over_tensor_and_positions_over_context(
    name: str, columns: tuple[str, ...], rows: tuple[str, ...], sequence_parallel: bool
) -> None:
    found = built(name, sequence_parallel=sequence_parallel)
    for module in columns:
        assert axes_of(found, f"blocks.0.{module}:linear#0") == {"d": CONTEXT, "n": TENSOR}, module
    for module in rows:
        assert axes_of(found, f"blocks.0.{module}:linear#0") == {"d": CONTEXT, "k": TENSOR}, module
    assert axes_of(found, "blocks.0.attention:scaled_dot_product_attention#0") == {
        "d": TENSOR, "s": CONTEXT,
    }  # fmt: skip
    assert axes_of(found, "head:linear#0") == {"d": CONTEXT, "n": TENSOR}
    assert axes_of(found, ":cross_entropy_loss#0")["c"] == TENSOR


def test_layouts_of_weights() -> None:
    """A rank has a quarter of each weight, its own heads, its own classes; positions cut none."""
    found = built("gpt").lowered[0]
    layouts = {p.input.target: p for p in found.parameters}

    def cut(target: str) -> tuple[tuple[int | str, ...], ...]:
        entry = layouts[target]
        shape = entry.input.value.spec.shape
        return tuple(digits(entry.layout, d, n, found.mesh) for d, n in enumerate(shape))

    assert cut("blocks.0.attention.qkv.weight") == ((3, "tensor", 256), (1024,))
    assert cut("blocks.0.attention.out.weight") == ((1024,), ("tensor", 256))
    assert cut("blocks.0.up.weight") == (("tensor", 1024), (1024,))
    assert cut("blocks.0.down.weight") == ((1024,), ("tensor", 1024))
    assert cut("tokens.weight") == (("tensor", 1024), (1024,))
    assert all(p.reduce == CONTEXT for p in found.parameters if p.layout.axes)


def test_grouped_key_heads() -> None:
    """Four ranks share four key heads; with two of them keys are whole and queries are not cut."""
    attention = "blocks.0.attention:scaled_dot_product_attention#0"
    assert axes_of(built("llama", groups=4), attention) == {"d": TENSOR, "s": CONTEXT}
    # Negative control: a cut that attention cannot take is not made.
    assert axes_of(built("llama", heads=2, groups=2), attention) == {"s": CONTEXT}


@pytest.mark.parametrize(("name", "sizes"), [("gpt", {}), ("llama", {"groups": 8})])
def test_a_step_takes_about_as_long_as_with_tensor_parallelism_alone(
    name: str, sizes: dict[str, Any]
) -> None:
    """Both divide all products by eight; a plan that replicates some takes twice as long."""
    alone = program(graph(name, **sizes), Configuration(8, num_microbatches=2), CLUSTER)
    ratio = built(name, **sizes).play(CLUSTER).step_s / alone.play(CLUSTER).step_s
    assert 0.4 < ratio < 1.5
