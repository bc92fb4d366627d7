"""Whether the captured program is what the user's own module does.

A proof compares a plan with the captured program; where capture itself is wrong, both are. So the
module is built once more, in a process of its own, and trained for a few calls without any of
parloom's code around it: loss, gradients (and which there are none of), buffers and parameters must
be those of the captured program, and so must the outputs of a call in evaluation mode.

The process is forked before the model is built the first time, so that the two builds share no
state of Python's; a deep copy would share closures.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections import Counter
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

import torch

from parloom.capture import Loaded, capture, load_abstract, load_model
from parloom.errors import CaptureError, ParloomError
from parloom.execute.draws import ReplayError
from parloom.execute.eager_calls import (
    Build,
    Compared,
    NotComparedError,
    compare_call,
    tolerance_of,
    training_calls,
)
from parloom.execute.shrink import small_model
from parloom.ir.factors import site_of
from parloom.ir.graph import Call as BlockCall
from parloom.ir.graph import Graph, Node
from parloom.ir.ops import op_of
from parloom.ir.plan import ModelSource
from parloom.ir.text import parse_graph, print_graph

EQUAL, DIFFERS, NOT_COMPARED = "equal", "differs", "not compared"
# Of one forward pass: three training calls on both sides take seconds on one core.
MAX_FLOPS = 10e9
MAX_WEIGHTS = 50_000_000  # elements of parameters and buffers, of which there are several copies
TIMEOUT_S = 600.0
WAYS_ON = (
    "what capture does not see is most often state that forward keeps for a later call, a gradient"
    " that is cut or changed by hand, or a write to a tensor that shares memory: write it as plain"
    " operations on tensors, parameters and buffers"
)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class EagerReport:
    """How the captured program compares with the module: `outcome`, and why.

    `worst` is the largest relative difference, in `worst_tensor`; `difference` the first tensor
    above the tolerance; `draws` the number of random draws that both were given; `shrunk` says how
    the model was made smaller for it.
    """

    outcome: str
    reason: str = ""
    difference: str = ""
    worst: float = 0.0
    worst_tensor: str = ""
    dtype: str = ""
    tolerance: float = 0.0
    calls: int = 0
    num_tensors: int = 0
    draws: int = 0
    shrunk: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line, the same on every machine: without measured numbers where it is equal."""
        shrunk = f" (shrunk: {self.shrunk})" if self.shrunk else ""
        if self.outcome == NOT_COMPARED:
            return f"not compared with the module itself{shrunk}: {self.reason}"
        draws = f", {self.draws} random draws replayed" if self.draws else ""
        what = f"{self.calls} calls, {self.dtype}, limit {self.tolerance:.0e}{draws}{shrunk}"
        if self.outcome == EQUAL:
            return f"the captured program equals the module itself ({what})"
        return f"the captured program is not what the module does: {self.difference} ({what})"


def compare(build: Build, training: str, evaluation: str) -> EagerReport:
    """Run the module that `build` makes, and both captured programs (as text) beside it.

    `evaluation` may be empty.
    """
    started = time.monotonic()
    graph = parse_graph(training)
    dtype, tolerance = tolerance_of(graph)
    report = EagerReport(EQUAL, dtype=dtype, tolerance=tolerance)
    try:
        try:
            found = _all_calls(build, graph, evaluation, tolerance, permuted=True)
        except NotComparedError:  # samples in another order may mean nothing, as offsets of bags
            found = _all_calls(build, graph, evaluation, tolerance, permuted=False)
    except (NotComparedError, ReplayError, ParloomError) as error:
        kind = "random draws could not be replayed: " if isinstance(error, ReplayError) else ""
        return replace(report, outcome=NOT_COMPARED, reason=f"{kind}{error}")
    compared, draws = found
    worst = max(compared, key=lambda c: (c.worst != c.worst, c.worst))
    first = next((c.first for c in compared if c.first is not None), None)
    return replace(
        report,
        outcome=EQUAL if first is None else DIFFERS,
        difference=str(first or ""),
        worst=worst.worst,
        worst_tensor=worst.worst_tensor,
        calls=len(compared),
        num_tensors=sum(c.num_tensors for c in compared),
        draws=draws,
        seconds=time.monotonic() - started,
    )


def _all_calls(
    build: Build, graph: Graph, evaluation: str, tolerance: float, *, permuted: bool
) -> tuple[list[Compared], int]:
    compared: list[Compared] = []
    draws = 0
    calls = training_calls(build, graph, permuted=permuted)
    for number, call in enumerate(calls, 1):
        if call.training:
            compared.append(compare_call(graph, call, f"in call {number}", tolerance))
        elif evaluation:
            other = parse_graph(evaluation)
            compared.append(compare_call(other, call, "in evaluation", tolerance))
        draws += len(call.draws)
        if compared[-1].first is not None:
            break
    return compared, draws


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


