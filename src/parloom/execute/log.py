"""One line a step: to the console for people, to a JSON-lines file for tools; rank 0 only.

In the file every run begins with a record of its own, told by its `plan_hash`.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from parloom.action_text import stages_text
from parloom.cost.kernels import SPEC
from parloom.cost.measured import Source
from parloom.cost.units import format_bytes, format_count, format_seconds
from parloom.errors import InputError
from parloom.execute.files import is_plan
from parloom.execute.loggers import Guarded
from parloom.ir.expected import Prediction
from parloom.runtime.loss_scale import BACKOFF_FACTOR
from parloom.runtime.spans import ActionSpan

NUM_COMPARED = 3  # lines with the predicted time; the file has it for every step


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What begins a run in the log; `time` is in ISO 8601 with its zone."""

    plan_hash: str
    time: str
    seed: int
    ranks: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did; `items` tokens or samples (`unit`) took `step_s` seconds.

    `predicted_s` is compared with it on the line where `calibrated`: data sheets may be off by many
    times. `memory_bytes` is the peak so far of `memory_of`: this process, or its tensors on a GPU.
    `lr` is the learning rate that the step used, of the first parameter group; `grad_norm` is the
    norm before clipping, where it clips. `loss_scale` is the scale of a float16 step's gradients;
    where they overflowed, the step was `skipped`.
    """

    step: int
    loss: float
    step_s: float
    items: int
    unit: str = "tok"
    memory_bytes: int = 0
    memory_of: str = "process"
    predicted_s: float | None = None
    calibrated: bool = False
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False

    def values(self) -> dict[str, float]:
        """The numbers that it has, by the names that tools group them by."""
        found = {
            "train/loss": self.loss,
            "train/lr": self.lr,
            "train/grad_norm": self.grad_norm,
            "train/loss_scale": self.loss_scale,
            "time/step_s": self.step_s,
            "time/predicted_s": self.predicted_s,
            f"time/{self.unit}_per_s": self.items_per_s,
            "memory/peak_bytes": self.memory_bytes or None,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    @property
    def items_per_s(self) -> float:
        return self.items / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the ranks that have the same stages did in a step: when the first of them ran its
    `actions`, and `waits`, the share of the step in which they waited for other stages (see
    `waiting_share`), their mean. What is `predicted` of it is None where that is from data sheets.
    """

    step: int
    stages: tuple[int, ...]
    waits: float
    predicted: float | None = None
    actions: tuple[ActionSpan, ...] = ()


def waits_line(found: Sequence[StageTimes]) -> str:
    """`waits for other stages: stage 0 21 % (predicted 18 %), stage 1 4 % (predicted 3 %)`."""

    def words(one: StageTimes) -> str:
        beside = "" if one.predicted is None else f" (predicted {one.predicted:.0%})"
        return f"{stages_text(one.stages)} {one.waits:.0%}{beside}"

    return f"waits for other stages, of a step: {', '.join(map(words, found))}"


def last_observed(path: Path, plan_hash: str) -> list[StageTimes]:
    """The last observed step of the last run of a plan in a log.

    Raises `InputError` where the file cannot be read, is no log, or has no such step.
    """
    hashes: set[str] = set()
    found: list[StageTimes] = []
    is_of_plan = False
    for number, line in enumerate(_lines(path), 1):
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise TypeError("no object")
            if "plan_hash" in fields:
                hashes.add(fields["plan_hash"])
                is_of_plan = fields["plan_hash"] == plan_hash
                found = [] if is_of_plan else found
            elif is_of_plan and "actions" in fields:
                spans = tuple(ActionSpan(**span) for span in fields.pop("actions"))
                stages = tuple(fields.pop("stages"))
                of_stage = StageTimes(stages=stages, **fields, actions=spans)
                found = [one for one in found if one.step == of_stage.step] + [of_stage]
        except json.JSONDecodeError:
            raise InputError(f"{path}, line {number}, is no record of a run: no JSON") from None
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}, line {number}, is no record of a run: {error}") from None
    if plan_hash not in hashes:
        raise InputError(
            f"{path} has no run of this plan ({plan_hash}), but of"
            f" {', '.join(sorted(hashes)) or 'none'}: give the log_path of a run of it"
        )
    if not found:
        raise InputError(
            f"{path}: the last run of this plan has no observed step: pipelines observe their third"
            " one, trainer.step(batch, observed=True) any"
        )
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read the log {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"cannot read the log {path}: it is no text in UTF-8") from None


