"""Parts of a plan file that are there more than once, or in some plans only: what is expected of a
pass, operators' decisions, and what a plan of forward passes serves.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from parloom.errors import InputError
from parloom.ir import plan_schema as schema
from parloom.ir.expected import Prediction
from parloom.ir.plan import Inference, NodeDecision

CHANGED = (
    "the program in this plan is not the one that was captured (its digest differs): decisions may"
    " be edited by hand, programs may not; make a new one with `parloom plan`"
)


def digest(*graphs: str) -> str:
    """Of a plan's programs; it catches accidents, the proof catches everything else."""
    return hashlib.sha256("\n\n".join(graphs).encode()).hexdigest()


def prediction_document(prediction: Prediction | None) -> dict[str, Any] | None:
    """What is expected of a pass."""
    if prediction is None:
        return None
    found: dict[str, Any] = {
        "step_s": prediction.step_s,
        "peak_bytes": prediction.peak_bytes,
        "memory": dict(prediction.memory),
        "source": prediction.source,
        "error": prediction.error,
    }
    if prediction.cores is not None:
        found["cores"] = prediction.cores
    if prediction.peaks:
        found["peaks"] = dict(prediction.peaks)
    if prediction.waits_s:
        found["waits_s"] = list(prediction.waits_s)
    return found


def read_prediction(document: schema.PredictionDocument | None) -> Prediction | None:
    """The same from a file."""
    if document is None:
        return None
    memory = tuple(document.memory.items())
    return Prediction(
        document.step_s,
        document.peak_bytes,
        memory,
        document.source,
        document.error,
        document.cores,
        tuple(document.peaks.items()),
        tuple(document.waits_s),
    )


def nodes_document(nodes: Iterable[NodeDecision]) -> dict[str, dict[str, list[str]]]:
    """The factors of operators that are split, and over which axes."""
    return {n.key: {f: list(axes) for f, axes in n.factors} for n in nodes}


def inference_document(inference: Inference) -> dict[str, Any]:
    """What a plan of forward passes serves."""
    return {
        "new_tokens": inference.new_tokens,
        "cache_bytes": inference.cache_bytes,
        "steps": inference.steps,
        "weights": inference.weights,
        **({"period_s": inference.period_s} if inference.period_s is not None else {}),
        "prefill": prediction_document(inference.prefill),
        "prefill_nodes": nodes_document(inference.prefill_nodes),
        "prefill_sha256": digest(inference.prefill_graph),
        "prefill_graph": inference.prefill_graph.split("\n"),
    }


def read_inference(
    document: schema.InferenceDocument, nodes: tuple[NodeDecision, ...]
) -> Inference:
    """The same from a file, of which `nodes` are read. Raises `InputError` for another program."""
    graph = "\n".join(document.prefill_graph)
    if document.prefill_sha256 != digest(graph):
        raise InputError(CHANGED)
    return Inference(
        document.new_tokens,
        graph,
        nodes,
        read_prediction(document.prefill),
        document.cache_bytes,
        document.steps,
        document.weights,
        document.period_s,
    )
