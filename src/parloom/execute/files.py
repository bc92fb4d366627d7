"""Files on disk: whole or not at all."""

import contextlib
import hashlib
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from parloom.cost.clusters import resolve_cluster
from parloom.errors import InputError, ParloomError
from parloom.execute.consistent import check_results
from parloom.execute.optimizers import named_optimizer
from parloom.input_files import MIB, read_input
from parloom.ir.plan import FORMAT, NO_OPTIMIZER, Plan
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.regular_parts import used_cluster
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_graph

ELSEWHERE = "choose another folder with --out"
BEGINNING = 200  # bytes of a file that say what it is
MOST_PLAN_BYTES = 64 * MIB  # a program of a thousand layers has two
# What must not be lost to an answer about it, by words of its beginning.
KINDS = (
    (f'"{FORMAT}"'.encode(), "a plan"),
    (b'"parloom_calibration"', "a calibration"),
    (b'{"plan_hash"', "the log of a run"),
)


def check_folder(folder: Path, advice: str = ELSEWHERE) -> None:
    """Raise `InputError` unless files can be written to `folder`; one that is not there stays so.

    Asked before work whose result would have nowhere to go.
    """
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (folder, *folder.parents) if path.exists())
        raise InputError(f"cannot save in {folder}: {file} is not a folder; {advice}") from None
    except OSError as error:
        why = f"not writable ({error.strerror or error})"
        raise InputError(f"cannot save in {folder}: {why}; {advice}") from None
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def check_file(path: Path, advice: str = ELSEWHERE) -> None:
    """Raise `InputError` unless a file that is no plan can be written to `path`; what is there
    stays as it is.
    """
    _check_there(path, b"", advice)
    check_folder(path.parent, advice)


def _check_there(path: Path, data: bytes, advice: str) -> None:
    """Raise `InputError` where `data` must not take the place of what is at `path`: a folder or a
    device, which a rename would replace, or a plan or a log that `data` is none of.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; {advice}")
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}: it is no regular file; {advice}")
    kind = _kind_of(_beginning(path))
    if kind and kind != _kind_of(data[:BEGINNING]):
        raise InputError(f"cannot write {path}: {kind} is there, which would be lost; {advice}")


def _kind_of(beginning: bytes) -> str:
    return next((kind for mark, kind in KINDS if mark in beginning), "")


def _beginning(path: Path) -> bytes:
    """The first bytes of a file; none of one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(BEGINNING)
    except OSError:
        return b""


def default_folder(model: str, cluster: str, plan: Plan) -> Path:
    """`runs/<model>-<cluster>-<method>-<id>`: the same plan has the same folder."""
    names = (Path(model).name, Path(cluster).stem if "/" in cluster else cluster, plan.method)
    words = [re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") for name in names]
    return Path("runs") / "-".join([*words, short_digest(plan)])


def short_digest(plan: Plan) -> str:
    """What tells the folders of plans apart."""
    return hashlib.sha256(plan_to_json(plan).encode("utf-8")).hexdigest()[:8]


def write_atomic(path: Path, content: str | bytes, advice: str = ELSEWHERE) -> Path:
    """Write `content` so that `path` is at any moment the old file or the whole new one.

    Makes the folder when it is missing. Raises `InputError` with `advice` where the system refuses.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    _check_there(path, data, advice)
    # In the same folder, because a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except FileExistsError:
        there = next(own for own in path.parents if own.exists())
        raise InputError(f"cannot write {path}: {there} is not a folder; {advice}") from None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; {advice}") from None
    return path


def is_plan(path: Path) -> bool:
    """Whether it is a plan's folder, or a file that says that it is a plan."""
    if path.is_dir():
        return (path / "plan.json").is_file()
    return f'"{FORMAT}"'.encode() in _beginning(path)


def read_plan(path: Path) -> Plan:
    """The plan in a file, or in the `plan.json` of a folder; raises `InputError`.

    Its programs are checked: a file may say anything.
    """
    file = path / "plan.json" if path.is_dir() else path
    data = read_input(file, "the plan", MOST_PLAN_BYTES, "make one with `parloom plan`")
    plan = plan_from_json(data, str(file))
    try:
        used_cluster(resolve_cluster(plan.cluster).cluster, plan.decisions)
    except InputError as error:
        raise InputError(
            f"{file}: cluster: {error}. If the file was edited by hand, undo that; `parloom plan"
            " --cluster` plans for another one"
        ) from error
    trains = plan.inference is None
    wanted = named_optimizer(plan.optimizer.name) if trains else NO_OPTIMIZER
    if plan.optimizer != wanted:
        raise InputError(
            f"{file}: optimizer: {wanted.name} keeps {wanted.num_states} states of each weight, and"
            f" the plan says {plan.optimizer.name!r} with {plan.optimizer.num_states}. If the file"
            " was edited by hand, undo that; `parloom plan --optimizer` plans for another one"
        )
    prompts = plan.inference.prefill_graph if plan.inference else ""
    for what, text in (
        ("graph", plan.graph),
        ("evaluation_graph", plan.evaluation_graph),
        ("inference.prefill_graph", prompts),
    ):
        try:
            if text:
                check_results(verify_graph(parse_graph(text)))
        except ParloomError as error:
            raise InputError(f"{file}: {what}: {error}") from error
    return plan


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C in the main thread waits until what is done here is done."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # it comes to another thread, or is ignored
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        before(signal.SIGINT, None)
