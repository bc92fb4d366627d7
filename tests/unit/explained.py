"""Hand-made graphs with decisions as what is explained."""

from parloom.cost.measured import Source
from parloom.cost.simulate import simulate
from parloom.cost.step import priced
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Decisions, ModelSource, Optimizer, Plan
from parloom.ir.text import print_graph
from parloom.report.case import Case
from parloom.rewrite.rewrites import rewritten

ADAM = Optimizer("adamw", 2)


def case_of(graph: Graph, cluster: Cluster, plan: Decisions, method: str = "method") -> Case:
    """A case as `parloom.explain` makes it, without files and torch."""
    pcg = lower(rewritten(graph, plan.rewrites), plan)
    source = ModelSource("model.py:build", None, None, None)
    saved = Plan(source, cluster.name, "0" * 16, ADAM, method, plan, print_graph(graph))
    found = priced(pcg, cluster, plan, ADAM)
    played = simulate(pcg, cluster, plan, ADAM)
    return Case(saved, cluster, played, Source("spec", 0.25), pcg, found)
