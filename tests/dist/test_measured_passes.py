"""Operators of programs without gradients are measured where a pass runs them."""

from collections.abc import Callable, Iterator

import pytest
import torch

from parloom.cost.calibration import key_of
from parloom.cost.local_operators import local_operator
from parloom.execute import measure_pass
from parloom.execute.clock import WINDOWS, Clock
from parloom.execute.measure import operators
from parloom.execute.measure_pass import ARRIVES, VIEW, _Pass, is_forward
from parloom.execute.operands import local_shape_of, operator_call
from parloom.execute.program import compile_pcg
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.ir.ops import op_of
from parloom.ir.pcg import PCG, Compute, Movement, PCall
from parloom.ir.plan import ONE_DEVICE, Decisions
from parloom.runtime import Context, SingleComm
from tests.dist.inference_plans import columns_cut, passed, served

CPU = torch.device("cpu")
BRIEF = Clock(CPU, 1e-4)
TWO = Mesh((MeshAxis("x", (PrimeAxis(2, 1, 0),)),))


def program(name: str, mesh: Mesh | None = None) -> PCG:
    """A program of tokens, or of one pass, whole or with heads and units sharded."""
    graph = passed(name)[1] if name in ("vit", "dit") else served(name).made.decode
    decisions = Decisions(ONE_DEVICE) if mesh is None else columns_cut(graph, mesh)
    (pcg,) = lower_stages(graph, decisions).pcgs
    return pcg


def of_pass(pcg: PCG, clock: Clock = BRIEF) -> tuple[_Pass, list[str]]:
    said: list[str] = []
    return _Pass(
        pcg, Context(SingleComm(compile_pcg(pcg, "test").program.mesh), CPU), clock, said.append
    ), said


def calls(pcg: PCG) -> Iterator[Compute]:
    """The operators of a pass, those of functions once for each call."""
    waiting = list(reversed(pcg.main.body))
    while waiting:
        item = waiting.pop()
        if isinstance(item, PCall):
            waiting += reversed(pcg.by_name[item.function].body)
        elif isinstance(item, Compute):
            yield item


