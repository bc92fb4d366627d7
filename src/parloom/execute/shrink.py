"""A small copy of a plan, that this CPU can prove.

The model is built anew in small sizes and captured anew; the big plan's graph is only read. Every
mesh axis keeps one prime, so every axis still splits what it split; decisions move to the copy by
their keys. Where the small graph has not the factors of the big one, other sizes are tried, and
what still cannot be kept is said in the report.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from math import lcm

import psutil
from torch import Tensor, nn

from parloom.capture import Loaded, parameters_of, sizes_of
from parloom.capture.inference import capture_inference
from parloom.capture.microbatch import capture_microbatch
from parloom.cost.units import format_bytes
from parloom.errors import CaptureError, InputError, LayoutError
from parloom.execute.inference import PROVED_TOKENS, prefill_decisions
from parloom.execute.shrink_rewrites import SmallRewrites
from parloom.execute.shrink_sizes import ATTEMPTS, Attempt
from parloom.execute.shrink_stages import SmallStages
from parloom.execute.small_builds import MAX_BLOCKS, Needs, fewer_blocks, of_sizes
from parloom.execute.stacks import Blocks, Stacks, blocks_of
from parloom.ir.factors import Factored, factorize
from parloom.ir.generation import TOKENS
from parloom.ir.graph import FlatNode, Graph
from parloom.ir.lower_stages import lower_beside, lower_stages
from parloom.ir.ops import Rule
from parloom.ir.plan import Decisions, Inference, ModelSource, NodeDecision, Plan
from parloom.ir.text import parse_graph, print_graph
from parloom.rewrite.rewrites import as_stored, rewritten

# Weights of all ranks together; each has a gradient and two states in float64: 6 GB.
MAX_WEIGHTS = 200_000_000


@dataclass(frozen=True)
class Shrunk:
    """A plan for a small copy of the model, the copy, and what was shrunk."""

    plan: Plan
    loaded: Loaded
    text: str

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The copy's weights."""
        return parameters_of(self.loaded.model, parse_graph(self.plan.graph))

    @property
    def batch(self) -> Mapping[str, Tensor]:
        """What the copy is called with."""
        return self.loaded.batch


@dataclass(frozen=True)
class Big:
    """The plan to be shrunk, with its factors and what the copy needs."""

    plan: Plan
    stages: SmallStages
    factored: Factored
    nodes: Mapping[str, FlatNode]
    needs: Needs

    @cached_property
    def blocks(self) -> Blocks:
        """Its stacks, with what is decided of each block."""
        stages = self.stages
        return blocks_of(self.nodes, self.plan.decisions, stages.stages_at, stages.usable)

    @cached_property
    def prompts(self) -> "Big | None":
        """The program of prompts of a plan that generates."""
        inference = self.plan.inference
        if inference is None or not inference.prefill_graph:
            return None
        plan = replace(self.plan, graph=inference.prefill_graph, inference=None)
        return examine(replace(plan, decisions=prefill_decisions(self.plan)))


@dataclass(frozen=True)
class Copy:
    """One attempt: a small model, its graph, the decisions on it, and what was lost; of a plan for
    inference also the rest of it.
    """

    loaded: Loaded
    graph: Graph
    decisions: Decisions
    changes: tuple[str, ...]
    lost: tuple[str, ...]
    inference: Inference | None = None


def shrink(plan: Plan, loaded: Loaded) -> Shrunk:
    """A plan for a small copy of `loaded`, the model of `plan`.

    Only a factory's model needs its weights, and loses blocks in place. Operators of the model that
    the copy cannot decide as the plan does are named in the result's text.
    Raises `InputError` where nothing can be shrunk, or not enough to prove it here.
    """
    big = examine(plan)
    best: Copy | None = None
    refused: LayoutError | CaptureError | None = None
    for attempt in ATTEMPTS:
        try:
            copy = _attempt(big, loaded, attempt)
        except (LayoutError, CaptureError) as error:
            refused = refused or error
            continue
        if best is None or len(copy.lost) < len(best.lost):
            best = copy
        if not copy.lost:
            break
    if best is None:
        raise InputError(f"no small copy of {plan.source.spec} can take the plan: {refused}")
    parts = (*best.changes, *_mesh_change(big, best.decisions))
    if not parts:
        raise InputError(
            f"nothing of {plan.source.spec} can be shrunk: neither sizes, blocks nor mesh; verify"
            " it without --shrink"
        )
    small = replace(
        plan,
        decisions=best.decisions,
        graph=print_graph(best.graph),
        evaluation_graph="",
        prediction=None,
        inference=best.inference,
    )
    text = ", ".join(parts)
    if best.lost:
        text += f"; not kept: {'; '.join(best.lost)}"
    return Shrunk(small, best.loaded, text)


