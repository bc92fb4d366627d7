"""Plan files: versioned JSON that a person can read and diff, and that nothing can run from.

Writing is canonical: maps are sorted, short values stay on one line, the graph is a list of its
lines. Reading trusts nothing: syntax, schema and meaning are checked in that order, and every
complaint says file:line:column, what is wrong there, and what to do.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Any

from pydantic import ValidationError

from parloom.errors import InputError, VerifyError, nearest
from parloom.ir import plan_schema as schema
from parloom.ir.action_lists import parse_action
from parloom.ir.expected import Aim, Alternative, Constraint
from parloom.ir.json_text import line_and_column, render, with_controls
from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.ir.pcg import TIME
from parloom.ir.plan import (
    FORMAT,
    VERSION,
    WIDE_DTYPES,
    Action,
    ActivationDecision,
    Decisions,
    Inference,
    ModelSource,
    NodeDecision,
    Optimizer,
    ParameterDecision,
    Plan,
    Stage,
    Storage,
)
from parloom.ir.plan_parts_json import (
    CHANGED,
    digest,
    inference_document,
    nodes_document,
    prediction_document,
    read_inference,
    read_prediction,
)

MAX_RANKS = 1 << 20
Path = tuple[str | int, ...]
Names = tuple[str, ...]
# Read, not written.
VERSION_1 = "1.0"
ALL_OF_VERSION_1: list[Any] = [{"prefixes": [], "submesh": {}}]


def plan_to_json(plan: Plan) -> str:
    """The plan's canonical text: equal plans give equal bytes, in UTF-8 with a final newline."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": plan.version,
        "method": plan.method,
        "source": {
            "spec": plan.source.spec,
            "batch": plan.source.batch,
            "seq": plan.source.seq,
            "dtype": plan.source.dtype,
        },
        "cluster": plan.cluster,
        "optimizer": {"name": plan.optimizer.name, "num_states": plan.optimizer.num_states},
        "seed": plan.seed,
        "fingerprint": plan.fingerprint,
        "prediction": prediction_document(plan.prediction),
        "bound_s": plan.bound_s,
        "solver_gap": plan.solver_gap,
        **({"aim": asdict(plan.aim)} if plan.aim else {}),
        **({"inference": inference_document(plan.inference)} if plan.inference else {}),
        "status": plan.status,
        "alternatives": [
            {"name": a.name, "step_s": a.step_s, "peak_bytes": a.peak_bytes, "fits": a.fits}
            for a in plan.alternatives
        ],
        "constraints": [
            {"text": c.text, "step_s": c.step_s, "peak_bytes": c.peak_bytes}
            | ({"instead": c.instead} if c.instead else {})
            for c in plan.constraints
        ],
        "assumptions": list(plan.assumptions),
        "notes": list(plan.notes),
        **({"settings": dict(plan.settings)} if plan.settings else {}),
        **({"ranges": {name: ends for name, *ends in plan.ranges}} if plan.ranges else {}),
        "decisions": _decisions(plan.decisions),
        "graphs_sha256": digest(plan.graph, plan.evaluation_graph),
        "graph": plan.graph.split("\n"),
        "evaluation_graph": plan.evaluation_graph.split("\n"),
    }
    return render(document) + "\n"


def plan_from_json(text: str | bytes, where: str) -> Plan:
    """The plan in `text`; `where` is the file's name for messages.

    Raises `InputError` (file:line:column) for anything that `plan_to_json` would not have written:
    other formats and versions, truncation, unknown keys, axes that the mesh does not have.
    """
    if isinstance(text, bytes):
        text = _decoded(text, where)
    return _Reader(text, where).plan()


def plan_hash(plan: Plan) -> str:
    """What names a plan in logs and checkpoints: 16 hexadecimal digits."""
    return hashlib.sha256(plan_to_json(plan).encode()).hexdigest()[:16]


def _decisions(decisions: Decisions) -> dict[str, Any]:
    lists = [" ".join(map(str, own)) for own in decisions.actions]
    return {
        "num_microbatches": decisions.num_microbatches,
        "schedule": decisions.schedule,
        **({"actions": lists} if lists else {}),
        "batch_semantics": decisions.batch_semantics,
        "batch_norm": decisions.batch_norm,
        "master_dtype": decisions.master_dtype,
        "reduce_dtype": decisions.reduce_dtype,
        "rewrites": list(decisions.rewrites),
        "stages": [
            {
                "items": list(stage.items),
                "devices": ranks_text(stage.devices),
                "mesh": [_axis(axis) for axis in stage.mesh.axes],
                **({"order": list(stage.mesh.order)} if stage.mesh.order else {}),
                **({"microbatches": numbers_text(own)} if (own := stage.microbatches) else {}),
                **({"at_once": stage.at_once} if stage.at_once > 1 else {}),
            }
            for stage in decisions.stages
        ],
        "nodes": nodes_document(decisions.nodes),
        "parameters": {p.name: _parameter(p) for p in decisions.parameters},
        "activations": {a.prefix: _activation(a) for a in decisions.activations},
    }


