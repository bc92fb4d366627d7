"""The proof of a saved inference plan: its model is built anew, captured, and compared."""

from collections.abc import Callable
from dataclasses import replace

import psutil
import torch
from torch import nn

from parloom.capture import Loaded, fingerprint, load_abstract, load_model
from parloom.capture.ambient import check_settings
from parloom.capture.inference import capture_inference
from parloom.capture.quantized import state_of
from parloom.cost.units import format_bytes
from parloom.errors import FingerprintError, InputError
from parloom.execute.eager import VERIFY
from parloom.execute.eager_inference import compare_inference, drawn
from parloom.execute.inference import verify_inference
from parloom.execute.shrink import shrink
from parloom.execute.verify import VerifyReport
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph, print_graph


def prove_inference(plan: Plan, *, small: bool, progress: Callable[[str], None]) -> VerifyReport:
    """Prove on this CPU that the plan's programs are the model on one device, and what it does, or
    with `small` that those of a small copy are.

    Raises `FingerprintError` where the model has changed since the plan was made.
    """
    inference, source = plan.inference, plan.source
    assert inference is not None, "a plan for inference"
    built = {"batch": source.batch, "seq": source.seq, "dtype": source.dtype, "seed": plan.seed}
    progress(f"building {source.spec}")
    loaded = load_abstract(source.spec, **built, limit=0)  # type: ignore[arg-type]
    if not small:
        _require_memory(loaded.model, source.spec)
    check_settings(plan.settings)
    torch.set_num_threads(1)  # the ranks are forked
    if fingerprint(loaded.model, loaded.batch) != plan.fingerprint:
        raise FingerprintError(f"the plan was made for another model than {source.spec} is now")
    progress("capturing it")
    graph, prefill = capture_inference(loaded, inference.new_tokens, inference.weights)
    made = print_graph(graph), "" if prefill is None else print_graph(prefill)
    if made != (plan.graph, inference.prefill_graph):
        raise FingerprintError(
            f"the plan was made for another model: {source.spec} now captures to other programs;"
            " plan again"
        )
    if small:
        progress("building a small copy")
        copy = shrink(plan, loaded)
        plan, loaded, text = copy.plan, copy.loaded, copy.text
    else:
        # Built anew: a trace may leave something in a model.
        loaded, text = load_model(source.spec, **built), ""  # type: ignore[arg-type]
    report = _proved(plan, loaded, progress)
    rounded = f"weights rounded to {inference.weights}" if inference.weights else ""
    return replace(report, shrunk=text, rounded=rounded)


def _proved(plan: Plan, loaded: Loaded, progress: Callable[[str], None]) -> VerifyReport:
    """Compare the programs of a plan with the module, and on ranks."""
    inference = plan.inference
    assert inference is not None, "a plan for inference"
    graph = parse_graph(plan.graph)
    prefill = parse_graph(inference.prefill_graph) if inference.prefill_graph else None
    progress("comparing it with the module itself")
    drawn(loaded.model)  # once more in the comparison: no parameter is all alike any more
    graphs = (graph,) if prefill is None else (graph, prefill)
    tensors = {name: t.clone() for name, t in state_of(loaded.model, *graphs).items()}
    eager = compare_inference(lambda: loaded, graph, prefill, inference.new_tokens, VERIFY)
    read = {entry.target for program in graphs for entry in program.of_kind("batch")}
    batch = {name: tensor for name, tensor in loaded.batch.items() if name in read}
    report = verify_inference(plan, tensors, batch, say=progress)
    return report.with_eager(eager)


def _require_memory(model: nn.Module, spec: str) -> None:
    """Raise `InputError` where weights in double precision, on one device and on the ranks, are
    more than this machine's memory.
    """
    weights = sum(p.numel() for p in model.parameters())
    needed, there = 2 * 8 * weights, psutil.virtual_memory().total
    if needed > there:
        raise InputError(
            f"{spec} has {weights:,} parameters; proving it needs {format_bytes(needed)}, this"
            f" machine has {format_bytes(there)}; prove a small copy with --shrink"
        )