def step_line(record: StepRecord, *, compare: bool = True) -> str:
    """`step 12 loss 2.913 | 412 ms (predicted 398, +3.5 %) | 41.2k tok/s | process 1.2 GiB`.

    Without `compare`, and where it is from data sheets, the prediction is left out.
    """
    unit, factor = ("s", 1.0) if record.step_s >= 10 else ("ms", 1e3)
    time = f"{_number(record.step_s * factor)} {unit}"
    if record.predicted_s and record.calibrated and compare:
        error = (record.step_s / record.predicted_s - 1) * 100
        time += f" (predicted {_number(record.predicted_s * factor)}, {error:+.1f} %)"
    rate = f"{format_count(record.items_per_s)} {record.unit}/s"
    line = f"step {record.step} loss {record.loss:.4g} | {time} | {rate}"
    memory = f"{record.memory_of} {format_bytes(record.memory_bytes)}"
    return f"{line} | {memory}" if record.memory_bytes else line


def prediction_line(prediction: Prediction) -> str:
    """A prediction from data sheets with its band, and how to have a better one."""
    low, high = Source(SPEC, prediction.error).band(prediction.step_s)
    band = f", {format_seconds(low)} to {format_seconds(high)}" if prediction.error else ""
    return (
        f"predicted {format_seconds(prediction.step_s)} a step{band} nine times in ten: from data"
        " sheets, not calibrated, so that steps are not compared with it (`parloom calibrate`)"
    )


def skip_line(step: int, scale: float) -> str:
    """`step 12 skipped: gradients overflowed at loss scale 65536; now 32768`."""
    now = scale * BACKOFF_FACTOR
    return f"step {step} skipped: gradients overflowed at loss scale {scale:g}; now {now:g}"


class StepLog:
    """Writes every record of rank 0 as a line and as JSON; other ranks' logs do nothing.

    A line of the files is written whole and flushed, so a run that dies leaves valid JSON lines.
    """

    def __init__(
        self,
        rank: int,
        paths: Sequence[Path] = (),
        *,
        console: IO[str] | None = None,
        every: int = 1,
        loggers: Sequence[Guarded] = (),
    ) -> None:
        self._rank = rank
        self._console = console
        self._loggers = loggers
        self._every = max(1, every)
        self._to_compare = NUM_COMPARED
        self._waiting: Callable[[], StepRecord] | None = None
        self._files = [_opened(path) for path in paths] if rank == 0 else []

    @property
    def writes(self) -> bool:
        """Whether anything that is logged goes anywhere."""
        return self._rank == 0

    def later(self, record: Callable[[], StepRecord]) -> None:
        """Log a step whose numbers a device may still owe: when the next one comes, or on `flush`.

        `record` waits for the numbers; by then the device has the next step to work on.
        """
        self.flush()
        self._waiting = record

    def flush(self) -> None:
        """Write what `later` left."""
        record, self._waiting = self._waiting, None
        if record is not None:
            self.write(record())

    def begin(self, run: RunRecord, prediction: Prediction | None = None) -> None:
        """Set this run off from those that the file has already.

        How sure a prediction from data sheets is, is said once, on stderr: lines do not compare.
        """
        self._append(asdict(run))
        if self.writes and prediction is not None and prediction.source == SPEC:
            print(prediction_line(prediction), file=self._console or sys.stderr, flush=True)

    def observed(self, found: Sequence[StageTimes]) -> None:
        """Log a step stage by stage; of several say how long they wait for each other."""
        self.flush()
        if self.writes:
            if len(found) > 1:
                print(waits_line(found), file=self._console or sys.stdout, flush=True)
            for one in found:
                self._append(asdict(one))

    def write(self, record: StepRecord) -> None:
        """Log one step."""
        if not self.writes:
            return
        if record.skipped and record.loss_scale is not None:
            line = skip_line(record.step, record.loss_scale)
            print(line, file=self._console or sys.stdout, flush=True)
        if record.step % self._every == 0:
            line = step_line(record, compare=self._to_compare > 0)
            self._to_compare -= 1
            print(line, file=self._console or sys.stdout, flush=True)
        self._append({**asdict(record), "items_per_s": record.items_per_s})
        for logger in self._loggers:
            logger.log(record.step, record.values())

    def _append(self, fields: Mapping[str, Any]) -> None:
        finite = {name: _finite(value) for name, value in fields.items()}
        for file in self._files:
            file.write(json.dumps(finite, allow_nan=False) + "\n")
            file.flush()

    def close(self) -> None:
        self.flush()
        for logger in self._loggers:
            logger.close()
        for file in self._files:
            file.close()
        self._files = []

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(path: Path) -> IO[str]:
    if is_plan(path):
        raise InputError(f"cannot write the log {path}: a plan is there, which would be lost")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the log {path}: {error.strerror}") from None


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
