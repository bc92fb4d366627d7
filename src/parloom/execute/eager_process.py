"""A process in which modules run apart from the one that captures them.

It is forked before a model is built, and forks one process for each module. The messages to it are
`("begin", build, again)`, `("stop",)` and `("compare", (training, evaluation), timeout_s)`, which
alone has an answer.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch

from parloom.capture import Loaded, load_abstract, load_model
from parloom.capture.microbatch import WHOLE, Split
from parloom.errors import ParloomError
from parloom.execute.eager_calls import NotComparedError, training_calls
from parloom.execute.eager_compare import NOT_COMPARED, EagerReport, compare
from parloom.execute.shrink import small_model
from parloom.ir.graph import Graph
from parloom.ir.plan import ModelSource
from parloom.ir.text import print_graph

Make = Callable[[], Loaded]
TIMEOUT_S = 600.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Build:
    """How a model is built again, from its source, `small` in small sizes, in float32 where it is
    `wide`; its batch is cut as `split` says.
    """

    source: ModelSource
    seed: int
    small: bool = False
    wide: bool = False
    split: Split = WHOLE

    def __call__(self) -> Loaded:
        """The model with its weights."""
        loaded = self._own()
        if not self.wide:
            return loaded
        batch = {n: t.float() if t.is_floating_point() else t for n, t in loaded.batch.items()}
        return replace(loaded, model=loaded.model.float(), batch=batch)

    def _own(self) -> Loaded:
        """The model in its own dtypes."""
        if self.small:
            found = self.copy()
            assert found is not None, "it was made once"
            return found[0]
        source = self.source
        return load_model(
            source.spec, batch=source.batch, seq=source.seq, dtype=source.dtype, seed=self.seed
        )

    def copy(self) -> tuple[Loaded, str] | None:
        """The model in small sizes, and what shrank; None where it stays big."""
        source = self.source
        # Of the whole model only shapes are looked at.
        loaded = load_abstract(
            source.spec, batch=source.batch, seq=source.seq, dtype=source.dtype, seed=self.seed,
            limit=0,
        )  # fmt: skip
        return small_model(source, loaded, seed=self.seed, num_microbatches=self.split.count)


class ForkServer(AbstractContextManager["ForkServer"]):
    """A process that has seen nothing of the model; each module runs in a fork of it.

    Enter it before the model is built. A fork copies the calling thread only, and the module
    computes on one thread.
    """

    def __enter__(self) -> "ForkServer":
        self._process: BaseProcess | None = None
        self._begun: Make | None = None
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

    def begin(self, build: Make) -> None:
        """Start the calls of the module that `build` makes, while others capture it."""
        self._begun = build
        if self._process is not None:
            again = isinstance(build, Build) and build.source.is_factory and not build.small
            self._end.send_bytes(pickle.dumps(("begin", build, again)))

    def stop(self) -> None:
        """End the calls that were begun."""
        if self._process is not None and self._begun is not None:
            self._end.send_bytes(pickle.dumps(("stop",)))
        self._begun = None

    def compare(
        self, build: Make, graph: Graph, evaluation: str, timeout_s: float = TIMEOUT_S
    ) -> EagerReport:
        """The module, beside the programs captured from it; waits for its calls."""
        if self._process is None:
            return EagerReport(NOT_COMPARED, "processes cannot be forked on this system")
        if self._begun != build:
            self.begin(build)
        programs = print_graph(graph), evaluation
        try:
            self._end.send_bytes(pickle.dumps(("compare", programs, timeout_s)))
            report: EagerReport = pickle.loads(self._end.recv_bytes())
        except (EOFError, OSError):  # ended by the system, as it does where memory runs out
            report = EagerReport(NOT_COMPARED, "the process that runs modules was ended")
        self._begun = None
        return report


class _Module:
    """The calls of one module, in a process of their own."""

    def __init__(self, build: Make, again: bool, *, other: bool) -> None:
        fork = multiprocessing.get_context("fork")
        self._end, there = fork.Pipe()
        self._process = fork.Process(target=_run, args=(there, build, again, other))
        _start(self._process)
        there.close()

    def receive(self, timeout_s: float) -> Any:
        """What the process sends next, or the report that nothing comes."""
        try:
            if self._end.poll(max(timeout_s, 0)):
                return pickle.loads(self._end.recv_bytes())
        except (EOFError, OSError):
            self._process.join()
            reason = f"its process ended with exit code {self._process.exitcode}"
            return EagerReport(NOT_COMPARED, reason)
        return EagerReport(NOT_COMPARED, "its calls take too long")

    def send(self, message: Any) -> None:
        with suppress(OSError):  # `receive` says that it is gone
            self._end.send_bytes(pickle.dumps(message))

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(end: Connection) -> None:
    """Answer until the other side is gone."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    module: _Module | None = None
    begun: tuple[Make, bool] | None = None
    while True:
        try:
            what, *given = pickle.loads(end.recv_bytes())
        except (EOFError, OSError):
            return
        if what == "compare":
            assert module is not None, "its calls were begun"
            assert begun is not None
            programs, timeout_s = given
            deadline = time.monotonic() + timeout_s
            ready = module.receive(timeout_s)
            if isinstance(ready, NotComparedError):
                # Samples in another order may mean nothing, as offsets of bags.
                module.stop()
                module = _Module(*begun, other=False)
                ready = module.receive(deadline - time.monotonic())
            if isinstance(ready, NotComparedError):
                ready = EagerReport(NOT_COMPARED, str(ready))
            if not isinstance(ready, EagerReport):
                module.send(programs)
                ready = module.receive(deadline - time.monotonic())
            end.send_bytes(pickle.dumps(ready))
        if module is not None:
            module.stop()
            module = None
        if what == "begin":
            build, again = given
            begun = build, again
            module = _Module(build, again, other=True)


def _run(there: Connection, build: Make, again: bool, other: bool) -> None:
    """The life of a module's process: its calls, then programs beside them."""
    _end_with_parent()
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # forward may print
        os.dup2(nowhere, stream)
    started = time.monotonic()
    message: Any
    try:
        split = build.split if isinstance(build, Build) else WHOLE
        calls = list(training_calls(build, other=other, again=again, split=split))
        there.send_bytes(pickle.dumps("ready"))
        training, evaluation = pickle.loads(there.recv_bytes())
        message = compare(calls, training, evaluation, started)
    except NotComparedError as error:
        message = error
    except (ParloomError, EOFError) as error:
        message = NotComparedError(str(error))
    except Exception as error:  # sent home: the parent says that nothing was compared
        line = (str(error).strip() or "no message").splitlines()[0]
        message = NotComparedError(f"{type(error).__name__}: {line}")
    there.send_bytes(pickle.dumps(message))


def _start(process: BaseProcess) -> None:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads in a forking process; the fork uses none of the parent's.
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        process.start()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        with suppress(OSError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
