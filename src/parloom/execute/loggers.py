"""Steps in the tools that teams keep their runs in: TensorBoard, Weights & Biases, trackio, MLflow.

A tool is named as `NAME` or `NAME:WHERE` (a folder, project or experiment), and imported then.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from parloom.errors import InputError, nearest, one_line

Settings = Mapping[str, str | int | float]
PROJECT, FOLDER = "parloom", "runs/tensorboard"


class Logger(Protocol):
    """A tool with a run that has begun."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """End the run."""


class TensorBoard:
    """Event files in the folder `where`."""

    def __init__(self, where: str, settings: Settings) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(where or FOLDER)
        self._writer.add_text("plan", f"```json\n{json.dumps(settings, indent=2)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Project:
    """A run in the project `where`, of Weights & Biases or of trackio, whose calls are the same."""

    module = "wandb"

    def __init__(self, where: str, settings: Settings) -> None:
        self._tool: Any = import_module(self.module)
        self._tool.init(project=where or PROJECT, config=dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tool.log(dict(values), step=step)

    def close(self) -> None:
        self._tool.finish()


class Trackio(Project):
    """A run in the project `where` of trackio."""

    module = "trackio"


class MLflow:
    """A run of the experiment `where`."""

    def __init__(self, where: str, settings: Settings) -> None:
        self._tool: Any = import_module("mlflow")
        self._tool.set_experiment(where or PROJECT)
        self._tool.start_run()
        self._tool.log_params(dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tool.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._tool.end_run()


LOGGERS: Mapping[str, tuple[str, Callable[[str, Settings], Logger]]] = {
    # By name: what pip installs, and what begins a run.
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", Project),
    "trackio": ("trackio", Trackio),
    "mlflow": ("mlflow", MLflow),
}


def check_names(names: Sequence[str]) -> None:
    """Raise `InputError` for a tool that is not known."""
    if isinstance(names, str):
        raise InputError(f"loggers: must be a list of names, as [{names!r}]")
    for given in names:
        name, _, _ = str(given).partition(":")
        if name not in LOGGERS:
            raise InputError(f"loggers: no logger {name!r}{nearest(name, LOGGERS)}")


def begun(names: Sequence[str], settings: Settings) -> list["Guarded"]:
    """A run in each tool.

    Raises `InputError` where one is not installed or does not begin.
    """
    found: list[Guarded] = []
    for given in names:
        name, _, where = given.partition(":")
        package, begin = LOGGERS[name]
        try:
            found.append(Guarded(name, begin(where, settings)))
        except ImportError as error:
            _end(found)
            raise InputError(f"logger {name}: {error}; try: pip install {package}") from error
        except Exception as error:  # whatever a tool raises where it cannot begin
            _end(found)
            raise InputError(f"logger {name}: {type(error).__name__}: {one_line(error)}") from error
    return found


def _end(begun_before: Iterable["Guarded"]) -> None:
    """Close what began before another one did not."""
    for logger in begun_before:
        logger.close()


class Guarded:
    """A logger whose failures end no training: it is told once, and gets no more steps."""

    def __init__(self, name: str, logger: Logger) -> None:
        self._name = name
        self._logger: Logger | None = logger

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the numbers of a step on."""
        self._try(lambda logger: logger.log(step, values))

    def close(self) -> None:
        """End the run, once."""
        self._try(lambda logger: logger.close())
        self._logger = None

    def _try(self, call: Callable[[Logger], None]) -> None:
        if self._logger is None:
            return
        try:
            call(self._logger)
        except Exception as error:  # networks, disks, quotas: the tool's, not the model's
            self._logger = None
            said = f"{type(error).__name__}: {one_line(error)}"
            print(f"logger {self._name} failed and gets no more: {said}", file=sys.stderr)