@pytest.mark.sample(4)
@pytest.mark.parametrize("mesh", [None, TWO], ids=["whole", "columns"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart", "mixtral", "vit", "dit"])
def test_each_operator_is_measured_once_per_shape(name: str, mesh: Mesh | None) -> None:
    pcg, said = program(name, mesh), list[str]()
    assert is_forward(pcg)
    wanted = {
        key_of(local_operator(item, pcg.mesh)) for item in calls(pcg) if not op_of(item.node).view
    }
    found = list(operators([pcg, pcg], BRIEF, said.append))
    assert sorted(timed.key for timed in found) == sorted(wanted)
    assert not said
    assert all(timed.forward_s > 0 and timed.backward_s == 0 for timed in found)
    assert {t.key for t in operators([pcg], BRIEF, measured=wanted)} == set()


@pytest.mark.parametrize("mesh", [None, TWO], ids=["whole", "columns"])
def test_numbers_flow_from_operator_to_operator(mesh: Mesh | None) -> None:
    """But for weights and caches, each operator reads what a step before it made, in its shape."""
    pcg = program("llama", mesh)
    made, _ = of_pass(pcg)
    steps = [step for step in made._steps if step.item is not None]
    assert [step.item for step in steps] == list(calls(pcg))
    outer = {value.name for value in pcg.main.inputs}
    stored = outer.union(*made._stored.values())
    read = 0
    for step in steps:
        assert step.item is not None
        values = {v.name: v for v in step.item.operands}.values()
        flows = [v.spec.is_float and v.name not in stored for v in values]
        assert [position for position, _ in step.slots] == [i for i, f in enumerate(flows) if f]
        read += sum(flows)
        for value, own in zip(values, step.operands, strict=True):
            assert own is None or own.shape == local_shape_of(value, pcg.mesh)
    assert read > 40
    arrived = sum(isinstance(item, Movement) for f in pcg.functions for item in f.body)
    assert bool(arrived) == (mesh is not None)
    assert any(step.key == ARRIVES for step in made._steps) == (mesh is not None)


def test_nothing_is_kept_after_its_last_reader() -> None:
    made, _ = of_pass(program("gpt2"))
    most = 0
    with torch.no_grad():
        for step in made._steps:
            step.run(made._values)
            most = max(most, sum(value is not None for value in made._values))
    assert all(value is None for value in made._values)
    assert 1 < most < len(made._values) / 2


def test_a_pass_takes_as_long_as_its_operators_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of a quota are in the mean of the operators that they meet."""
    made, _ = of_pass(program("llama"))
    keys = [step.key for step in made._steps if step.key not in (VIEW, ARRIVES)]
    assert len(keys) < len(made._steps)
    pauses = {1: 100.0, 2: 6.0}
    laps = iter([1.0 + pauses.get(i, 0.0) for _ in range(WINDOWS) for i in range(len(keys))])
    monkeypatch.setattr(Clock, "between", lambda clock, begun, ended: next(laps))
    whole = sum(timed.forward_s * keys.count(timed.key) for timed in made.timed())
    assert whole == pytest.approx(len(keys) + 106.0)


class Slow:
    """A clock that only goes while views are made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, call = 0.0, operator_call

        def slow(pcg: PCG, item: Compute) -> Callable[..., object]:
            made = call(pcg, item)

            def called(*operands: object) -> object:
                self.now += op_of(item.node).view
                return made(*operands)

            return called

        monkeypatch.setattr(measure_pass, "operator_call", slow)
        monkeypatch.setattr(Clock, "stamp", lambda clock: self.now)


def test_views_are_a_part_of_what_is_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(monkeypatch)
    made, _ = of_pass(program("llama"))
    steps = [step.key for step in made._steps]
    last = max(i for i, key in enumerate(steps) if key != VIEW)
    found = {t.key: t.forward_s for t in made.timed()}
    whole = sum(seconds * steps.count(key) for key, seconds in found.items() if seconds > 1e-9)
    assert whole == pytest.approx(steps[:last].count(VIEW)) != 0
    root = next(key for key in found if key.startswith("rsqrt"))
    assert found[root] == 1e-9  # of a mean, which is no view


def test_one_slow_window_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = of_pass(program("gpt2"))
    windows = iter([{"a": 9.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 3.0}])
    monkeypatch.setattr(_Pass, "_window", lambda self, least_s: next(windows))
    for index, step in enumerate(made._steps):
        step.key = "ab"[index % 2]
    found = {t.key: t.forward_s for t in made.timed()}
    calls = {key: sum(step.key == key for step in made._steps) for key in "ab"}
    assert found == {"a": 1.0 / calls["a"], "b": 3.0 / calls["b"]}


def test_weights_are_those_of_each_call_as_long_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pcg = program("llama")

    def weights(most_bytes: int) -> int:
        monkeypatch.setattr(measure_pass, "MOST_BYTES", most_bytes)
        made, _ = of_pass(pcg)
        own = [t.data_ptr() for s in made._steps for t in s.operands if t is not None]
        return len(set(own))

    assert weights(0) < weights(1 << 30)


def test_what_cannot_run_alone_is_said_and_what_reads_it_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pcg = program("gpt2")
    whole, _ = of_pass(pcg)
    call = operator_call

    def failing(pcg: PCG, item: Compute) -> object:
        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("no such kernel\nmore")

        return fails if item.node.op == "layer_norm" else call(pcg, item)

    monkeypatch.setattr(measure_pass, "operator_call", failing)
    made, said = of_pass(pcg)
    norms = sum(item.node.op == "layer_norm" for item in calls(pcg))
    assert len(said) == norms == len(whole._steps) - len(made._steps) > 0
    assert all(line.endswith(": no such kernel") for line in said)
    keys = {t.key for t in made.timed()}
    assert keys == {t.key for t in whole.timed() if not t.key.startswith("layer_norm")}