def small_model(
    source: ModelSource, loaded: Loaded, *, seed: int = 0, num_microbatches: int = 1
) -> tuple[Loaded, str] | None:
    """`loaded` in small sizes, whatever the plan, and what was shrunk; None where it stays big.

    Its samples are those of so many microbatches.

    A config or a zoo model is built anew with weights from `seed`: equal calls give equal models.
    A factory's model loses blocks in place, which stay where it does not capture without them.
    """
    values = sizes_of(source.spec)
    needs = Needs(num_microbatches=num_microbatches, apart=num_microbatches > 1)
    if values is None:
        stacks = {
            path: [_makeup(block) for block in module.children()]
            for path, module in loaded.model.named_modules()
            if path and isinstance(module, nn.ModuleList | nn.Sequential)
        }
        made, *changes = fewer_blocks(loaded, stacks, needs)
        text = ", ".join(chain(*reversed(changes)))
        return (made, text) if text else None
    for attempt in ATTEMPTS:
        try:
            made, *changes = of_sizes(source, seed, loaded, values, needs, attempt)
        except InputError:
            continue
        text = ", ".join(chain(*reversed(changes)))
        small = sum(p.numel() for p in made.model.parameters()) <= MAX_WEIGHTS
        return (made, text) if text and small else None
    return None


def _makeup(block: nn.Module) -> tuple[object, ...]:
    """Types and settings of a block's modules; whole numbers are left out, for many count."""
    return tuple(
        (name, type(module), tuple((k, v) for k, v in vars(module).items() if _is_setting(v)))
        for name, module in block.named_modules()
    )


def _is_setting(value: object) -> bool:
    return value is None or isinstance(value, bool | float | str)


def proof_bytes(num_elements: int) -> int:
    """What a proof of a model with so many elements of weights holds at least: weights, gradients
    and two optimizer states in float64.
    """
    return num_elements * 4 * 8


def needs_copy(plan: Plan) -> bool:
    """Whether this machine has too little memory for a proof of the whole model of a plan."""
    weights = parse_graph(plan.graph).of_kind("parameter")
    elements = sum(entry.value.spec.num_elements for entry in weights)
    return proof_bytes(elements) > psutil.virtual_memory().total


def require_memory(model: nn.Module, spec: str) -> None:
    """Raise `InputError` where a proof of the whole model cannot fit in this machine's memory.

    Counted is the reference alone: weights, gradients and two optimizer states in float64.
    """
    weights = sum(p.numel() for p in model.parameters())
    needed, there = proof_bytes(weights), psutil.virtual_memory().total
    if needed > there:
        raise InputError(
            f"{spec} has {weights:,} parameters; proving it whole needs {format_bytes(needed)},"
            f" this machine has {format_bytes(there)}; prove a small copy with --shrink"
        )


def examine(plan: Plan) -> Big:
    """What the small copy must keep."""
    decisions = plan.decisions
    graph = rewritten(parse_graph(plan.graph), decisions.rewrites)
    factored = factorize(graph)
    nodes = _by_key(graph)
    stages = SmallStages(decisions, nodes)
    divisors: dict[int, int] = {}
    for node in decisions.nodes:
        flat = nodes.get(node.key)
        if flat is None:
            continue
        sizes = dict(factored.rule(flat.function, flat.node).sizes)
        for factor, axes in node.factors:
            if axes and (size := sizes.get(factor, 0)):  # any number of partial sums is legal
                divisors[size] = lcm(divisors.get(size, 1), stages.size(node.key, axes))
    needs = Needs(divisors, 2, len(stages.microbatches), apart=decisions.accumulates)
    big = Big(plan, stages, factored, nodes, needs)
    needs = replace(needs, layers=_layers_needed(big.blocks))
    if big.prompts is not None:
        needs = needs.beside(big.prompts.needs)
    return replace(big, needs=needs)


def _attempt(big: Big, loaded: Loaded, attempt: Attempt) -> Copy:
    """The copy that one choice of sizes gives."""
    plan = big.plan
    values = sizes_of(plan.source.spec)
    if values is not None:
        made, changes, _ = of_sizes(plan.source, plan.seed, loaded, values, big.needs, attempt)
    elif attempt == ATTEMPTS[0]:
        made, changes = _of_factory(big, loaded)
    else:
        raise LayoutError(f"{plan.source.spec} has only one copy")
    weights = sum(p.numel() for p in made.model.parameters())
    ranks = max(mesh.num_ranks for mesh in big.stages.meshes)  # of a stage: the weights are shared
    if weights * ranks > MAX_WEIGHTS:
        raise InputError(
            f"{big.plan.source.spec} cannot be shrunk enough: {weights:,} parameters remain"
            f" ({', '.join(changes) or 'nothing shrinks'}), on {ranks} ranks; plan a"
            " smaller model of the same structure and verify that"
        )
    if plan.inference is not None:
        return _serving(big, plan.inference, made, changes)
    count = big.needs.num_microbatches if big.needs.apart else 1
    graph = capture_microbatch(made.model, made.batch, count, loss=made.loss)
    return _decided(big, made, graph, changes)[0]


