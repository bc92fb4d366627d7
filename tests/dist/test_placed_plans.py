"""Plans that lie in an order of devices: made, priced, saved, exported, and proved as they are."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from parloom import api, cli, inference_plan
from parloom.candidates import Candidates, of_search
from parloom.choose import ORDERED, PLACED, best_of
from parloom.cost.clusters import load_cluster, presets, resolve_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.measured import Source
from parloom.cost.stages import StagePlayer, simulate_stages
from parloom.errors import InputError
from parloom.execute.files import read_plan
from parloom.execute.launch import run as launch_run
from parloom.execute.startup import Place, mismatch
from parloom.explain import explain
from parloom.export.launch import job_of
from parloom.ir.lower_stages import lower_stages, rank_devices
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, Plan, Stage
from parloom.ir.plan_json import plan_hash
from parloom.ir.text import parse_graph
from parloom.objectives import proposed as of_method
from parloom.report.case import PipelineCase
from parloom.report.output import rendered
from parloom.report.page.network import groups, network_view
from parloom.search import placing
from parloom.search.anywhere import anywhere
from parloom.search.contexts import SimulatedPlan
from parloom.search.placing import Placed, place, with_mesh
from parloom.search.placing import placed as laid_out
from parloom.search.request import Request, Say
from parloom.search.searched import Searched
from tests.dist.staged import even
from tests.unit.pages import side_of

SLICE = "TPU-v5e:2x4"


def planned(cluster: str, method: str = "data_parallel") -> Plan:
    """A wide model and a small batch: what a step takes is the reduction of gradients."""
    devices = load_cluster(cluster).num_devices
    return api.plan("zoo:mlp", 16, cluster=cluster, method=method, devices=devices, optimizer="sgd")


def request_of(plan: Plan) -> Request:
    machine = DataSheets(load_cluster(plan.cluster))
    return Request(parse_graph(plan.graph), machine, plan.optimizer, 2**40)


def laid(plan: Plan) -> tuple[SimulatedPlan, Placed]:
    """The plan as it lies by default, and where it is fastest."""
    request = request_of(plan)
    before = SimulatedPlan(plan.decisions, request.predict(plan.decisions))
    return before, place(request, before)


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    plan = planned(SLICE)
    before, found = laid(plan)
    assert found.plan.step_ps < 0.95 * before.step_ps
    assert found.least_ps <= found.plan.step_ps * (1 + 1e-4)
    assert found.plan.decisions.nodes == before.decisions.nodes
    folder = tmp_path_factory.mktemp("placed")
    moved = replace(plan, decisions=found.plan.decisions, prediction=found.plan.prediction)
    return moved, api.save(moved, folder)["plan"]


def test_a_reduction_over_a_slice_goes_around_it(placed: tuple[Plan, Path]) -> None:
    """Each device is beside the next: with strides alone, the best ring uses links twice."""
    order = placed[0].decisions.mesh.order
    where = [(device % 2, device // 2) for device in order]
    steps = [*pairwise(where), (where[-1], where[0])]
    assert all(abs(a - c) + abs(b - d) == 1 for (a, b), (c, d) in steps)


def test_it_is_explained(placed: tuple[Plan, Path]) -> None:
    said = rendered(explain(placed[0]).screen, 200)
    assert "over 8 devices (ICI y, ICI x)" in said


def test_a_page_draws_what_neighbors_on_the_slice_send(placed: tuple[Plan, Path]) -> None:
    """Without the order, a ring of ranks leaves the slice's links: the control."""
    plan, _ = placed
    order = plan.decisions.mesh.order
    around = {frozenset(pair) for pair in [*pairwise(order), (order[-1], order[0])]}
    for mesh, is_around in ((plan.decisions.mesh, True), (Mesh(plan.decisions.mesh.axes), False)):
        own = with_mesh(plan.decisions, mesh)
        side = side_of(parse_graph(plan.graph), own, cluster=load_cluster(SLICE))
        drawn = np.asarray(network_view(side)["traffic"]["bytes"])
        pairs = {frozenset((int(a), int(b))) for a, b in zip(*np.nonzero(drawn), strict=True)}
        assert (pairs == around) == is_around


