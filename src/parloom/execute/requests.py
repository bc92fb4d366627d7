"""Requests of an inference plan: JSON lines, checked before anything is started.

A request is an object with an entry for each input of a sample, `{"input_ids": [...]}` of a model
that generates. An answer is an object with what each output is of that sample.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.execute.apart import together
from parloom.execute.files import check_file
from parloom.ir.factors import factorize
from parloom.ir.graph import CACHE, Graph, TensorSpec
from parloom.ir.plan import Plan
from parloom.ir.samples import SAME_ELEMENTS, output_dims, sample_dims
from parloom.ir.text import parse_graph

Request = Mapping[str, Tensor]
SAID = {bool: "true or false", int: "whole numbers", float: "numbers"}
USAGE = "parloom run PLAN -- REQUESTS [ANSWERS] [--weights FILES]"
OTHER = "name another file of answers"


class _Parser(argparse.ArgumentParser):
    """Raises `InputError` where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{USAGE}: {message}")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Files of `requests` and `answers`, and `weights`. Raises `InputError` for something else."""
    parser = _Parser(
        USAGE.split(" REQUESTS", maxsplit=1)[0], description="Answer the requests of a file."
    )
    parser.add_argument("requests", type=Path, help="JSON lines")
    parser.add_argument("answers", type=Path, nargs="?", help="JSON lines; default: stdout")
    parser.add_argument("--weights", type=Path, help="safetensors: a file or a folder")
    return parser.parse_args(argv)


def check_requests(plan: Plan, argv: Sequence[str]) -> None:
    """Raise `InputError` for requests that no rank would answer, and answers that have no place."""
    asked = arguments(argv)
    for _ in read_requests(asked.requests, prompts_of(plan)):
        pass
    for written in () if asked.answers is None else (asked.answers, partial_of(asked.answers)):
        if written.resolve() == asked.requests.resolve():
            raise InputError(f"{written} is the file of requests; {OTHER}")
        check_file(written, OTHER)
    if asked.weights is not None and not asked.weights.exists():
        raise InputError(f"--weights: {asked.weights} is not there")


def partial_of(answers: Path) -> Path:
    """Where answers are until all of them are there."""
    return answers.with_name(f"{answers.name}.partial")


def prompts_of(plan: Plan) -> Graph:
    """The program that requests go into."""
    assert plan.inference is not None, "a plan for inference"
    return parse_graph(plan.inference.prefill_graph or plan.graph)


def read_requests(file: Path, graph: Graph) -> Iterator[Request]:
    """The requests of a file. Raises `InputError` with the line of one that is none."""
    _check_samples(graph)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read requests from {file}: {error}") from None
    found, rows = False, _rows(graph)
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found = True
            yield _request(line, f"{file}:{number}", graph, rows)
    if not found:
        raise InputError(f"{file} has no requests")


def batch_size(graph: Graph) -> int:
    """The requests of a batch."""
    return graph.of_kind("batch")[0].value.spec.shape[0]


def output_samples(graph: Graph) -> Mapping[str, int | None]:
    """The dim of samples of each output of a pass; None of what is of one sample alone.

    Raises `InputError` for an output that is of several samples together.
    """
    if batch_size(graph) == 1:
        shapes = graph.main.specs()
        return {n: 0 if shapes[v].shape[:1] == (1,) else None for n, v in graph.outputs}
    found: dict[str, int | None] = {}
    mixed = together(graph)
    for name, dims in output_dims(factorize(graph)).items():
        if len(dims) != 1 or name in mixed:
            raise InputError(
                f"answers are of one request each, and output {name!r} is made of all requests of a"
                f" batch together; plan from a factory whose model returns no {name!r}, or with a"
                " batch of one"
            )
        found[name] = dims[0]
    return found


def of_sample(value: Tensor, dim: int | None, index: int, count: int) -> Tensor:
    """What an output is of one of `count` samples, outermost in `dim`."""
    if dim is None:
        return value
    size = value.shape[dim] // count
    return value.select(dim, index) if size == 1 else value.narrow(dim, index * size, size)


def _check_samples(graph: Graph) -> None:
    """Raise `InputError` unless all inputs are of samples, which they begin with."""
    entries = graph.of_kind("batch")
    dims = sample_dims(factorize(graph))
    one = all(entry.value.spec.shape[:1] == (1,) for entry in entries)
    if not entries or (not one and any(dims.get(entry.target) != 0 for entry in entries)):
        other = [
            f"{e.target} {list(e.value.spec.shape)}" for e in entries if dims.get(e.target) != 0
        ]
        raise InputError(
            "requests are samples, and this model's inputs do not begin with them"
            f" ({', '.join(other) or 'it has none of the batch'}); give the model inputs whose"
            " first dim is that of samples"
        )
    if not graph.of_kind(CACHE):
        output_samples(graph)


def _request(line: str, where: str, graph: Graph, rows: Mapping[str, int]) -> Request:
    """One request, of the shapes that the plan was made for."""
    try:
        given = json.loads(line, parse_constant=_no_number, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        usage = f"this plan answers requests: {USAGE}"
        raise InputError(f"{where}:{error.colno}: not JSON: {error.msg}; {usage}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: cannot be read: {error}") from None
    entries = {entry.target: entry.value.spec for entry in graph.of_kind("batch")}
    if not isinstance(given, dict) or given.keys() != entries.keys():
        raise InputError(f"{where}: a request is an object with {', '.join(entries)}")
    return {
        name: _tensor(given[name], spec, f"{where}: {name}", rows.get(name))
        for name, spec in entries.items()
    }


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _tensor(given: Any, spec: TensorSpec, where: str, rows: int | None) -> Tensor:
    """An input of one sample, whose numbers are below `rows` where they are places of a table."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
    for leaf in _leaves(given):
        fits = isinstance(leaf, bool) == (kind is bool) and isinstance(leaf, (int, kind))
        if not fits:
            raise InputError(f"{where} has {json.dumps(leaf)[:40]}, and takes {SAID[kind]}")
        if rows is not None and not 0 <= leaf < rows:
            raise InputError(f"{where} has {leaf}, and the table that it is a row of has {rows}")
    try:
        found = torch.tensor(given, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{where}: {error}") from None
    if found.shape != spec.shape[1:]:
        wanted = list(spec.shape[1:])
        raise InputError(f"{where} has shape {list(found.shape)}, the plan: {wanted}")
    if not found.isfinite().all():
        raise InputError(f"{where} has a number beyond those of {spec.dtype}")
    return found


def _rows(graph: Graph) -> dict[str, int]:
    """By the names of inputs that are places of tables, how many these have."""
    uses = {e.value.name: e.target for e in graph.of_kind("batch")}
    specs = {e.value.name: e.value.spec for e in graph.inputs if e.kind != "batch"}
    found: dict[str, int] = {}
    for flat in graph.flat():
        read: Sequence[str] = flat.operands
        if flat.node.op in SAME_ELEMENTS and read[0] in uses:
            uses |= dict.fromkeys(flat.results, uses[read[0]])
        elif flat.node.op == "embedding" and read[1] in uses and read[0] in specs:
            name, rows = uses[read[1]], specs[read[0]].shape[0]
            found[name] = min(rows, found.get(name, rows))
    return found


def _leaves(data: Any) -> Iterator[Any]:
    """What is in lists of lists; those that are too deep are refused by torch."""
    level = [data]
    while level:
        yield from (item for item in level if not isinstance(item, list))
        level = [item for own in level if isinstance(own, list) for item in own]
