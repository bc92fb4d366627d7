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
from dataclasses import dataclass, replace

from torch import nn

from parloom.capture import Loaded, capture
from parloom.capture.microbatch import capture_microbatch
from parloom.errors import CaptureError
from parloom.execute.eager_compare import DIFFERS, EQUAL, NOT_COMPARED, EagerReport
from parloom.execute.eager_process import Build, ForkServer
from parloom.ir.factors import site_of
from parloom.ir.graph import Call as BlockCall
from parloom.ir.graph import Graph, Node, widened
from parloom.ir.ops import op_of
from parloom.ir.text import parse_graph, print_graph


@dataclass(frozen=True, slots=True)
class Limits:
    """What is compared in its own sizes: operations of one forward pass, and elements of parameters
    and buffers, of which there are ten copies.
    """

    flops: float
    weights: int
    timeout_s: float


# Three training calls on both sides take seconds on one core; a proof itself takes minutes.
PLAN = Limits(10e9, 50_000_000, 50.0)
VERIFY = Limits(200e9, 200_000_000, 600.0)
HALF, WIDE = ("bfloat16", "float16"), "float32"
ADVICE = (
    "what capture does not see is most often state that forward keeps for a later call, a gradient"
    " that is cut or changed by hand, or a write to a tensor that shares memory: write it as plain"
    " operations on tensors, parameters and buffers"
)


def begin(server: ForkServer, build: Build, loaded: Loaded, limits: Limits) -> None:
    """Start the calls that `check` needs, unless the model, built here as `build` says, is large:
    its operations are known once it is captured, and few models have less than one product of each
    weight with each sample.
    """
    model = loaded.model
    tensors = (*model.parameters(), *model.buffers())
    tables = (nn.Embedding, nn.EmbeddingBag)
    multiplied = sum(
        p.numel() for m in model.modules() if not isinstance(m, tables) for p in m.parameters(False)
    )
    samples = max((t.shape[0] for t in loaded.batch.values() if t.dim()), default=1)
    small = sum(t.numel() for t in tensors) <= limits.weights
    if small and 2 * multiplied * samples <= limits.flops:
        server.begin(build)


def check(
    server: "ForkServer", build: Build, graph: Graph, evaluation: str, limits: Limits
) -> EagerReport:
    """Compare the module that `build` makes with `graph` and `evaluation`, captured from it.

    A larger model is compared in small sizes, and on two microbatches where it is on several.
    """
    if is_small(graph, limits):
        return _compared(server, build, graph, evaluation, limits)
    server.stop()
    count = min(build.split.count, 2)
    build = replace(build, small=True, split=replace(build.split, count=count))
    found = build.copy()
    if found is None:
        return EagerReport(NOT_COMPARED, f"{_size(graph)} and no small copy; {_most(limits)}")
    small, text = found
    server.begin(build)
    try:
        graph = capture_microbatch(small.model, small.batch, count, loss=small.loss)
    except CaptureError as error:
        return EagerReport(NOT_COMPARED, f"the small copy: {error}", shrunk=text)
    if not is_small(graph, limits):
        why = f"{_size(graph)} in its small copy; {_most(limits)}"
        return EagerReport(NOT_COMPARED, why, shrunk=text)
    evaluation = ""
    with suppress(CaptureError):  # a model may have no evaluation program
        evaluation = print_graph(capture(small.model, small.batch, loss=small.loss, training=False))
    return replace(_compared(server, build, graph, evaluation, limits), shrunk=text)


def _compared(
    server: "ForkServer", build: Build, graph: Graph, evaluation: str, limits: Limits
) -> EagerReport:
    """The comparison; in half precision, where one rounding may turn a ReLU or a router, a
    difference counts only where the module in float32 differs from the program in float32, too.
    """
    report = server.compare(build, graph, evaluation, limits.timeout_s)
    if report.outcome != DIFFERS or report.dtype not in HALF:
        return report
    evaluation = print_graph(widened(parse_graph(evaluation), WIDE)) if evaluation else ""
    wide = replace(build, wide=True)
    again = server.compare(wide, widened(graph, WIDE), evaluation, limits.timeout_s)
    if again.outcome != EQUAL:
        return report
    return replace(again, dtype=f"{WIDE} in place of {report.dtype}")


def is_small(graph: Graph, limits: Limits) -> bool:
    """Whether training calls of the program are compared in its own sizes."""
    return flops(graph) <= limits.flops and num_weights(graph) <= limits.weights


def num_weights(graph: Graph) -> int:
    """Elements of parameters, buffers and constants."""
    return sum(i.value.spec.num_elements for i in graph.inputs if i.kind != "batch")


def _size(graph: Graph) -> str:
    return f"it has {num_weights(graph) / 1e6:.0f} M weights, {flops(graph) / 1e9:.0f} GFLOP a pass"


def _most(limits: Limits) -> str:
    most = f"at most {limits.weights / 1e6:.0f} M and {limits.flops / 1e9:.0f} are compared"
    return most if limits is VERIFY else f"{most} here, more in `parloom verify`"


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
