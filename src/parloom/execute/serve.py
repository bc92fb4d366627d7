"""A file of requests through an inference plan: what every rank of `parloom run PLAN -- FILE` runs.

Requests are JSON lines, `{"input_ids": [...]}` with as many tokens as the plan's prompts have, or,
for a plan of one pass, an object with an entry for each input of a sample. Answers are JSON lines
in the same order: `{"tokens": [...]}`, or an object with each output. The last batch is filled up
with its last request, whose answers are dropped.
"""

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch

from parloom.capture import load_model
from parloom.capture.fingerprint import fingerprint
from parloom.capture.quantized import stored_values, without_scales
from parloom.errors import FingerprintError, InputError
from parloom.execute.files import read_plan
from parloom.execute.inference import inference_programs
from parloom.execute.train import comm_of, device_of, join_ranks, values_of
from parloom.execute.watch import watcher
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.plan import Plan
from parloom.ir.samples import sample_dims
from parloom.ir.text import parse_graph
from parloom.runtime import Server
from parloom.runtime.generation import CHOSEN, FORWARD, TOKENS, Passes

Request = Mapping[str, Any]


def main(argv: Sequence[str]) -> None:
    """Answer the requests of a file."""
    parser = argparse.ArgumentParser(prog="parloom run PLAN --", description=__doc__)
    parser.add_argument("requests", type=Path, help="JSON lines")
    parser.add_argument("answers", type=Path, nargs="?", help="JSON lines; default: stdout")
    parser.add_argument("--weights", type=Path, help="safetensors: a file or a folder")
    asked = parser.parse_args(argv)
    plan = read_plan(Path(os.environ["PARLOOM_PLAN"]))
    graph = _prompts_of(plan)
    requests = list(read_requests(asked.requests, graph))
    server = server_of(plan, asked.weights)
    lines = answers(server, plan, graph, requests)
    if server.comm.rank:
        for _ in lines:
            pass
    elif asked.answers is None:
        _write(lines, sys.stdout)
    else:
        with asked.answers.open("w", encoding="utf-8") as file:
            _write(lines, file)


def server_of(plan: Plan, stored: Path | None) -> Server:
    """This rank's part of the plan's programs, with the model's weights or those that are stored.

    Raises `FingerprintError` where the model is not the one that was planned.
    """
    device, source = device_of(plan), plan.source
    if plan.decisions.num_ranks > 1:
        join_ranks(plan, device)
    loaded = load_model(
        source.spec, batch=source.batch, seq=source.seq, dtype=source.dtype, seed=plan.seed
    )
    if fingerprint(loaded.model, loaded.batch) != plan.fingerprint:
        raise FingerprintError(f"the plan was made for another model than {source.spec} is now")
    programs = {name: found.pipeline for name, found in inference_programs(plan).items()}
    comm = comm_of(next(iter(programs.values())).mesh, None, watcher())
    graph = parse_graph(plan.graph)
    own = values_of(loaded.model, without_scales(graph), stored)
    return Server(programs, stored_values((graph, _prompts_of(plan)), own), comm, device)


def _prompts_of(plan: Plan) -> Graph:
    """The program that requests go into."""
    assert plan.inference is not None, "a plan for inference"
    return parse_graph(plan.inference.prefill_graph or plan.graph)


def answers(
    server: Server, plan: Plan, graph: Graph, requests: Sequence[Request]
) -> Iterator[Request]:
    """The answers to all requests, in order; every rank makes them."""
    assert plan.inference is not None, "a plan for inference"
    entries = graph.of_kind("batch")
    size = entries[0].value.spec.shape[0]
    waiting = iter(requests)
    under_way: deque[tuple[int, Passes]] = deque()
    while batch := list(islice(waiting, size)):
        filled = [*batch, *[batch[-1]] * (size - len(batch))]
        tensors = {
            entry.target: torch.tensor(
                [request[entry.target] for request in filled],
                dtype=getattr(torch, entry.value.spec.dtype),
            )
            for entry in entries
        }
        if tokens := plan.inference.new_tokens:
            passes = server.begin_tokens(tensors[TOKENS], tokens)
        else:
            passes = server.begin(FORWARD, tensors)
        under_way.append((len(batch), passes))
        # The first stages begin the next batch while the last ones are at this one.
        if len(under_way) >= server.num_stages:
            yield from _answered(*under_way.popleft())
    for one in under_way:
        yield from _answered(*one)


def _answered(count: int, passes: Passes) -> Iterator[Request]:
    """The answers to the first requests of a batch: the tokens of all passes, or outputs of one."""
    found = passes.wait()
    outputs = found[0]
    if CHOSEN in outputs:
        outputs = {CHOSEN: torch.cat([told[CHOSEN] for told in found], dim=1)}
    for index in range(count):
        yield {name: value[index].tolist() for name, value in outputs.items()}


def read_requests(file: Path, graph: Graph) -> Iterator[Request]:
    """The requests of a file. Raises `InputError` with the line of one that is none."""
    entries = graph.of_kind("batch")
    dims = sample_dims(factorize(graph))
    if any(dims.get(entry.target) != 0 for entry in entries):
        raise InputError("requests are samples, and this model's inputs do not begin with them")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read requests from {file}: {error}") from None
    found = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            found = True
            yield _request(line, f"{file}:{number}", graph)
    if not found:
        raise InputError(f"{file} has no requests")


def _request(line: str, where: str, graph: Graph) -> Request:
    """One request, of the shapes that the plan was made for."""
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}:{error.colno}: not JSON: {error.msg}") from None
    entries = {entry.target: entry.value.spec for entry in graph.of_kind("batch")}
    if not isinstance(given, dict) or given.keys() != entries.keys():
        raise InputError(f"{where}: a request is an object with {', '.join(entries)}")
    for name, spec in entries.items():
        try:
            shape = tuple(torch.tensor(given[name]).shape)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{where}: {name}: {error}") from None
        if shape != spec.shape[1:]:
            wanted = list(spec.shape[1:])
            raise InputError(f"{where}: {name} has shape {list(shape)}, the plan: {wanted}")
    _check_tokens(given, where, graph)
    return given


def _check_tokens(given: Request, where: str, graph: Graph) -> None:
    """Raise `InputError` for a token that a table which the tokens index has not."""
    uses = {e.value.name: e.target for e in graph.of_kind("batch")}
    specs = {e.value.name: e.value.spec for e in graph.of_kind("parameter")}
    for flat in graph.flat():
        if flat.node.op == "embedding" and flat.operands[1] in uses and flat.operands[0] in specs:
            rows, name = specs[flat.operands[0]].shape[0], uses[flat.operands[1]]
            wrong = [t for t in _leaves(given[name]) if not 0 <= t < rows]
            if wrong:
                raise InputError(f"{where}: {name} has {wrong[0]}, and there are {rows} tokens")


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, list):
        for item in data:
            yield from _leaves(item)
    else:
        yield data


def _write(lines: Iterator[Request], file: TextIO) -> None:
    for line in lines:
        print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
