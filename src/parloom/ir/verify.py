"""Every invariant of graphs, decisions and parallel graphs, in three tables.

Each entry yields one sentence per violation; `verify_*` raise `VerifyError` with the first few.
What is checked here is relied on everywhere else without asking again.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import TypeVar

from parloom.errors import LayoutError, VerifyError, nearest
from parloom.ir.adjacent import adjacent_problems
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import CACHE, Call, Function, Graph, Node, TensorSpec
from parloom.ir.layout import check
from parloom.ir.moves import ADJOINTS, State, state
from parloom.ir.ops import op_of
from parloom.ir.ops.cache import WRITE_CACHE
from parloom.ir.pcg import (
    PCG,
    TIME,
    Compute,
    Item,
    Movement,
    PFunction,
    PValue,
    operands_of,
    results_of,
)
from parloom.ir.plan import ActivationDecision, Decisions, ParameterDecision
from parloom.ir.stages import ARRIVING, StageDecisions, cut_plan
from parloom.ir.verify_dtypes import communication, precision
from parloom.ir.verify_stages import STAGES, Planned, Problems, known_operators, unknown_block

KINDS = ("parameter", "buffer", "batch", CACHE, "constant", ARRIVING)
POLICIES = ("keep", "recompute")
SHOWN = 5
MAX_OPERATORS = 1_000_000

T = TypeVar("T")


def verify_graph(graph: Graph) -> Graph:
    """`graph` itself, if it keeps every invariant of `GRAPH`; else `VerifyError`."""
    _check("graph", GRAPH, graph)
    return graph


def verify_decisions(graph: Graph, decisions: Decisions, factored: Factored | None = None) -> None:
    """Raise `VerifyError` unless `decisions` keep every invariant of `DECISIONS` for `graph`."""
    if len(decisions.stages) == 1:
        _check("plan", DECISIONS, (factored or factorize(graph), decisions))
        return
    factored = factored or factorize(graph)
    _check("plan", STAGES, (factored, decisions))
    parts = cut_plan(graph, decisions)
    chosen = StageDecisions(decisions, parts)
    for index, own in enumerate(parts.graphs):
        _check(f"plan, stage {index}", DECISIONS, (factorize(own), chosen.of(index)))


def verify_pcg(pcg: PCG) -> PCG:
    """`pcg` itself, if it keeps every invariant of `PARALLEL`; else `VerifyError`."""
    _check("parallel graph", PARALLEL, pcg)
    return pcg


def _check(what: str, invariants: Mapping[str, Callable[[T], Problems]], value: T) -> None:
    """Raise for the first invariant that is broken: later ones rely on earlier ones."""
    for name, problems_of in invariants.items():
        found = [f"{problem} [{name}]" for problem in problems_of(value)]
        if found:
            more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
            raise VerifyError(f"invalid {what}: {'; '.join(found[:SHOWN])}{more}")


# Graphs


def _functions(graph: Graph) -> tuple[Function, ...]:
    return (graph.main, *graph.functions)


def _defined_once(graph: Graph) -> Problems:
    for function in _functions(graph):
        seen: set[str] = set()
        for value in (*function.inputs, *(v for i in function.body for v in i.results)):
            if value.name in seen:
                yield f"{function.name}: value {value.name!r} is defined twice"
            if not value.name.isidentifier():
                yield f"{function.name}: {value.name!r} is no identifier"
            seen.add(value.name)


def _defined_before_use(graph: Graph) -> Problems:
    for function in _functions(graph):
        seen = {v.name for v in function.inputs}
        for item in function.body:
            for name in item.args if isinstance(item, Call) else item.refs:
                if name not in seen:
                    yield f"{function.name}: {name!r} is read before it is defined"
            seen.update(v.name for v in item.results)
        yield from (
            f"{function.name}: returns {name!r}, which it does not define"
            for name in function.outputs
            if name not in seen
        )


def _calls_in_main(graph: Graph) -> Problems:
    """Blocks call no blocks: nested calls would unfold to any number of operators."""
    for function in graph.functions:
        for item in function.body:
            if isinstance(item, Call):
                yield f"{function.name}: calls {item.function!r}, and calls stand in main"
    sizes = {f.name: len(f.body) for f in graph.functions}
    calls = (item for item in graph.main.body if isinstance(item, Call))
    total = len(graph.main.body) + sum(sizes.get(call.function, 0) for call in calls)
    if total > MAX_OPERATORS:
        yield f"{total} operators, and at most {MAX_OPERATORS} are read"


def _calls_match(graph: Graph) -> Problems:
    for function in _functions(graph):
        specs = function.specs()
        for item in function.body:
            if not isinstance(item, Call):
                continue
            callee = graph.by_name.get(item.function)
            if callee is None:
                yield f"{item.prefix}: calls unknown function {item.function!r}"
                continue
            own = callee.specs()
            given = [specs.get(name) for name in item.args] + [v.spec for v in item.results]
            wanted = [v.spec for v in callee.inputs] + [own.get(n) for n in callee.outputs]
            if given != wanted:
                yield f"{item.prefix}: arguments or results do not match {item.function!r}"


def _ends(graph: Graph) -> Problems:
    specs = graph.main.specs()
    if graph.loss is not None:
        spec = specs.get(graph.loss)
        if spec is None or spec.shape or not spec.is_float:
            yield f"the loss {graph.loss!r} is no floating-point scalar of main"
    kept = {i.target: i for kind in ("buffer", CACHE) for i in graph.of_kind(kind)}
    for target, name in graph.updates:
        if target not in kept or kept[target].value.spec != specs.get(name):
            yield f"update of buffer {target!r} does not match it"
    yield from _caches(graph)
    for user, name in graph.outputs:
        if name not in specs:
            yield f"output {user!r} is no value of main"


def _caches(graph: Graph) -> Problems:
    """A cache that one operator writes to has no other reader: who else reads it would see either
    state. One that an earlier pass has left may stay as it is, and anybody reads it.
    """
    ids, after = graph.flat_ids, dict(graph.updates)
    for entry in graph.of_kind(CACHE):
        readers = [flat for flat, _ in graph.uses.get(entry.value.name, ())]
        ops = [flat.node.op for flat in readers]
        if entry.target not in after and WRITE_CACHE not in ops:
            continue
        if ops != [WRITE_CACHE]:
            yield f"cache {entry.target!r} is not read by one {WRITE_CACHE} alone"
        elif readers[0].operands[0] != entry.value.name:
            yield f"cache {entry.target!r} is written to itself"
        elif ids.get(after.get(entry.target, "")) != readers[0].results[0]:
            yield f"cache {entry.target!r} is not left as it is written"


def _inputs(graph: Graph) -> Problems:
    if tuple(i.value for i in graph.inputs) != graph.main.inputs:
        yield "the inputs are not those of main"
    seen: set[tuple[str, str]] = set()
    for entry in graph.inputs:
        if entry.kind not in KINDS:
            yield f"input {entry.target!r} has unknown kind {entry.kind!r}"
        if (entry.kind, entry.target) in seen:
            yield f"{entry.kind} {entry.target!r} stands twice"
        seen.add((entry.kind, entry.target))
        if entry.samples is not None and not (
            entry.kind == "batch" and 0 <= entry.samples < len(entry.value.spec.shape)
        ):
            yield f"input {entry.target!r} has no dim {entry.samples} of samples"


def _keys_unique(graph: Graph) -> Problems:
    seen: set[str] = set()
    for key, _ in graph.unfolded():
        if key in seen:
            yield f"two operators have the key {key!r}"
        seen.add(key)


GRAPH: Mapping[str, Callable[[Graph], Problems]] = MappingProxyType(
    {
        "values are defined once": _defined_once,
        "values are defined before use": _defined_before_use,
        "calls stand in main": _calls_in_main,
        "calls match their functions": _calls_match,
        "loss, outputs and updates exist": _ends,
        "inputs are those of main": _inputs,
        "operator keys are unique": _keys_unique,
    }
)


# Decisions


def _legal_assignments(planned: Planned) -> Problems:
    factored, decisions = planned
    by_key = {n.key: n for n in decisions.nodes}
    for flat in factored.graph.flat():
        node = by_key.get(flat.key)
        if node is None:
            continue
        unknown = {a for _, axes in node.factors for a in axes} - set(decisions.mesh.names)
        if unknown:
            yield f"{flat.key}: unknown mesh axes {sorted(unknown)}"
            continue
        chosen = {f: axes for f, axes in node.factors if axes}
        try:
            factored.rule(flat.function, flat.node).check(chosen, decisions.mesh, flat.key)
        except LayoutError as error:
            yield str(error)


def _storage(planned: Planned) -> Problems:
    factored, decisions = planned
    specs = {i.target: i.value.spec for i in factored.graph.of_kind("parameter")}
    for parameter in decisions.parameters:
        spec = specs.get(parameter.name)
        if spec is None:
            yield f"no parameter {parameter.name!r} in the model{nearest(parameter.name, specs)}"
        else:
            yield from _storage_of(parameter, spec, decisions)


def _storage_of(parameter: ParameterDecision, spec: TensorSpec, decisions: Decisions) -> Problems:
    stored = (parameter.weight, parameter.gradient, parameter.optimizer)
    for storage in stored:
        if storage.memory != "device":
            yield f"{parameter.name}: storage on the {storage.memory} is not yet executable"
        if set(storage.axes) - set(decisions.mesh.names):
            yield f"{parameter.name}: unknown mesh axes in {storage.axes}"
        if len(set(storage.axes)) < len(storage.axes):
            yield f"{parameter.name}: an axis stands twice in {storage.axes}"
        if storage.axes and not 0 <= storage.dim < len(spec.shape):
            yield f"{parameter.name}: no dim {storage.dim} in shape {spec.shape}"
    nested = all(fine.axes[: len(coarse.axes)] == coarse.axes for coarse, fine in pairwise(stored))
    if not nested or len({s.dim for s in stored if s.axes}) > 1:
        yield (
            f"{parameter.name}: weight, gradient and optimizer storage"
            f" {tuple(s.axes for s in stored)} must be along one dim, the axes of each the first"
            " ones of the next (ZeRO 0 to 3)"
        )


def _activations(planned: Planned) -> Problems:
    factored, decisions = planned
    calls = {i.prefix: i.function for i in factored.graph.main.body if isinstance(i, Call)}
    for activation in decisions.activations:
        if activation.policy not in POLICIES:
            yield f"{activation.prefix}: activation policy {activation.policy!r} is not yet there"
        if activation.prefix not in calls:
            yield unknown_block(activation.prefix, calls)
        elif activation.lists:
            block = factored.graph.by_name[calls[activation.prefix]]
            yield from _recomputed_values(activation, block)


def _recomputed_values(activation: ActivationDecision, block: Function) -> Problems:
    if activation.policy != "recompute":
        yield f"{activation.prefix}: lists of values go with recompute, not {activation.policy!r}"
    operators = {item.key for item in block.body if isinstance(item, Node)}
    movable = operators | {value.name for value in block.inputs}
    for name in activation.values:
        if name not in operators:
            known = nearest(name, operators)
            yield f"{activation.prefix}: no operator {name!r} in the block to recompute{known}"
    for name in activation.moves:
        if name not in movable:
            known = nearest(name, movable)
            yield f"{activation.prefix}: no operator or input {name!r} in the block to move{known}"


def _executable(planned: Planned) -> Problems:
    """Fields that plans have from the first version on and that do not run yet."""
    _, decisions = planned
    stage, schedule = decisions.stages[0], decisions.schedule
    if schedule != "one_stage":
        yield f"one stage has the schedule 'one_stage', not {schedule!r}"
    if decisions.actions:
        yield "one stage has no action lists: leave them out"
    if stage.items:
        yield f"one stage has all items: leave out {stage.items[0]} and the others"
    num_devices = sum(map(len, stage.devices))
    if len(stage.devices) > 1 or num_devices != stage.mesh.num_ranks:
        yield (
            f"one stage has as many neighboring devices as its mesh has ranks,"
            f" {stage.mesh.num_ranks}, not {num_devices} in {len(stage.devices)} runs"
        )
    if stage.microbatches or stage.at_once > 1:
        yield "one stage runs all microbatches, one at a time: leave out what it says of them"
    if decisions.batch_norm != "global":
        yield f"batch_norm {decisions.batch_norm!r} is not yet executable"


def _batch_semantics(planned: Planned) -> Problems:
    """The program is that of one microbatch where each is computed by itself, and nowhere else."""
    factored, decisions = planned
    part = bool(factored.graph.sample_dims)
    if part and not decisions.accumulates:
        yield "the program has one microbatch's samples, and batch semantics are global"
    if not part and decisions.accumulates and factored.graph.training:
        yield "batch semantics are by microbatch, and the program has all samples"


DECISIONS: Mapping[str, Callable[[Planned], Problems]] = MappingProxyType(
    {
        "decisions name operators of the model": known_operators,
        "axes divide their factors": _legal_assignments,
        "storage is a ZeRO level": _storage,
        "activation policies name blocks": _activations,
        "decisions are executable": _executable,
        "the program has the samples that it is decided to have": _batch_semantics,
        "gradients and masters keep their precision": precision,
        "communication has a known data type": communication,
    }
)


# Parallel graphs


def _bodies(pcg: PCG) -> Iterator[tuple[PFunction, tuple[Item, ...]]]:
    for function in (pcg.main, *pcg.functions):
        yield function, function.body


def _values_flow(pcg: PCG) -> Problems:
    hoisted = {value.name: value for _, value in pcg.hoisted}
    for function, body in _bodies(pcg):
        known = {v.name: v for v in function.inputs} | (hoisted if function is pcg.main else {})
        for item in body:
            for value in operands_of(item):
                if known.get(value.name) != value:
                    yield f"{function.name}: {value.name!r} is read but not made like that"
            known.update((v.name, v) for v in results_of(item))


def _remade_as_made(pcg: PCG) -> Problems:
    """What is made again are items of the function, of values that it keeps."""
    for function in pcg.functions:
        if function.remake is None:
            continue
        made = {v.name: v for item in function.body for v in results_of(item)}
        known = {v.name: v for v in function.inputs} | made
        again = {v.name: v for v in function.remake.inputs}
        if not again.items() <= known.items() or not again.keys().isdisjoint(
            function.remake.dropped
        ):
            yield f"{function.name}: values are made again of others than it keeps"
        for item in function.remake.body:
            if item not in function.body:
                yield f"{function.name}: {_name(item)} is made again but not made"
            for value in operands_of(item):
                if again.get(value.name) != value:
                    yield f"{function.name}: {value.name!r} is read again but not made again"
            again.update((v.name, v) for v in results_of(item))
        for value in function.remake.outputs:
            if value.name not in function.remake.dropped or again.get(value.name) != value:
                yield f"{function.name}: {value.name!r} is dropped but not made again"


def _name(item: Item) -> str:
    return ", ".join(v.name for v in results_of(item))


def _layouts_divide(pcg: PCG) -> Problems:
    for function, body in _bodies(pcg):
        for value in (*function.inputs, *(v for item in body for v in results_of(item))):
            try:
                check(value.layout, value.spec.shape, pcg.mesh, value.name)
            except LayoutError as error:
                yield f"{function.name}: {error}"


def _rules_hold(pcg: PCG) -> Problems:
    """Operators get the layouts that their rule asks for and make those that it says."""
    for function, body in _bodies(pcg):
        for item in body:
            if not isinstance(item, Compute):
                continue
            chosen = dict(item.assignment)
            for index, value in enumerate(item.operands):
                want = item.rule.operand_layout(index, chosen, pcg.mesh)
                as_wanted = _space(value.layout.partial) == want.partial
                as_wanted |= not value.spec.shape or (_carried(item) and index == 0)
                if value.layout.shards != want.shards or not as_wanted:
                    yield f"{function.name}: {item.node.key} reads {value.name!r} laid out wrongly"
            for index, value in enumerate(item.results):
                want = item.rule.result_layout(index, chosen, pcg.mesh)
                extra = set(_space(value.layout.partial)) ^ set(_space(want.partial))
                passing = not value.spec.shape or _carried(item)
                same = not extra or (passing and extra <= set(value.layout.partial))
                if value.layout.shards != want.shards or not same:
                    yield f"{function.name}: {item.node.key} makes {value.name!r} laid out wrongly"


def _carried(item: Compute) -> bool:
    """Whether sums of any size may pass an operator; through others only scalar ones do."""
    return op_of(item.node).linear == "carried"


def _space(partial: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple(p for p in partial if p[0] != TIME)


def _cotangents_hold(pcg: PCG) -> Problems:
    """The gradient that an operator returns is partial just where its operand says so."""
    for function, body in _bodies(pcg):
        for item in body:
            if not isinstance(item, Compute) or not any(v.differentiable for v in item.results):
                continue
            for index, value in enumerate(item.operands):
                if not value.differentiable:
                    continue
                passed = {a for v in item.results for a in v.varying}
                if _carried(item) and index:
                    passed |= {a for a, _ in _space(item.operands[0].layout.partial)}
                want = ({*item.rule.varying(index, dict(item.assignment))} | passed) - {TIME}
                if want != set(value.varying) - {TIME}:
                    yield (
                        f"{function.name}: the gradient of {value.name!r} leaves {item.node.key}"
                        f" partial over {sorted(want)}, its movement expects {value.varying}"
                    )


def _movements_follow_the_table(pcg: PCG) -> Problems:
    """A movement's axes change state just as its row of ADJOINTS says."""
    for function, body in _bodies(pcg):
        for item in body:
            if not isinstance(item, Movement):
                continue
            row = ADJOINTS.get(item.step.row)
            if row is None:
                yield f"{function.name}: unknown movement {item.step.row!r}"
                continue
            for axis in item.step.axes:
                found = [_state(v, axis) for v in (item.operand, item.result)]
                wanted = [row.before, row.after]
                known = 2 if item.result.differentiable else 1  # without a gradient, values only
                if [s[:known] for s in found] != [s[:known] for s in wanted]:
                    yield (
                        f"{function.name}: {item.step.row} over {axis!r} takes {found[0]} to"
                        f" {found[1]}, its row says {wanted[0]} to {wanted[1]}"
                    )


