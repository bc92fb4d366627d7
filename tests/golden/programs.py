"""What the golden files hold: small zoo models as graphs, and as the programs of a few plans."""

from dataclasses import replace
from typing import Any

from parloom import zoo
from parloom.capture import capture
from parloom.codegen.source import generate
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import resolve_cluster
from parloom.ir.graph import Call, Graph
from parloom.ir.lower import lower
from parloom.ir.plan import ActivationDecision
from parloom.ir.text import print_graph

CLUSTER = "2x2xH100"
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"batch": 8, "seq": 12, "vocab": 24, "width": 24, "depth": 2, "heads": 6},
    "llama": {
        "batch": 8, "seq": 12, "vocab": 24, "width": 24, "depth": 2, "heads": 4, "groups": 2,
        "inner": 36,
    },
    "cnn": {"batch": 8, "channels": 6, "depth": 2, "classes": 12, "image": 12},
}  # fmt: skip
# file name -> (model, method, ordinal of the plan among those of the method, microbatches)
PLANS = {
    "gpt_data_parallel": ("gpt", "data_parallel", 0, 1),
    "gpt_megatron": ("gpt", "megatron", 0, 1),
    "gpt_megatron_recomputed_values": ("gpt", "megatron", 0, 1),
    "gpt_fsdp_two_microbatches": ("gpt", "fsdp", 0, 2),
    "llama_megatron": ("llama", "megatron", 0, 1),
    "cnn_data_parallel": ("cnn", "data_parallel", 0, 1),
}
# file name -> operators of every block that are recomputed
VALUES = {
    "gpt_megatron_recomputed_values": ("attention:scaled_dot_product_attention#0", ":gelu#0"),
}


def texts() -> dict[str, str]:
    """File name -> content of every golden file."""
    graphs = {name: _graph(name) for name in SIZES}
    found = {f"{name}.graph": print_graph(graph) for name, graph in graphs.items()}
    for file, (name, method, ordinal, microbatches) in PLANS.items():
        values = VALUES.get(file, ())
        found[f"{file}.py"] = _source(graphs[name], method, ordinal, microbatches, values)
    return found


def _graph(name: str) -> Graph:
    sizes = dict(SIZES[name])
    module, batch = zoo.build(name, batch=sizes.pop("batch"), seq=sizes.pop("seq", None), **sizes)
    return capture(module, batch)


def _source(
    graph: Graph, method: str, ordinal: int, microbatches: int, values: tuple[str, ...]
) -> str:
    cluster = resolve_cluster(CLUSTER).cluster
    plan = list(METHODS[method](graph, cluster, microbatches, 0))[ordinal]
    if values:
        calls = (item.prefix for item in graph.main.body if isinstance(item, Call))
        lists = tuple(ActivationDecision(prefix, "recompute", values) for prefix in calls)
        plan = replace(plan, activations=lists)
    return generate(lower(graph, plan), f"{graph.name}: {method} on {CLUSTER}.")