def test_what_no_placement_makes_faster_than_the_best_is_left(placed: tuple[Plan, Path]) -> None:
    """The first phase: below the step with each collective where it is fastest is nothing."""
    plan, _ = placed
    request = request_of(plan)
    own = SimulatedPlan(plan.decisions, request.predict(plan.decisions))
    found = place(request, own)
    left = place(request, own, found.least_ps)
    assert (left.plan, left.num_simulated) == (own, 0)
    assert (found.plan, found.num_simulated) == (own, 0)
    # Nor is one that is as fast already, wherever it lies.
    mesh = Mesh(plan.decisions.mesh.axes)
    fast = SimulatedPlan(with_mesh(plan.decisions, mesh), own.prediction)
    assert place(request, fast).num_simulated == 0


def test_an_order_is_read_back_and_proved(placed: tuple[Plan, Path]) -> None:
    plan, path = placed
    assert read_plan(path).decisions == plan.decisions
    assert plan_hash(read_plan(path)) == plan_hash(plan)
    text = path.read_text()
    again = text.replace('"order": [', '"order": [0, ', 1)
    path.with_name("wrong.json").write_text(again)
    with pytest.raises(InputError, match="each number from 0 to 7 once"):
        read_plan(path.with_name("wrong.json"))
    assert cli.main(["verify", str(path), "--shrink"]) == 0