def ranks_text(devices: tuple[range, ...]) -> str:
    """Ranks as `0-3,8`."""
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in devices)


def numbers_text(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0-3,8`."""
    ranges: list[range] = []
    for number in numbers:
        if ranges and ranges[-1].stop == number:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return ranks_text(tuple(ranges))


def _axis(axis: MeshAxis) -> dict[str, Any]:
    if axis.steps:  # lowering adds it, from the number of microbatches
        raise VerifyError(f"mesh axis {axis.name!r} is in time, and plans have axes over ranks")
    primes = [{"size": p.size, "stride": p.stride, "level": p.level} for p in axis.primes]
    return {"axis": axis.name, "primes": primes}


def _parameter(parameter: ParameterDecision) -> dict[str, Any]:
    """Storage that is the default is left out."""
    result: dict[str, Any] = {}
    for role in ("weight", "gradient", "optimizer"):
        storage: Storage = getattr(parameter, role)
        if storage != Storage():
            result[role] = {"axes": list(storage.axes), "dim": storage.dim}
            if storage.memory != "device":
                result[role]["memory"] = storage.memory
    for role in ("weight_sent", "gradient_sent"):
        if sent := getattr(parameter, role):
            result[role] = sent
    return result


def _activation(activation: ActivationDecision) -> str | dict[str, list[str]]:
    """The policy of a whole block, or the lists of what is recomputed of it."""
    if not activation.lists:
        return activation.policy
    if activation.policy != "recompute":
        raise VerifyError(
            f"{activation.prefix}: lists of values go with recompute, not {activation.policy!r}"
        )
    lists = {"values": list(activation.values), "moves": list(activation.moves)}
    return {name: keys for name, keys in lists.items() if keys}


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        kind = "a pickle" if data[:1] == b"\x80" else "a zip archive" if data[:2] == b"PK" else ""
        raise InputError(
            f"{where}: not a plan: {kind or 'a binary file'}, and plans are JSON text; parloom "
            f"never unpickles. Make a new one with `parloom plan`"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"key {twice!r} is given twice")
    return result


def _no_constant(name: str) -> float:
    raise InputError(f"{name} is no JSON number")


class _Reader:
    """One reading of one text, so that every complaint can name its line."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where

    def error(self, path: Path, message: str, *, at_key: bool = False) -> InputError:
        place = line_and_column(self.text, path, at_key=at_key)
        position = f":{place[0]}:{place[1]}" if place else ""
        name = ".".join(str(part) for part in path) or "the document"
        return InputError(
            f"{self.where}{position}: {name}: {message}. If the file was edited by hand, undo "
            f"that; otherwise make a new one with `parloom plan`"
        )

    def plan(self) -> Plan:
        raw = self._syntax()
        self._version(raw)
        if raw["version"] == VERSION_1:
            raw = self._from_version_1(raw)
        try:
            document = schema.PlanDocument.model_validate(raw)
        except ValidationError as error:
            raise self._schema_error(error) from None
        decisions = self._decisions(document.decisions)
        graph, evaluation = "\n".join(document.graph), "\n".join(document.evaluation_graph)
        if document.graphs_sha256 != digest(graph, evaluation):
            raise InputError(f"{self.where}: graph: {CHANGED}")
        return Plan(
            source=ModelSource(**document.source.model_dump()),
            cluster=document.cluster,
            fingerprint=document.fingerprint,
            optimizer=Optimizer(**document.optimizer.model_dump()),
            method=document.method,
            decisions=decisions,
            graph=graph,
            evaluation_graph=evaluation,
            prediction=read_prediction(document.prediction),
            alternatives=tuple(Alternative(**a.model_dump()) for a in document.alternatives),
            constraints=tuple(Constraint(**c.model_dump()) for c in document.constraints),
            assumptions=tuple(document.assumptions),
            seed=document.seed,
            bound_s=document.bound_s,
            solver_gap=document.solver_gap,
            aim=Aim(**document.aim.model_dump()) if document.aim else None,
            status=document.status,
            notes=tuple(document.notes),
            inference=self._inference(document.inference, decisions),
            settings=tuple(document.settings.items()),
            ranges=tuple((name, low, high) for name, (low, high) in document.ranges.items()),
        )

    def _inference(
        self, document: schema.InferenceDocument | None, decisions: Decisions
    ) -> Inference | None:
        if document is None:
            return None
        names = tuple(dict.fromkeys(n for s in decisions.stages for n in s.mesh.names))
        nodes = self._nodes(("inference", "prefill_nodes"), document.prefill_nodes, names)
        try:
            return read_inference(document, nodes)
        except InputError as error:
            raise InputError(f"{self.where}: inference.prefill_graph: {error}") from None

    def _syntax(self) -> dict[str, Any]:
        try:
            raw = json.loads(self.text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except json.JSONDecodeError as error:
            early = not self.text[error.pos :].strip() or error.msg.startswith("Unterminated")
            what = "the file ends too early (truncated?)" if early else f"not JSON: {error.msg}"
            raise InputError(
                f"{self.where}:{error.lineno}:{error.colno}: {what}. "
                f"Make a new one with `parloom plan`"
            ) from None
        except (InputError, ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise InputError(f"{self.where}: not a plan: {reason}") from None
        if not isinstance(raw, dict):
            raise InputError(f"{self.where}:1:1: not a plan: expected an object in braces")
        place = with_controls(raw)
        if place is not None:
            raise self.error(place, "control characters in a name or text")
        return raw

    def _version(self, raw: dict[str, Any]) -> None:
        if raw.get("format") != FORMAT:
            found = repr(raw["format"]) if "format" in raw else "none"
            raise InputError(
                f"{self.where}: not a plan: format is {found}, expected {FORMAT!r}; "
                f"make one with `parloom plan`"
            )
        if raw.get("version") not in (VERSION, VERSION_1):
            raise InputError(
                f"{self.where}: plan version {raw.get('version')!r}, and this parloom reads "
                f"{VERSION!r} and {VERSION_1!r}; install the parloom that wrote it, or plan anew"
            )

    def _from_version_1(self, raw: dict[str, Any]) -> dict[str, Any]:
        """A document of version 1 as one of version 2: the mesh of all devices is that of the only
        stage.
        """
        try:
            decisions = dict(raw["decisions"])
            mesh, sizes = decisions.pop("mesh"), []
            for axis in mesh:
                sizes += [prime["size"] for prime in axis["primes"]]
            if decisions.pop("stages") != ALL_OF_VERSION_1 or decisions.pop("submeshes"):
                raise self.error(("decisions", "stages"), "stages of version 1 never ran")
            stage = {"items": [], "devices": f"0-{prod(sizes) - 1}", "mesh": mesh}
        except (KeyError, TypeError, ValueError) as error:
            raise self.error(("decisions",), f"no decisions of version 1 ({error!r:.60})") from None
        return raw | {"version": VERSION, "decisions": decisions | {"stages": [stage]}}

    def _schema_error(self, error: ValidationError) -> InputError:
        first = error.errors(include_url=False)[0]
        path: Path = first["loc"]
        if path[:2] == ("decisions", "activations"):
            path = (*path[:3], *path[4:])  # without the tag of the union
        if first["type"] == "extra_forbidden":
            known = schema.known_keys(path[:-1])
            return self.error(path, f"unknown key{nearest(str(path[-1]), known)}", at_key=True)
        if first["type"] == "missing":
            return self.error(path[:-1], f"key {path[-1]!r} is missing")
        return self.error(path, f"{first['msg']}, got {first['input']!r:.60}")

    def _decisions(self, document: schema.DecisionsDocument) -> Decisions:
        stages = tuple(self._stage(i, stage) for i, stage in enumerate(document.stages))
        names = tuple(dict.fromkeys(name for stage in stages for name in stage.mesh.names))
        for role in ("master_dtype", "reduce_dtype"):
            dtype = getattr(document, role)
            if dtype is not None and dtype not in WIDE_DTYPES:
                message = f"it is one of {', '.join(WIDE_DTYPES)}, got {dtype!r:.60}"
                raise self.error(("decisions", role), message)
        return Decisions(
            stages=stages,
            nodes=self._nodes(("decisions", "nodes"), document.nodes, names),
            parameters=tuple(
                self._parameter(name, parameter, names)
                for name, parameter in document.parameters.items()
            ),
            activations=tuple(
                self._activation(prefix, found) for prefix, found in document.activations.items()
            ),
            num_microbatches=document.num_microbatches,
            schedule=document.schedule,
            actions=tuple(
                self._actions(index, text) for index, text in enumerate(document.actions)
            ),
            rewrites=tuple(document.rewrites),
            batch_semantics=document.batch_semantics,
            batch_norm=document.batch_norm,
            master_dtype=document.master_dtype,
            reduce_dtype=document.reduce_dtype,
        )

    def _actions(self, index: int, text: str) -> tuple[Action, ...]:
        try:
            return tuple(map(parse_action, text.split()))
        except InputError as error:
            raise self.error(("decisions", "actions", index), str(error)) from None

    def _stage(self, index: int, document: schema.StageDocument) -> Stage:
        """A stage has as many devices as its mesh numbers."""
        path: Path = ("decisions", "stages", index)
        mesh = self._mesh((*path, "mesh"), document.mesh)
        devices = self._ranges((*path, "devices"), document.devices)
        count = sum(map(len, devices))
        if count != mesh.num_ranks:
            message = f"{count} of them, and the mesh numbers {mesh.num_ranks}"
            raise self.error((*path, "devices"), message)
        if document.order is not None:
            if sorted(document.order) != list(range(count)):
                message = f"each number from 0 to {count - 1} once is needed"
                raise self.error((*path, "order"), message)
            mesh = replace(mesh, order=tuple(document.order))
        own = self._ranges((*path, "microbatches"), document.microbatches or "")
        if own and own[-1].stop > schema.MOST_MICROBATCHES:
            message = f"there are at most {schema.MOST_MICROBATCHES} microbatches"
            raise self.error((*path, "microbatches"), message)
        microbatches = tuple(number for some in own for number in some)
        return Stage(tuple(document.items), tuple(devices), mesh, microbatches, document.at_once)

    def _ranges(self, path: Path, text: str) -> list[range]:
        found: list[range] = []
        for part in text.split(",") if text else ():
            first, _, last = part.partition("-")
            found.append(range(int(first), int(last or first) + 1))
            if not found[-1] or any(r.stop >= found[-1].start for r in found[:-1]):
                message = f"ranges are ascending and apart, as in 0-3,8-11, not {text}"
                raise self.error(path, message)
        return found

    def _mesh(self, path: Path, document: list[schema.AxisDocument]) -> Mesh:
        """A mesh numbers every rank once: sorted by stride, each stride is the product so far."""
        names = [axis.axis for axis in document]
        for index, axis in enumerate(document):
            if names.index(axis.axis) != index:
                raise self.error((*path, index), f"axis {axis.axis!r} is given twice")
            if axis.axis == TIME:
                raise self.error((*path, index), f"the name {TIME!r} is kept for time")
        unit = 1
        for prime in sorted(
            (p for a in document for p in a.primes), key=lambda p: (p.stride, p.size)
        ):
            if prime.stride != unit:
                message = f"strides do not number the ranks: expected {unit}, got {prime.stride}"
                raise self.error(path, message)
            unit *= prime.size
        if unit > MAX_RANKS:
            raise self.error(path, f"{unit} ranks, and at most {MAX_RANKS} are planned for")
        return Mesh(
            tuple(
                MeshAxis(
                    axis.axis,
                    tuple(PrimeAxis(p.size, p.stride, p.level) for p in axis.primes),
                )
                for axis in document
            )
        )

    def _nodes(
        self, path: Path, document: dict[str, dict[str, list[str]]], names: Names
    ) -> tuple[NodeDecision, ...]:
        result: list[NodeDecision] = []
        for key, factors in document.items():
            for factor, axes in factors.items():
                self._axes((*path, key, factor), axes, names)
            pairs = tuple((factor, tuple(axes)) for factor, axes in factors.items())
            result.append(NodeDecision(key, pairs))
        return tuple(result)

    def _parameter(
        self, name: str, document: schema.ParameterDocument, names: Names
    ) -> ParameterDecision:
        storages: dict[str, Storage] = {}
        for role in ("weight", "gradient", "optimizer"):
            storage: schema.StorageDocument = getattr(document, role)
            self._axes(("decisions", "parameters", name, role, "axes"), storage.axes, names)
            storages[role] = Storage(tuple(storage.axes), storage.dim, storage.memory)
        return ParameterDecision(
            name,
            **storages,
            weight_sent=document.weight_sent,
            gradient_sent=document.gradient_sent,
        )

    def _activation(
        self, prefix: str, document: str | schema.RecomputedDocument
    ) -> ActivationDecision:
        if isinstance(document, str):
            return ActivationDecision(prefix, document)
        path: Path = ("decisions", "activations", prefix)
        if not document.values and not document.moves:
            message = 'no value is listed in values or moves; the whole block is "recompute"'
            raise self.error(path, message)
        for role in ("values", "moves"):
            names: list[str] = getattr(document, role)
            for index, name in enumerate(names):
                if names.index(name) != index:
                    raise self.error((*path, role, index), f"{name!r} is given twice")
        return ActivationDecision(
            prefix, "recompute", tuple(document.values), tuple(document.moves)
        )

    def _axes(self, path: Path, axes: list[str], names: Names) -> None:
        for index, axis in enumerate(axes):
            if axis not in names:
                message = f"unknown mesh axis {axis!r}{nearest(axis, names)}"
                raise self.error((*path, index), message)
            if axes.index(axis) != index:
                raise self.error((*path, index), f"mesh axis {axis!r} is given twice")