def check(
    apart: "Apart", source: ModelSource, seed: int, graph: Graph, evaluation: str, *, whole: bool
) -> EagerReport:
    """Compare the module that `source` names with `graph` and `evaluation`, captured from it.

    Unless `whole`, a model for which that would take more than seconds is compared in small sizes.
    """
    if whole or is_small(graph):
        return apart.compare(partial(_whole, source, seed), graph, evaluation)
    found = small_copy(source, seed)
    if found is None:
        return EagerReport(NOT_COMPARED, "it is large, and has no small copy")
    small, text = found
    try:
        graph = capture(small.model, small.batch, loss=small.loss)
    except CaptureError as error:
        return EagerReport(NOT_COMPARED, f"the small copy: {error}", shrunk=text)
    if not is_small(graph):
        return EagerReport(NOT_COMPARED, "it is large, and so is its small copy", shrunk=text)
    with suppress(CaptureError):  # a model may have no evaluation program
        evaluation = print_graph(capture(small.model, small.batch, loss=small.loss, training=False))
    return replace(apart.compare(partial(_small, source, seed), graph, evaluation), shrunk=text)


def is_small(graph: Graph) -> bool:
    """Whether training calls of the program take seconds at most."""
    weights = sum(i.value.spec.num_elements for i in graph.inputs if i.kind != "batch")
    return flops(graph) <= MAX_FLOPS and weights <= MAX_WEIGHTS


def small_copy(source: ModelSource, seed: int) -> tuple[Loaded, str] | None:
    """The model built again, in small sizes, and what shrank; None where it cannot be."""
    # Of the whole model only shapes are looked at.
    loaded = load_abstract(
        source.spec, batch=source.batch, seq=source.seq, dtype=source.dtype, seed=seed, limit=0
    )
    return small_model(source, loaded, seed=seed)


def _small(source: ModelSource, seed: int) -> Loaded:
    found = small_copy(source, seed)
    assert found is not None, "it was made once"
    return found[0]


def _whole(source: ModelSource, seed: int) -> Loaded:
    return load_model(
        source.spec, batch=source.batch, seq=source.seq, dtype=source.dtype, seed=seed
    )


class Apart(AbstractContextManager["Apart"]):
    """A process that has seen nothing of the model; each request runs in a fork of it.

    Enter it before the model is built. A fork copies the calling thread only, and the requests
    compute on one thread.
    """

    def __enter__(self) -> "Apart":
        self._process: BaseProcess | None = None
        if "fork" not in multiprocessing.get_all_start_methods():
            return self
        fork = multiprocessing.get_context("fork")
        self._end, other = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(other,))
        _start(self._process)
        other.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        self._end.close()
        self._process.kill()
        self._process.join()

    def compare(
        self, build: Build, graph: Graph, evaluation: str, timeout_s: float = TIMEOUT_S
    ) -> EagerReport:
        """`compare`, in that process; `build` travels there by pickle."""
        if self._process is None:
            return EagerReport(NOT_COMPARED, "processes cannot be forked on this system")
        request = (build, print_graph(graph), evaluation)
        self._end.send_bytes(pickle.dumps((timeout_s, request)))
        report: EagerReport = pickle.loads(self._end.recv_bytes())
        return report


def _start(process: BaseProcess) -> None:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads in a forking process; the fork uses none of the parent's.
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        process.start()


def _serve(end: Connection) -> None:
    """Answer requests until the other side is gone."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    fork = multiprocessing.get_context("fork")
    while True:
        try:
            timeout_s, request = pickle.loads(end.recv_bytes())
        except (EOFError, OSError):
            return
        here, there = fork.Pipe(duplex=False)
        process = fork.Process(target=_answer, args=(there, request))
        _start(process)
        there.close()
        end.send_bytes(_answered(here, process, timeout_s))


def _answered(here: Connection, process: BaseProcess, timeout_s: float) -> bytes:
    """The fork's answer, or why there is none."""
    answer: bytes | None = None
    reason = f"it took longer than {timeout_s:g} s"
    if here.poll(timeout_s):
        try:
            answer = here.recv_bytes()
        except EOFError:
            process.join()
            reason = f"its process ended with exit code {process.exitcode}"
    if process.is_alive() and answer is None:
        process.kill()
    process.join()
    return answer or pickle.dumps(EagerReport(NOT_COMPARED, reason))


def _answer(there: Connection, request: tuple[Build, str, str]) -> None:
    _end_with_parent()
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # forward may print
        os.dup2(nowhere, stream)
    try:
        report = compare(*request)
    except Exception as error:  # sent home: the parent says that nothing was compared
        line = (str(error).strip() or "no message").splitlines()[0]
        report = EagerReport(NOT_COMPARED, f"{type(error).__name__}: {line}")
    there.send_bytes(pickle.dumps(report))


def _end_with_parent() -> None:
    if sys.platform == "linux":
        with suppress(OSError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