def _serving(big: Big, inference: Inference, made: Loaded, changes: tuple[str, ...]) -> Copy:
    """The copy of a plan for inference: its program of tokens, or its only one, and that of
    prompts, which has the same weights and caches.
    """
    tokens = _small_tokens(big, inference.new_tokens, made)
    graph, prefill = capture_inference(made, tokens, inference.weights)
    if tokens < inference.new_tokens:
        changes = (*changes, f"new tokens {inference.new_tokens} -> {tokens}")
    copy, stacks = _decided(big, made, graph, changes)
    small = replace(inference, new_tokens=tokens, prefill=None)
    if prefill is None:
        return replace(copy, inference=small)
    of_prompts = big.prompts
    assert of_prompts is not None, "the plan has a program of prompts"
    own = Stacks.match(of_prompts.blocks, blocks_of(_by_key(prefill), Decisions()))
    # One block of the model stands for a block of the copy in both programs.
    stacks = Stacks({**own.kept, **stacks.kept}, own.missing)
    kept, lost = _moved(of_prompts, stacks, factorize(as_stored(prefill, copy.decisions.rewrites)))
    small = replace(small, prefill_graph=print_graph(prefill), prefill_nodes=tuple(kept))
    first = lower_stages(rewritten(graph, copy.decisions.rewrites), copy.decisions)
    chosen = replace(copy.decisions, nodes=small.prefill_nodes, activations=(), rewrites=())
    lower_beside(as_stored(prefill, copy.decisions.rewrites), chosen, first)
    lost = [f"prompts: {text}" for text in lost]
    return replace(copy, inference=small, lost=(*copy.lost, *lost))


def _small_tokens(big: Big, planned: int, made: Loaded) -> int:
    """As few tokens as a proof generates and for which caches divide as they do in the plan."""
    if big.prompts is None:
        return planned
    seq = made.batch[TOKENS].shape[1]
    whole = parse_graph(big.prompts.plan.graph).of_kind("batch")[0].value.spec.shape[1]
    need = big.needs.divisors.get
    for count in range(min(PROVED_TOKENS, planned), planned):
        if not (count % need(planned, 1) or (seq + count) % need(whole + planned, 1)):
            return count
    return planned


def _by_key(graph: Graph) -> dict[str, FlatNode]:
    return {flat.key: flat for flat in graph.flat()}


def _layers_needed(stacks: Blocks) -> int:
    """Blocks per stack that show every kind of block, and differing decisions up to a limit."""
    needed = 2
    for blocks in stacks.values():
        kinds = [block.kind for block in blocks.values()]
        variants = {(block.kind, block.variant) for block in blocks.values() if block.usable}
        if any(len(list(run)) > 1 for _, run in groupby(kinds)):
            last = max(kinds.index(kind) for kind in kinds)
            needed = max(needed, last + 1, min(MAX_BLOCKS, len(variants)))
    return needed


def _of_factory(big: Big, loaded: Loaded) -> tuple[Loaded, tuple[str, ...]]:
    """The factory's own model with fewer blocks, or as it is where it does not run with fewer."""
    stacks = {
        prefix: [(b.kind, b.variant) if b.usable else None for b in blocks.values()]
        for prefix, blocks in big.blocks.items()
    }
    made, changes, _ = fewer_blocks(loaded, stacks, big.needs)
    return made, changes


def _moved(
    big: Big, stacks: Stacks, factored: Factored, gone: Collection[str] | None = None
) -> tuple[list[NodeDecision], list[str]]:
    """The decisions about operators on a small program, by key, and what is lost."""
    nodes = _by_key(factored.graph)
    if gone is None:
        gone = dict(_gone_with_blocks(big.nodes, nodes, stacks))
    lost = [f"{path}: the copy has no block of its kind" for path in stacks.missing]
    kept: list[NodeDecision] = []
    for node in big.plan.decisions.nodes:
        key = stacks.small_key(node.key)
        if key is None or key in gone:
            continue
        reason = _misfit(big, node, factored, nodes.get(key))
        if reason is None:
            kept.append(replace(node, key=key))
        else:
            assignment = ", ".join(f"{f} on {' x '.join(a)}" for f, a in node.factors if a)
            lost.append(f"{node.key} ({assignment}): {reason}")
    return kept, lost


