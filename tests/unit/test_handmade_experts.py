"""Plans by hand for mixtures of experts: what is divided, and what moves."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import Program, program
from parloom.cost.clusters import load_cluster
from parloom.cost.step import priced
from parloom.errors import InputError
from parloom.ir.graph import Graph
from parloom.ir.pcg import Movement
from parloom.ir.plan import Optimizer
from parloom.ir.repeat import repeated, stage

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = {"seq": 8, "width": 32, "heads": 4, "groups": 2, "head_width": 16, "expert_inner": 24,
         "experts": 8, "slots": 2, "shared": 0}  # fmt: skip
DEPTH = 3
EXPERTS = DEPTH * 8 * 3 * 24 * 32
NORMS = (2 * DEPTH + 1) * 32
OTHERS = 2 * 64 * 32 + DEPTH * (2 * 4 * 16 * 32 + 2 * 2 * 16 * 32 + 8 * 32) + NORMS
PLAIN = Configuration(master_dtype=None)


@pytest.fixture(scope="module")
def graph() -> Iterator[Graph]:
    sys.path.insert(0, str(BENCHMARKS))
    models = import_module("published_models")
    shape = models.Shape("moe", tuple(SIZES.items()), "bfloat16")
    yield repeated(models.captured(shape, 16, 64), DEPTH)
    sys.path.remove(str(BENCHMARKS))


def built(graph: Graph, chosen: Configuration) -> Program:
    return program(graph, chosen, load_cluster(f"{chosen.ranks}xA100"))


def stored(found: Program) -> dict[str, int]:
    """Elements of weights, gradients and optimizer states of a rank."""
    own = load_cluster(f"{found.chosen.ranks}xA100")
    part = priced(found.lowered[0], own, found.parts[0].decisions, Optimizer("adamw", 2))
    return {name: size // 2 for name, size in part.parameters.stored_bytes().items()}


def moves(found: Program) -> set[tuple[str, tuple[str, ...]]]:
    """(row of the table of adjoints, axes) of all movements of blocks."""
    return {
        (item.step.row, item.step.axes)
        for function in found.lowered[0].functions
        for item in function.body
        if isinstance(item, Movement)
    }


def test_experts_are_divided_and_the_rest_is_not(graph: Graph) -> None:
    whole = stored(built(graph, replace(PLAIN, data=4, num_microbatches=4)))
    assert whole["weights"] == EXPERTS + OTHERS
    divided = stored(built(graph, replace(PLAIN, data=4, expert=4, num_microbatches=4)))
    assert divided["weights"] == EXPERTS // 4 + OTHERS
    both = replace(PLAIN, data=8, expert=4, zero=1, num_microbatches=2)
    # Two ranks have the same experts, eight the same of the rest.
    assert stored(built(graph, both))["optimizer"] == 2 * (EXPERTS // 4 // 2 + OTHERS // 8)


def experts(found: Program) -> dict[str, tuple[str, ...]]:
    """Where the first mixture is."""
    (node, *_) = (n for n in found.parts[0].decisions.nodes if "experts" in n.key and ":p" in n.key)
    return dict(node.factors)


def test_tokens_travel_to_experts_and_back(graph: Graph) -> None:
    """No movement beside the route, on the axis of which experts and tokens are."""
    found = built(graph, replace(PLAIN, data=8, expert=4, num_microbatches=2))
    assert experts(found) == {"e": ("expert",), "t00": ("data", "expert")}
    assert not moves(found)


def test_tokens_travel_over_the_tensor_axis_where_positions_lie_there(graph: Graph) -> None:
    chosen = replace(PLAIN, tensor=2, data=2, expert=4, num_microbatches=8)
    along = built(graph, replace(chosen, sequence_parallel=True))
    assert experts(along) == {
        "e": ("expert", "tensor"), "t00": ("expert",), "t01": ("tensor",)
    }  # fmt: skip
    whole = built(graph, chosen)
    assert experts(whole) == {"e": ("expert", "tensor"), "t00": ("expert",)}
    fewer = built(graph, replace(chosen, expert=2, sequence_parallel=True))
    assert experts(fewer) == {"e": ("expert", "tensor"), "t00": ("expert",)}
    # Tokens are gathered over the tensor axis alone, and go back to where they were.
    assert {row for row, axes in moves(fewer) if "tensor" in axes} >= {"combine", "reduce_scatter"}
    assert not {row for row, axes in moves(fewer) if "expert" in axes}


def test_experts_over_data_and_tensor_ranks(graph: Graph) -> None:
    chosen = replace(PLAIN, tensor=2, data=2, expert=4, num_microbatches=8, sequence_parallel=True)
    found = built(graph, chosen)
    assert stored(found)["weights"] == EXPERTS // 4 + (OTHERS - NORMS - DEPTH * 8 * 32) // 2 + (
        NORMS + DEPTH * 8 * 32
    )
    assert found.play(load_cluster("4xA100")).step_s > 0
    alone = built(graph, replace(chosen, data=1, expert=2, num_microbatches=16))
    assert stored(alone)["weights"] == stored(found)["weights"] + EXPERTS // 4


def test_experts_in_a_pipeline(graph: Graph) -> None:
    chosen = replace(PLAIN, data=2, expert=2, pipeline=3, num_microbatches=8)
    played = program(graph, chosen, load_cluster("6xA100")).play(load_cluster("6xA100"))
    assert len(played.processes) == 3


def test_a_stage_without_blocks_hands_on_what_depends_on_weights(graph: Graph) -> None:
    """Tables of positions are computed in every stage."""
    first, rest = stage(graph, range(0), (True, False)), stage(graph, range(1), (False, False))
    ((name, _),) = first.outputs
    assert [i.target for i in rest.of_kind("batch")] == [name]
    assert len([i for i in first.inputs if i.kind == "parameter"]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": 4, "expert": 3}, "of which 3 share the experts"),
        ({"data": 2, "tensor": 2, "expert": 3}, "neither a part of the 2"),
        ({"data": 8, "expert": 4, "shard": 2}, "ZeRO over 2"),
        ({"data": 16, "expert": 16}, "do not divide over 16"),
    ],
)
def test_what_does_not_divide_is_refused(
    graph: Graph, changes: dict[str, int], message: str
) -> None:
    chosen = Configuration(master_dtype=None, **changes)  # type: ignore[arg-type]
    batch = replace(chosen, num_microbatches=16 // chosen.data)
    with pytest.raises(InputError, match=message):
        built(graph, batch)
