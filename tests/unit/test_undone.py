"""What a rewrite of a plan saves, whatever its stages: the plan beside it is one of the model as it
is, in the same stages, and as good as ways of single operators make it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest

from parloom.cost.clusters import load_cluster
from parloom.cost.stages import PricedStages, StagePlayer, simulate_stages
from parloom.cost.timeline import Timeline
from parloom.errors import LayoutError, VerifyError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower_stages import LoweredStages, group_lists, lower_stages
from parloom.ir.mesh import Mesh, grid
from parloom.ir.plan import Action, Decisions, NodeDecision, Stage
from parloom.ir.schedules import STEP
from parloom.ir.stages import stage_items
from parloom.ir.verify import verify_decisions, verify_pcg
from parloom.rewrite.horizontal import fusions
from parloom.rewrite.rewrites import rewritten
from parloom.search.cheaper import Played
from parloom.search.undone import Undoing, Undone
from tests.property.searched import every_assignment
from tests.unit.explained import ADAM
from tests.unit.graphs import graph, node

CLUSTER = load_cluster("1x4xV100")
PLENTY = 2**60


def towers(batch: int = 4096) -> Graph:
    """Two inputs through the same layers, and what is made of both."""
    wide, narrow = (batch, 512), (batch, 256)
    return graph(
        {"up": (512, 256), "down": (256, 512), "first": (256, 256), "head": (2, 256)},
        {"x": (narrow, "float32"), "y": (narrow, "float32")},
        *chain.from_iterable(
            (
                node("linear", own, "first", to=f"{own}0", shape=narrow, path="first", number=at),
                node("tanh", f"{own}0", to=f"{own}1", shape=narrow, path="first", number=at),
                node("linear", f"{own}1", "up", to=f"{own}2", shape=wide, path="up", number=at),
                node("relu", f"{own}2", to=f"{own}3", shape=wide, path="up", number=at),
                node("linear", f"{own}3", "down", to=f"{own}4", shape=narrow, path="d", number=at),
            )
            for at, own in enumerate("xy")
        ),
        node("mul", "x4", "y4", to="both", shape=narrow),
        node("linear", "both", "head", to="z", shape=(batch, 2), path="head"),
        node("sum", "z", to="loss", shape=()),
    )
