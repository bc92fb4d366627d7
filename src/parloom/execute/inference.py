"""The programs of an inference plan, and the proof that they are what the model does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from parloom.errors import LayoutError
from parloom.execute.program import (
    CompiledStages,
    compile_stages,
    lowered,
    title_of,
    training_program,
)
from parloom.execute.ranks import fork_ranks
from parloom.execute.reference import evaluate
from parloom.execute.relative import Difference, judged, largest, relative_difference
from parloom.execute.verify import TOLERANCE, VerifyReport, in_double
from parloom.ir.factors import factorize
from parloom.ir.graph import CACHE, Graph, widened
from parloom.ir.lower_stages import LoweredStages, lower_beside
from parloom.ir.plan import Decisions, Plan
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_graph, verify_pcg
from parloom.rewrite.rewrites import as_stored
from parloom.runtime import DistributedComm, Pipeline, Server
from parloom.runtime.generation import DECODE, FORWARD, GENERATED, LOGITS, PREFILL, TOKENS

PROVED_TOKENS = 4  # after each prompt: the first one, and passes at three positions
FLOOR = 1e-2  # of the scale of a tensor
Tensors = Mapping[str, Tensor]


def lowered_programs(plan: Plan, wide: bool = False) -> dict[str, LoweredStages]:
    """The programs of an inference plan by name, the one that has the weights first; `wide` in
    double precision, for proofs.

    Raises `LayoutError` for decisions that do not fit together.
    """
    inference = plan.inference
    assert inference is not None, "a plan for inference"
    first = lowered(plan, wide=wide)
    if not inference.new_tokens:
        return {FORWARD: first}
    graph = as_stored(_graph(inference.prefill_graph, wide), plan.decisions.rewrites)
    decisions, factored = prefill_decisions(plan), factorize(graph)
    try:
        made = lower_beside(graph, decisions, first, factored=factored)
        for pcg in made.pcgs:
            verify_pcg(pcg)
    except LayoutError as error:
        raise LayoutError(f"invalid plan: the program of prompts: {error}") from error
    return {DECODE: first, PREFILL: made}


def all_programs(plan: Plan) -> tuple[LoweredStages, ...]:
    """The lowered programs of a plan, of training or of inference: two where there are prompts."""
    return (lowered(plan),) if plan.inference is None else (*lowered_programs(plan).values(),)


def prefill_decisions(plan: Plan) -> Decisions:
    """What a plan decides of its program of prompts."""
    assert plan.inference is not None, "a plan for inference"
    return replace(plan.decisions, nodes=plan.inference.prefill_nodes, activations=(), rewrites=())


def inference_programs(plan: Plan, wide: bool = False) -> dict[str, CompiledStages]:
    """The same, generated and ready to run."""
    return {
        name: compile_stages(stages, plan.decisions, f"{title_of(plan)}\n{name.capitalize()}.")
        for name, stages in lowered_programs(plan, wide).items()
    }


def source_of_programs(plan: Plan) -> str:
    """The generated source of a plan, of training or of inference."""
    if plan.inference is None:
        return training_program(plan).source
    return "\n\n".join(program.source for program in inference_programs(plan).values())


def _graph(text: str, wide: bool) -> Graph:
    graph = verify_graph(parse_graph(text))
    return widened(graph) if wide else graph


# What one device does.


def generated(
    prefill: Graph, decode: Graph, state: Tensors, prompts: Tensor, new_tokens: int
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The likeliest tokens after each prompt on one device, the logits that each was chosen by, and
    the caches that are left.
    """
    made, logits, caches = list[Tensor](), list[Tensor](), _empty(decode)
    for index in range(new_tokens):
        batch = _batch(prompts, made, index)
        outputs, caches = one_pass(decode if index else prefill, state, batch, caches)
        logits.append(outputs[LOGITS][:, -1])
        made.append(logits[-1].argmax(-1, keepdim=True))
    return torch.cat(made, dim=1), logits, caches


