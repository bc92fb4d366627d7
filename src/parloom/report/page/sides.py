"""A plan on a page: its step, and the programs of its stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parloom.cost.timeline import Timeline
from parloom.ir.graph import Graph
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph
from parloom.report.case import Case, PipelineCase
from parloom.rewrite.rewrites import rewritten
from parloom.search.runner_up import Play

Document = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """`step` is of the plan at `path`; `play` simulates other plans of its graph, of one stage.

    `others` are plans of the same question by name, which it is compared with; `observed` is a step
    of a run and its number; `front` is what was planned beside it on other clusters and parts of
    them (`report.fronts`). A plan that `is_file` may be run by its path.
    """

    path: str
    step: Case | PipelineCase
    play: Play
    others: Mapping[str, Case | PipelineCase]
    observed: tuple[int, Timeline] | None = None
    front: Document | None = None
    is_file: bool = False

    @property
    def plan(self) -> Plan:
        return self.step.plan

    def cases(self) -> Sequence[Case]:
        """Each of its stages."""
        if isinstance(self.step, PipelineCase):
            return [self.step.stage(index) for index in range(len(self.plan.decisions.stages))]
        return [self.step]

    def graph(self) -> Graph:
        """As it is computed."""
        return rewritten(parse_graph(self.plan.graph), self.plan.decisions.rewrites)