def _state(value: PValue, axis: str) -> State:
    """(value, cotangent) state of an axis; the gradient of what is whole in time sums over it."""
    return state(value.layout, axis, (*value.varying, TIME))


def _loss_is_whole(pcg: PCG) -> Problems:
    if pcg.loss is not None:
        layout = pcg.loss.layout
        if layout.shards or any(reduction != "sum" for _, reduction in layout.partial):
            yield "the loss is neither whole on every rank nor a sum over them"


def _parameters_reduce_once(pcg: PCG) -> Problems:
    for parameter in pcg.parameters:
        name, decision = parameter.input.target, parameter.decision
        twice = set(parameter.layout.axes) & {*parameter.reduce, *decision.optimizer.axes}
        if twice:
            yield f"{name}: axes {sorted(twice)} shard it already in its compute layout"


PARALLEL: Mapping[str, Callable[[PCG], Problems]] = MappingProxyType(
    {
        "values are read as they were made": _values_flow,
        "values are made again as they were made": _remade_as_made,
        "layouts divide": _layouts_divide,
        "operators keep their rules": _rules_hold,
        "cotangents are whole where they are used": _cotangents_hold,
        "movements follow the adjoint table": _movements_follow_the_table,
        "the loss is whole or a sum": _loss_is_whole,
        "parameters are sharded and reduced once per axis": _parameters_reduce_once,
        "parameters lie in one memory where they are read so": adjacent_problems,
    }
)
