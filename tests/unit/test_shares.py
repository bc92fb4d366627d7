"""What operators cost adds up to what the step computes, and movements belong to their readers."""

from dataclasses import replace

import pytest

from parloom.comparators.baselines import fsdp, megatron, random_plans
from parloom.cost.clusters import load_cluster
from parloom.cost.ledger import AGAIN, COMPUTING, COPYING, WAITING, ledger
from parloom.cost.shares import parameter_terms, runs, shares, work_ps
from parloom.cost.simulate import simulate
from parloom.cost.step import priced
from parloom.cost.tasks import picoseconds
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import Movement
from parloom.ir.plan import ActivationDecision, Decisions, Optimizer
from parloom.ir.step_program import EACH_MICROBATCH, EACH_PASS
from tests.unit.graphs import stack
from tests.unit.test_simulate import DEPTH, chunked, model

ADAM = Optimizer("adamw", 2)


def check(graph: Graph, cluster: Cluster, plan: Decisions) -> None:
    pcg = lower(graph, plan)
    found = priced(pcg, cluster, plan, ADAM)
    read = ledger(simulate(pcg, cluster, plan, ADAM), pcg, cluster)
    times = runs(pcg)
    computed = sent = 0
    for name, items in shares(pcg, found.walker).items():
        for share in items:
            whole = times[name].ps(share)
            exchanges = [
                0 if w is None or w.exchange is None else picoseconds(w.exchange.seconds)
                for w in (share.forward, share.backward)
            ]
            passes = times[name].forward + times[name].again_of(share), times[name].forward
            part = sum(a * b for a, b in zip(passes, exchanges, strict=True))
            sent, computed = sent + part, computed + whole - part
    causes = read.by_cause()
    assert computed == sum(ps for c, ps in causes.items() if c.what in (COMPUTING, AGAIN, COPYING))
    waited = sum(
        ps
        for cause, ps in causes.items()
        if cause.what == WAITING and cause.transfer.startswith("activations")
    )
    assert waited >= sent  # links are shared with what goes on beside


@pytest.mark.parametrize("count", [1, 4])
def test_operators_add_up_to_what_is_computed(count: int) -> None:
    cluster = load_cluster("2x4xH100")
    again = tuple(ActivationDecision(str(i), "recompute") for i in range(0, DEPTH, 2))
    check(model(), cluster, chunked(cluster, num_microbatches=count, activations=again))
    for plan in (*megatron(stack(3), cluster), *fsdp(stack(3), cluster)):
        check(stack(3), cluster, plan)
    for seed in range(3):
        check(stack(2), cluster, next(random_plans(stack(2), cluster, seed=seed)))


def test_movements_belong_to_the_operator_that_they_are_made_for() -> None:
    cluster = load_cluster("2x4xH100")
    plan = next(p for p in megatron(stack(2), cluster) if p.mesh["tensor"].size == 4)
    pcg = lower(stack(2), plan)
    found = shares(pcg, priced(pcg, cluster, plan, ADAM).walker)
    moves = {
        (share.key, share.item.step.row): share
        for share in found["block"]
        if isinstance(share.item, Movement)
    }
    reduce = moves[":add#0", "reduce"]
    assert reduce.roots == ("out",)  # the partial sums of `down`, made whole for the skip
    assert reduce.forward_ps > 0 == reduce.backward_ps
    copied = moves["up:linear#0", "replicate"]
    assert copied.backward_ps > 0 == copied.forward_ps
    assert work_ps(None) == 0


def test_terms_of_a_parameter() -> None:
    cluster = load_cluster("2x4xH100")
    for level, wanted in (
        (0, ["reduce the gradient: all_reduce", "update"]),
        (
            1,
            [
                "reduce the gradient: reduce_scatter",
                "gather the updated weight: all_gather",
                "update",
            ],
        ),
        (3, ["gather the weight: all_gather", "reduce the gradient: reduce_scatter", "update"]),
    ):
        plan = chunked(cluster, level=level)
        pcg = lower(model(), plan)
        found = priced(pcg, cluster, plan, ADAM)
        terms = list(parameter_terms(found, pcg.parameters[0]))
        assert [term.name for term in terms] == wanted
        assert all(term.ps > 0 for term in terms)
    # The last unit stays whole between the passes, the others are gathered again.
    first, last = (next(parameter_terms(found, p)) for p in (pcg.parameters[0], pcg.parameters[-1]))
    assert (first.when, last.when) == (EACH_PASS, EACH_MICROBATCH)
    frozen = replace(pcg.parameters[0], input=replace(pcg.parameters[0].input, trainable=False))
    assert [term.name for term in parameter_terms(found, frozen)][-1] != "update"
