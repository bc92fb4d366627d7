"""The proof of a saved plan: its model is built anew, captured, and compared with its program."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import psutil
import torch
from torch import Tensor

from parloom.capture import load_abstract, parameters_of
from parloom.capture.ambient import check_settings
from parloom.capture.microbatch import split_of
from parloom.cost.units import format_bytes
from parloom.errors import LaunchError
from parloom.execute.eager import PLAN, VERIFY, begin, check
from parloom.execute.eager_process import Build, ForkServer
from parloom.execute.ranks import RankError
from parloom.execute.same_model import check_program, check_tensors
from parloom.execute.shrink import require_memory, shrink
from parloom.execute.verify import VerifyReport, verify
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph


def prove(plan: Plan, *, small: bool, progress: Callable[[str], None]) -> VerifyReport:
    """Prove on this CPU that the plan's program equals the model on one device, or with `small`
    that a small copy of it does.

    Raises `FingerprintError` where the model has changed since the plan was made.
    """
    with ForkServer() as server:
        return _prove(plan, server, small=small, progress=progress)


def _prove(
    plan: Plan, server: ForkServer, *, small: bool, progress: Callable[[str], None]
) -> VerifyReport:
    source = plan.source
    progress(f"building {source.spec}")
    build = partial(
        load_abstract, batch=source.batch, seq=source.seq, dtype=source.dtype, seed=plan.seed
    )
    loaded = build(source.spec)
    if not small and any(p.is_meta for p in loaded.model.parameters()):
        require_memory(loaded.model, source.spec)
        loaded = build(source.spec, limit=None)
    graph = parse_graph(plan.graph)
    check_settings(plan.settings)
    check_tensors(loaded.model, plan, graph, loaded.batch)
    limits = PLAN if small else VERIFY
    eager_build = Build(source, plan.seed, split=split_of(graph, loaded.batch))
    begin(server, eager_build, loaded, limits)
    torch.set_num_threads(1)  # the ranks are forked
    progress("capturing it")
    start = time.perf_counter()
    check_program(loaded.model, loaded.batch, loaded.loss, plan, graph)
    progress(f"captured in {time.perf_counter() - start:.1f} s: it is the planned one")
    progress("comparing it with the module itself")
    eager = check(server, eager_build, graph, plan.evaluation_graph, limits)
    progress(f"compared in {eager.seconds:.1f} s")
    text = ""
    if small:
        progress("building a small copy")
        copy = shrink(plan, loaded)
        plan, tensors, batch, text = copy.plan, copy.tensors, copy.batch, copy.text
    else:
        tensors, batch = parameters_of(loaded.model, graph), loaded.batch
    for line in _memory_words(plan, tensors, small):
        progress(line)
    try:
        return replace(verify(plan, tensors, batch, say=progress), shrunk=text).with_eager(eager)
    except RankError as error:
        if not error.killed:
            raise
        there = psutil.virtual_memory()
        free = f"{format_bytes(there.available)} of {format_bytes(there.total)} are free now"
        way = "close what else needs it" if small else "prove a small copy with --shrink"
        ranks = plan.decisions.num_ranks
        raise LaunchError(
            f"{error}: most likely memory ran out, for all {ranks} ranks run on this machine, in"
            f" float64 ({free}); {way}"
        ) from error


def _memory_words(plan: Plan, tensors: Mapping[str, Tensor], small: bool) -> Iterator[str]:
    """A warning where all ranks together, in float64, may need more memory than is free.

    Of a small copy nothing was predicted.
    """
    sizes = [t.element_size() for t in tensors.values() if t.is_floating_point()]
    if small or plan.prediction is None or not sizes:
        return
    ranks, free = plan.decisions.num_ranks, psutil.virtual_memory().available
    needed = plan.prediction.peak_bytes * ranks * 8 // min(sizes)
    if needed > free:
        yield (
            f"{ranks} ranks in float64 may need {format_bytes(needed)} on this machine,"
            f" {format_bytes(free)} are free; --shrink proves a small copy"
        )
