"""A step as a trace for Perfetto: as it is simulated, and beside it as it ran."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from parloom.cost.timeline import Timeline
from parloom.errors import InputError
from parloom.execute.files import check_file, write_atomic
from parloom.execute.log import last_observed
from parloom.execute.machine import machine_of
from parloom.execute.program import lowered
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_hash
from parloom.report.observed import observed_timeline
from parloom.report.trace import chrome_trace
from parloom.report.words import process_names

Say = Callable[[str], None]
ADVICE = "choose another file with --trace"


def write_trace(
    timeline: Timeline, path: str | Path, *names: str, observed: Timeline | None = None
) -> Path:
    """Write a Chrome trace of `timeline`, whose processes are called `names`, and of the same
    processes as they were observed; whole or not at all.

    Raises `InputError` where the system refuses.
    """
    return write_atomic(Path(path), chrome_trace(timeline, names, observed), ADVICE)


@contextmanager
def traced(
    plan: Plan, path: str | Path | None, say: Callable[[str], None]
) -> Iterator[Path | None]:
    """Inside, a run of `plan` writes a log to the file that is given; at the end its observed step
    is at `path` as a trace, beside the simulated one. None traces nothing.
    """
    if path is None or int(os.environ.get("RANK", "0")):
        yield None
        return
    check_file(Path(path), ADVICE)  # before hours of training
    with TemporaryDirectory(prefix="parloom-trace-") as folder:
        log = Path(folder) / "run.jsonl"
        yield log
        try:
            found = last_observed(log, plan_hash(plan))
        except InputError:
            say(f"no trace {path}: the run ended before its third step, which is the traced one")
            return
    played = machine_of(plan).play(lowered(plan), plan.decisions, plan.optimizer)
    beside = observed_timeline([own.actions for own in found])
    write_trace(played, path, *process_names(plan.decisions), observed=beside)
    say(f"trace of step {found[0].step} {path}: open it in ui.perfetto.dev")
