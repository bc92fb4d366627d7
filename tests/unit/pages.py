"""Plans on a page, without files and torch."""

from collections.abc import Mapping

from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.cost.timeline import Timeline
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.report.case import Case, PipelineCase
from parloom.report.page.document import Document, report_document
from parloom.report.page.sides import Side
from tests.unit.explained import ADAM, case_of

CLUSTER = load_cluster("2x4xV100")


def side_of(
    graph: Graph,
    plan: Decisions,
    others: Mapping[str, Case | PipelineCase] = {},
    cluster: Cluster = CLUSTER,
    path: str = "plan.json",
) -> Side:
    """A plan of one stage, as `parloom.reporting` has it."""

    def play(pcg: PCG, decisions: Decisions) -> Timeline:
        return simulate(pcg, cluster, decisions, ADAM)

    return Side(path, case_of(graph, cluster, plan), play, others)


def document_of(*sides: Side) -> Document:
    return report_document(sides, lambda text: None)