def test_where_ranks_are_is_exported(
    placed: tuple[Plan, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = placed
    order = plan.decisions.mesh.order
    for to in ("ranks", "rankfile", "jax"):
        assert cli.main(["export", str(path), "--to", to, "--out", str(tmp_path)]) == 0
    heads, *rows = [line.split("\t") for line in (tmp_path / "ranks.tsv").read_text().splitlines()]
    assert heads[:3] == ["rank", "node", "device"]
    assert [int(row[2]) for row in rows] == list(order)
    lines = (tmp_path / "rankfile").read_text().splitlines()
    assert lines == [f"rank {rank}=+n0 slot={device}" for rank, device in enumerate(order)]
    jax, sharding = ModuleType("jax"), ModuleType("jax.sharding")
    sharding.Mesh = lambda devices, axes: (devices, axes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax.sharding", sharding)
    there: dict[str, object] = {}
    exec(compile((tmp_path / "jax_mesh.py").read_text(), "jax_mesh.py", "exec"), there)
    # Chips as a runtime may list them: any order, the long side first.
    chips = [SimpleNamespace(coords=(x, y, 0)) for y in range(2) for x in range(4)]
    devices, axes = there["make_mesh"](chips[::-1])  # type: ignore[operator]
    assert axes == plan.decisions.mesh.names
    found = [chip.coords[1] + 2 * chip.coords[0] for chip in np.ravel(devices)]
    assert found == list(order)
    with pytest.raises(ValueError, match="for 8 devices"):
        there["make_mesh"](chips[:4])  # type: ignore[operator]


def test_torchrun_starts_no_other_order(
    placed: tuple[Plan, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(placed[1]), "--to", "torchrun"]) == 2
    assert "--to rankfile, or --to jax" in capsys.readouterr().err


def test_devices_that_run_no_plan_are_named(tmp_path: Path) -> None:
    plan = planned(SLICE)
    (stage,) = plan.decisions.stages
    plain = replace(stage, mesh=replace(stage.mesh, order=()))
    plan = replace(plan, decisions=replace(plan.decisions, stages=(plain,)))
    with pytest.raises(InputError, match="TPU-v5e are predicted, and exported"):
        launch_run(plan, ["train.py"])
    with pytest.raises(InputError, match="not run"):
        job_of(plan, "plan.json", ["train.py"])
    here = replace(plan, cluster=planned("4x1xcpu").cluster)
    with pytest.raises(InputError, match=r"train\.py"):  # which is not there
        launch_run(here, ["train.py"])


def test_ranks_are_looked_for_on_their_nodes() -> None:
    """On two hosts of a slice: in the plan's order they are where it takes them to be."""
    plan = planned("TPU-v5e:4x4")
    order = tuple(reversed(range(16)))
    (stage,) = plan.decisions.stages
    stages = (replace(stage, mesh=replace(stage.mesh, order=order)),)
    plan = replace(plan, decisions=replace(plan.decisions, stages=stages))
    own = plan_hash(plan)
    right = [Place(rank, own, "1", "h", order[rank] // 8, 8) for rank in range(16)]
    assert mismatch(plan, right) == ""
    mixed = [Place(rank, own, "1", "h", rank % 2, 8) for rank in range(16)]
    assert "ranks 8-15 to be on one node of 8" in mismatch(plan, mixed)


def test_auto_proposes_it_and_its_bound_is_of_all_placements(placed: tuple[Plan, Path]) -> None:
    """Only the fastest of plans on a mesh is placed, as it was searched: anywhere."""
    plan, _ = placed
    request = request_of(plan)
    default = with_mesh(plan.decisions, Mesh(plan.decisions.mesh.axes))
    fastest = replace(request, machine=anywhere(request.machine)).predict(default)
    longer = replace(fastest, step_s=2 * fastest.step_s)
    slow = replace(default, num_microbatches=1, parameters=())
    proposals = SimulatedPlan(default, fastest), SimulatedPlan(slow, longer)
    searched = laid_out(request, Searched(proposals, 1e6, 1e6))
    (proposed,) = searched.proposals
    assert (proposed.decisions, proposed.prediction) == (plan.decisions, plan.prediction)
    (found,) = of_search(request, searched)
    assert found.name.endswith(", placed")
    choice = best_of(request, Candidates((found,), (), 1e-6, None), print)
    assert (choice.best, choice.bound_s) == (found, 1e-6)
    assert ORDERED in choice.notes


def in_two_stages(cluster: str, part: str, order: tuple[int, ...]) -> Plan:
    """Two stages on halves of a slice, of so many ranks of a part of it, in this order."""
    plan, own = planned(cluster), planned(part)
    graph, mesh = parse_graph(own.graph), replace(own.decisions.mesh, order=order)
    count = mesh.num_ranks
    halves = zip(even(graph, 2), (range(count), range(count, 2 * count)), strict=True)
    stages = tuple(Stage(items, (devices,), mesh) for items, devices in halves)
    decisions = replace(own.decisions, stages=stages, schedule="1f1b", num_microbatches=2)
    prediction = request_of(plan).predict(decisions)
    return replace(plan, decisions=decisions, prediction=prediction)


@pytest.fixture(scope="module")
def in_stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    plan = in_two_stages(SLICE, "TPU-v5e:2x2", (2, 0, 1, 3))
    return plan, api.save(plan, tmp_path_factory.mktemp("stages"))["plan"]


def test_stages_in_an_order_are_read_back_proved_and_exported(
    in_stages: tuple[Plan, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, path = in_stages
    assert read_plan(path).decisions == plan.decisions
    assert cli.main(["verify", str(path)]) == 0
    devices = [2, 0, 1, 3, 6, 4, 5, 7]
    assert list(rank_devices(plan.decisions)) == devices
    for to in ("ranks", "rankfile"):
        assert cli.main(["export", str(path), "--to", to, "--out", str(tmp_path)]) == 0
    heads, *rows = [line.split("\t") for line in (tmp_path / "ranks.tsv").read_text().splitlines()]
    assert heads[:4] == ["rank", "node", "device", "stages"]
    assert [int(row[2]) for row in rows] == devices
    assert [row[3] for row in rows] == ["0"] * 4 + ["1"] * 4
    lines = (tmp_path / "rankfile").read_text().splitlines()
    assert lines == [f"rank {rank}=+n0 slot={device}" for rank, device in enumerate(devices)]
    capsys.readouterr()
    assert cli.main(["export", str(path), "--to", "jax", "--out", str(tmp_path)]) == 2
    assert "stages, each with a mesh of its own" in capsys.readouterr().err
    cluster, graph = load_cluster(plan.cluster), parse_graph(plan.graph)
    lowered = lower_stages(graph, plan.decisions)
    played = simulate_stages(lowered, cluster, plan.decisions, plan.optimizer)
    player = StagePlayer(cluster, plan.optimizer)
    case = PipelineCase(plan, cluster, played, Source("spec", 0.0), lowered, player)
    assert [group.devices.tolist() for group in groups(case)] == [devices[:4], devices[4:]]


def test_ranks_of_stages_are_looked_for_on_their_nodes() -> None:
    """Of two stages on a slice of two hosts: each rank where its stage has it."""
    plan = in_two_stages("TPU-v5e:4x4", SLICE, tuple(reversed(range(8))))
    own, nodes = plan_hash(plan), [device // 8 for device in rank_devices(plan.decisions)]
    right = [Place(rank, own, "1", "h", nodes[rank], 8) for rank in range(16)]
    assert mismatch(plan, right) == ""
    mixed = [Place(rank, own, "1", "h", rank % 2, 8) for rank in range(16)]
    assert "ranks 0-7 to be on one node of 8" in mismatch(plan, mixed)


def test_nothing_is_simulated_behind_a_plan_that_no_placement_undercuts(
    placed: tuple[Plan, Path], in_stages: tuple[Plan, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faster pipeline is laid, and a slower plan of one stage lies by default."""
    plan, request = placed[0], request_of(placed[0])
    default = with_mesh(plan.decisions, Mesh(plan.decisions.mesh.axes))
    mesh = in_stages[0].decisions.stages[0].mesh
    stages = with_mesh(in_stages[0].decisions, replace(mesh, order=()))
    logical = replace(request, machine=anywhere(request.machine))
    fast, slow = (SimulatedPlan(own, logical.predict(own)) for own in (stages, default))
    slow = replace(slow, prediction=replace(slow.prediction, step_s=1.0))
    asked: list[Decisions] = []

    def counted(request: Request, own: SimulatedPlan, best_ps: float) -> Placed:
        asked.append(own.decisions)
        return place(request, own, best_ps)

    monkeypatch.setattr(placing, "place", counted)
    proposed = laid_out(request, Searched((slow, fast), 1.0, 1.0)).proposals
    assert asked == [stages]
    one, two = sorted(proposed, key=lambda own: len(own.decisions.stages))
    assert (one.decisions, one.prediction) == (default, request.predict(default))
    assert two.prediction == request.predict(two.decisions)
    assert two.step_ps >= fast.step_ps


def test_a_bound_is_of_placed_plans_of_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `choose` has it on a torus; under a switch, where runs of prime axes are searched, a plan
    that lies otherwise has none.
    """
    captured = api.capture_inference("zoo:mlp", batch=64, progress=print)
    bounds, notes = [], []
    around: tuple[int, ...] = (0, 2, 4, 6, 7, 5, 3, 1)
    for cluster, order in ((SLICE, ()), (SLICE, around), ("2x4xH100", ()), ("2x4xH100", "turned")):

        def one(request: Request, say: Say, order: tuple[int, ...] | str = order) -> Candidates:
            found, *_ = of_method(request, say).found
            (stage,) = found.decisions.stages
            mesh = replace(stage.mesh, order=() if isinstance(order, str) else order)
            if order == "turned":
                (axis,) = mesh.axes
                mesh = Mesh((replace(axis, primes=axis.primes[::-1]),))
            moved = replace(found, decisions=with_mesh(found.decisions, mesh))
            return Candidates((moved,), bound_s=1e-9)

        monkeypatch.setattr(inference_plan, "proposed", one)
        plan = api.search_inference(
            captured, cluster=cluster, devices=8, method="data_parallel", progress=print
        )
        assert plan.aim is not None
        bounds.append(plan.aim.bound)
        notes.append(any(PLACED in note for note in plan.notes))
    assert bounds == [1e-9, 1e-9, 1e-9, None]
    assert notes == [False, False, False, True]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("TPU-v5e:4x16", r"a pod of TPU-v5e has no such slice; there are 1x1, 2x2, 2x4"),
        ("TPU-v5e:32x16", "has no such slice"),
        ("TPU-v5e:4", "those with 2 sides"),
        ("TPU-v4:4x4x6", "has no such slice; there are 1x2x2"),
        ("H100:2x4", "is in no torus"),
        ("TPU-v5x:2x4", "did you mean"),
    ],
)
def test_a_slice_that_a_pod_does_not_have(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_cluster(spec)


def test_slices_wrap_around_where_pods_do() -> None:
    def fabrics(spec: str) -> list[tuple[int, str]]:
        return [(level.size, level.fabric) for level in load_cluster(spec).levels]

    assert fabrics("TPU-v5e:8x8") == [(8, "line"), (8, "line")]
    assert fabrics("TPU-v5e:16x8") == [(8, "line"), (16, "ring")]
    assert fabrics("TPU-v4:2x4x4") == [(2, "line"), (4, "line"), (4, "line")]
    assert fabrics("TPU-v5p:4x4x8") == [(4, "ring"), (4, "ring"), (8, "ring")]
    assert fabrics("TPU-v4:2x2x1") == [(2, "line"), (2, "line")]


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_a_cluster(name: str) -> None:
    loaded = resolve_cluster(name)
    assert loaded.cluster.name == name
    assert loaded.cluster.num_devices == 64
    assert load_cluster(loaded.spec) == loaded.cluster