def _decided(big: Big, made: Loaded, graph: Graph, changes: tuple[str, ...]) -> tuple[Copy, Stacks]:
    """The big plan's decisions on the small graph, by key, and which blocks stand for which."""
    plan = big.plan.decisions
    stacks = Stacks.match(big.blocks, blocks_of(_by_key(graph), Decisions()))
    made_again = SmallRewrites(
        plan.rewrites, parse_graph(big.plan.graph), graph, stacks, big.stages, big.factored,
        big.nodes, big.needs.divisors,
    )  # fmt: skip
    made_again.find()
    rewrites = tuple(made_again.kept)
    padded = rewritten(graph, rewrites)
    factored = factorize(padded)
    gone = dict(_gone_with_blocks(big.nodes, _by_key(padded), stacks))
    kept, lost = _moved(big, stacks, factored, gone)
    lost = [*made_again.lost, *lost]
    targets = {i.target for i in graph.of_kind("parameter")}
    parameters = []
    for parameter in plan.parameters:
        name = stacks.small_path(parameter.name)
        if name is not None and name in targets:
            parameters.append(replace(parameter, name=name))
        elif name is not None:
            lost.append(f"storage of {parameter.name}: the copy has no such parameter")
    activations = [(a, stacks.small_path(a.prefix)) for a in plan.activations]
    items = {}
    for item in big.stages.stages_of:
        small = stacks.small_key(item)
        if small is not None and item not in gone:
            items[small] = item
    decisions = replace(
        big.stages.of_copy(padded, items),
        nodes=tuple(kept),
        parameters=tuple(parameters),
        activations=tuple(replace(a, prefix=p) for a, p in activations if p is not None),
        rewrites=rewrites,
    )
    lower_stages(padded, decisions, factored=factored)
    told = (*stacks.changes(), *dict.fromkeys(gone.values()), *changes)
    return Copy(made, graph, decisions, told, tuple(lost)), stacks


def _gone_with_blocks(
    big: Mapping[str, FlatNode], small: Mapping[str, FlatNode], stacks: Stacks
) -> Iterator[tuple[str, str]]:
    """(key, what is told of it) of operators outside of blocks that came once per dropped block."""
    if not stacks.kept:
        return
    before, after = (Counter(k.partition("#")[0] for k in nodes) for nodes in (big, small))
    for key in big:
        stem = key.partition("#")[0]
        inside = any(part.isdigit() for part in stem.partition(":")[0].split("."))
        if not inside and 0 < after[stem] < before[stem] and key not in small:
            yield key, f"{after[stem]} of {before[stem]} {stem.lstrip(':')}"


def _misfit(big: Big, node: NodeDecision, factored: Factored, small: FlatNode | None) -> str | None:
    """Why an operator of the copy cannot take a decision, or None."""
    if small is None:
        return "the copy has no such operator"
    flat = big.nodes[node.key]
    old = big.factored.rule(flat.function, flat.node)
    new = factored.rule(small.function, small.node)
    for factor, axes in node.factors:
        if not axes:
            continue
        if factor not in new.assignable or _place(old, factor) != _place(new, factor):
            return f"the copy has no factor {factor} there"
        size = big.stages.size(node.key, axes)
        if new.size(factor) % size:
            return f"{factor} = {new.size(factor)} does not divide by {size}"
    return None


def _place(rule: Rule, factor: str) -> tuple[object, ...]:
    """What a factor means: its kind and the dims of operands and results that it is part of."""
    dims = [
        (index, dim)
        for index, tensor in enumerate((*rule.operands, *rule.results))
        for dim, factors in enumerate(tensor)
        if factor in factors
    ]
    return (rule.kind(factor), *dims)


def _mesh_change(big: Big, new: Decisions) -> Iterator[str]:
    """What became of stages, meshes and microbatches."""
    old = big.plan.decisions
    if len(old.stages) != len(new.stages):
        yield f"stages {len(old.stages)} -> {len(new.stages)}"
    meshes = [stage.mesh for stage in old.stages]
    for before, after in dict.fromkeys(zip(meshes, big.stages.meshes, strict=True)):
        if before != after:
            named = " x ".join(f"{axis.name}={axis.size}" for axis in before.axes)
            yield f"mesh {named} -> {' x '.join(str(axis.size) for axis in after.axes)}"
    if old.num_microbatches != new.num_microbatches:
        yield f"microbatches {old.num_microbatches} -> {new.num_microbatches}"
