"""The forward pass of a model by itself: its outputs, nothing that is compared with labels."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from parloom.capture.build import capture_flat, without_covered, without_unused_constants
from parloom.capture.check import check_weights
from parloom.capture.program import arguments_of
from parloom.capture.quantized import quantized
from parloom.errors import CaptureError
from parloom.ir.fold import fold
from parloom.ir.graph import Graph, without_gradients
from parloom.ir.naming import readable
from parloom.ir.simplify import without_dead_nodes
from parloom.ir.stages import operands

LABELS = "labels"


def capture_forward(
    model: nn.Module, batch: Mapping[str, Tensor], weights: str | None = None
) -> Graph:
    """What the model makes of a batch besides a loss; what it needs for that alone is left out.

    Raises: CaptureError where the model cannot be traced, or makes nothing but a loss.
    """
    check_weights(model)
    flat, classes = capture_flat(model, batch, training=False)
    if not flat.outputs:
        raise CaptureError(
            f"{type(model).__name__} returns its loss alone, and inference needs an output: return"
            " it beside the loss, or plan from a factory without one (file.py:factory)"
        )
    returned = tuple(dict.fromkeys(value for _, value in (*flat.outputs, *flat.updates)))
    graph = replace(flat, loss=None, main=replace(flat.main, outputs=returned))
    graph = without_unread(without_unused_constants(without_dead_nodes(graph)))
    (graph,) = quantized([graph], weights)
    return without_gradients(readable(without_covered(fold(graph, classes))))


def asked_of(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch without its labels, where the model can do without them."""
    less = {name: tensor for name, tensor in batch.items() if name != LABELS}
    try:
        arguments_of(model, less, None)
    except CaptureError:
        return dict(batch)
    return less


def without_unread(graph: Graph) -> Graph:
    """The graph without entries of the batch that nothing reads."""
    read = {name for item in graph.main.body for name in operands(item)} | {*graph.main.outputs}
    inputs = tuple(i for i in graph.inputs if i.kind != "batch" or i.value.name in read)
    main = replace(graph.main, inputs=tuple(i.value for i in inputs))
    return replace(graph, inputs=inputs, main=main)