def replayed(
    prefill: Graph, decode: Graph, state: Tensors, prompts: Tensor, tokens: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The logits by which one device chooses each of `tokens`, given those before, and the caches
    that are left.
    """
    logits, caches = list[Tensor](), _empty(decode)
    for index in range(len(tokens)):
        batch = _batch(prompts, tokens, index)
        outputs, caches = one_pass(decode if index else prefill, state, batch, caches)
        logits.append(outputs[LOGITS][:, -1])
    return logits, caches


def _batch(prompts: Tensor, tokens: Sequence[Tensor], index: int) -> dict[str, Tensor]:
    """The inputs of the pass that chooses token number `index`, from 0 on."""
    if not index:
        return {TOKENS: prompts}
    return {TOKENS: tokens[index - 1], GENERATED: torch.tensor(index)}


def _empty(graph: Graph) -> dict[str, Tensor]:
    return {
        e.target: torch.zeros(e.value.spec.shape, dtype=_dtype(e.value.spec.dtype))
        for e in graph.of_kind(CACHE)
    }


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def one_pass(
    graph: Graph, state: Tensors, batch: Tensors, caches: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs of a captured program, and the caches that it leaves."""
    kinds = {"batch": batch, "parameter": state, "buffer": state, CACHE: caches}
    values = {i.value.name: kinds[i.kind][i.target] for i in graph.inputs if i.kind in kinds}
    with torch.no_grad():
        results = evaluate(graph, values)
    return results["outputs"], caches | results["updates"]


# What the ranks do.


Served = tuple[list[Tensor], dict[str, Tensor]]


def _generate_rank(
    pipelines: Mapping[str, Pipeline], state: Tensors, prompts: Tensor, new_tokens: int
) -> Served:
    torch.set_num_threads(1)
    server = Server(pipelines, state, DistributedComm(pipelines[DECODE].mesh))
    made, logits = server.generate(prompts, new_tokens)
    return [*logits, made], server.caches()


def _forward_rank(pipelines: Mapping[str, Pipeline], state: Tensors, batch: Tensors) -> Served:
    torch.set_num_threads(1)
    server = Server(pipelines, state, DistributedComm(pipelines[FORWARD].mesh))
    return [], server.run(FORWARD, batch)


def verify_inference(
    plan: Plan,
    tensors: Tensors,
    batch: Tensors,
    *,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Prove that the generated programs on forked ranks are the captured ones on one device, in
    double precision: logits and tokens of several passes, and what is left in the caches.
    """
    assert plan.inference is not None, "a plan for inference"
    state = {name: in_double(t) for name, t in tensors.items()}
    given = {name: in_double(t) for name, t in batch.items()}
    programs = inference_programs(plan, wide=True)
    pipelines = {name: program.pipeline for name, program in programs.items()}
    ranks = next(iter(pipelines.values())).num_ranks
    graph = _graph(plan.graph, wide=True)
    fork = partial(fork_ranks, ranks, timeout_s=timeout_s, say=say)
    count = min(PROVED_TOKENS, plan.inference.new_tokens)
    if count:
        prompts = given[TOKENS]
        say(f"generating {count} tokens on {ranks} ranks")
        parts = fork(_generate_rank, pipelines, state, prompts, count)
        say("the same on one device, to compare with")
        prefill = _graph(plan.inference.prefill_graph, wide=True)
        made, logits, caches = generated(prefill, graph, state, prompts, count)
        names = [*(f"logits of token {n}" for n in range(1, count + 1)), "tokens"]
        expected = [*zip(names, [*logits, made], strict=True), *_after(caches, count)]
    else:
        names = []
        say(f"one pass on {ranks} ranks")
        parts = fork(_forward_rank, pipelines, state, given)
        outputs, _ = one_pass(graph, state, given, {})
        expected = [(f"output {name}", value) for name, value in outputs.items()]
    found = [[*zip(names, listed, strict=True), *_named(rest, count)] for listed, rest in parts]
    return _judged(expected, found, ranks, max(1, count))


def _after(caches: Tensors, count: int) -> list[tuple[str, Tensor]]:
    return [(f"{name} after {count} tokens", value) for name, value in caches.items()]


def _named(rest: Tensors, count: int) -> list[tuple[str, Tensor]]:
    return _after(rest, count) if count else [(f"output {n}", v) for n, v in rest.items()]


def _judged(
    expected: Sequence[tuple[str, Tensor]],
    found: Sequence[Sequence[tuple[str, Tensor]]],
    ranks: int,
    passes: int,
) -> VerifyReport:
    """Every rank has the whole of everything: each is compared."""
    differences = []
    for name, value in expected:
        per_rank = [dict(own).get(name) for own in found]
        worst = largest(relative_difference(value, own, FLOOR) for own in per_rank)
        differences.append(Difference(name, worst))
    judgement = judged(differences, TOLERANCE)
    first = None if judgement.first is None else str(judgement.first)
    return VerifyReport(
        first is None,
        judgement.worst,
        judgement.worst_tensor,
        first,
        TOLERANCE,
        judgement.num_tensors,
        ranks,
        passes,
        of="passes" if passes > 1 else "pass",
    )
