"""Whether the captured program is what the user's own module does.

A proof compares a plan with the captured program; where capture itself is wrong, both are. So the
module is built once more, in a process of its own, and trained by PyTorch for a few calls: loss,
gradients (and which there are none of), buffers and parameters must be those of the captured
program, and so must the outputs of a call in evaluation mode.

The process is forked before the model is built the first time, so that the two builds share no
state of Python's; a deep copy would share closures.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import replace

from torch import nn

from parloom.capture import capture
from parloom.errors import CaptureError
from parloom.execute.eager_compare import NOT_COMPARED, EagerReport
from parloom.execute.eager_process import Apart, Build
from parloom.ir.factors import site_of
from parloom.ir.graph import Call as BlockCall
from parloom.ir.graph import Graph, Node
from parloom.ir.ops import op_of
from parloom.ir.plan import ModelSource
from parloom.ir.text import print_graph

# Of one forward pass: three training calls on both sides take seconds on one core.
MAX_FLOPS = 10e9
VERIFY_FLOPS = 200e9  # in a proof, which itself takes minutes then
PLAN_TIMEOUT_S, VERIFY_TIMEOUT_S = 50.0, 600.0
MAX_WEIGHTS = 50_000_000  # elements of parameters and buffers, of which there are ten copies
WAYS_ON = (
    "what capture does not see is most often state that forward keeps for a later call, a gradient"
    " that is cut or changed by hand, or a write to a tensor that shares memory: write it as plain"
    " operations on tensors, parameters and buffers"
)


def begin(apart: Apart, build: Build, model: nn.Module) -> None:
    """Start the calls that `check` needs, unless `model`, built here as `build` says, is large."""
    tensors = (*model.parameters(), *model.buffers())
    if sum(t.numel() for t in tensors) <= MAX_WEIGHTS:
        apart.begin(build)


def check(
    apart: "Apart", source: ModelSource, seed: int, graph: Graph, evaluation: str,
    max_flops: float = MAX_FLOPS,
) -> EagerReport:  # fmt: skip
    """Compare the module that `source` names with `graph` and `evaluation`, captured from it.

    A model of more than `max_flops` in a forward pass is compared in small sizes.
    """
    timeout_s = PLAN_TIMEOUT_S if max_flops <= MAX_FLOPS else VERIFY_TIMEOUT_S
    if is_small(graph, max_flops):
        return apart.compare(Build(source, seed), graph, evaluation, timeout_s)
    apart.stop()
    build = Build(source, seed, small=True)
    found = build.copy()
    if found is None:
        return EagerReport(NOT_COMPARED, "it is large, and has no small copy")
    small, text = found
    apart.begin(build)
    try:
        graph = capture(small.model, small.batch, loss=small.loss)
    except CaptureError as error:
        return EagerReport(NOT_COMPARED, f"the small copy: {error}", shrunk=text)
    if not is_small(graph, max_flops):
        return EagerReport(NOT_COMPARED, "it is large, and so is its small copy", shrunk=text)
    evaluation = ""
    with suppress(CaptureError):  # a model may have no evaluation program
        evaluation = print_graph(capture(small.model, small.batch, loss=small.loss, training=False))
    return replace(apart.compare(build, graph, evaluation, timeout_s), shrunk=text)


def is_small(graph: Graph, max_flops: float = MAX_FLOPS) -> bool:
    """Whether training calls of the program take seconds at most."""
    weights = sum(i.value.spec.num_elements for i in graph.inputs if i.kind != "batch")
    return flops(graph) <= max_flops and weights <= MAX_WEIGHTS


def flops(graph: Graph) -> float:
    """Floating-point operations of one forward pass."""
    calls = Counter(item.function for item in graph.main.body if isinstance(item, BlockCall))
    total = 0.0
    for function in (graph.main, *graph.functions):
        specs = function.specs()
        for node in function.body:
            if isinstance(node, Node):
                op, site = op_of(node), site_of(node, specs)
                times = calls[function.name] if function is not graph.main else 1
                total += times * op.flops(site, op.rule(site))
    return total
