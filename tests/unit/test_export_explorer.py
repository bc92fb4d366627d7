"""Model Explorer's JSON graph: what its own classes read, with the plan's layouts and times."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from parloom import cli
from parloom.comparators.configuration import Configuration
from parloom.export import model_explorer
from parloom.ir.plan_json import plan_to_json
from tests.exported import BLOCKS, gpt, planned

CHOSEN = Configuration(tensor=2, data=8, microbatch=2, zero=1, master_dtype=None)
PIPELINE = Configuration(pipeline=2, data=8, microbatch=1, num_microbatches=2, master_dtype=None)


@pytest.fixture(scope="module", params=[CHOSEN, PIPELINE], ids=["one stage", "pipeline"])
def document(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("explorer")
    (folder / "plan.json").write_text(plan_to_json(planned(request.param)))
    command = ["export", str(folder), "--to", "model-explorer", "--out", str(folder), "--strict"]
    assert cli.main(command) == 0
    return json.loads((folder / model_explorer.FILE).read_text())


def attributes(own: Any) -> dict[str, str]:
    return {entry["key"]: entry["value"] for entry in own["attrs"]}


def test_every_operator_and_edge_is_there(document: Any) -> None:
    (graph,) = document["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    program, _ = gpt()
    flat = list(program.flat())
    inputs = [entry for entry in program.inputs if entry.kind != "constant"]
    assert len(graph["nodes"]) == len(nodes) == len(flat) + len(inputs)
    for own in flat:
        edges = nodes[own.key]["incomingEdges"]
        assert all(edge["sourceNodeId"] in nodes for edge in edges)
        known = {r for f in flat for r in f.results} | {i.value.name for i in inputs}
        assert len(edges) == len([name for name in own.operands if name in known])
    up = nodes["blocks.1.up:linear#0"]
    assert up["namespace"] == "blocks/1/up"
    assert [edge["sourceNodeId"] for edge in up["incomingEdges"]] == [
        "blocks.1.norm_2:layer_norm#0",
        "parameter:blocks.1.up.weight",
        "parameter:blocks.1.up.bias",
    ]


def test_layouts_and_times(document: Any) -> None:
    nodes = {node["id"]: node for node in document["graphs"][0]["nodes"]}
    up, weight = nodes["blocks.1.up:linear#0"], nodes["parameter:blocks.1.up.weight"]
    layout = attributes(up["outputsMetadata"][0])["layout"]
    if attributes(up).get("stage") is None:
        assert layout == "[8/data·2, 8, 2/tensor·32]"
        assert attributes(weight)["layout"] == "[2/tensor·32, 16]"
        assert attributes(weight)["optimizer state stored"] == "over data"
    else:
        assert layout == "[8/data·2, 8, 64]"
        stages = [attributes(nodes[f"blocks.{i}.up:linear#0"])["stage"] for i in range(BLOCKS)]
        assert stages == ["0", "0", "1", "1"]
    assert float(attributes(up)["compute"].split()[0]) > 0


def test_its_own_classes_read_it(document: Any) -> None:
    parsers = Path(sys.prefix, "parsers")
    file = parsers / "model_explorer" / "graph_builder.py"
    if not file.exists():
        pytest.skip("ai-edge-model-explorer is not installed: make parsers")
    dacite, builder = loaded(parsers / "dacite" / "__init__.py", "dacite"), loaded(file, "builder")
    (graph,) = document["graphs"]
    read = dacite.from_dict(builder.Graph, graph, dacite.Config(strict=True))
    assert len(read.nodes) == len(graph["nodes"])
    assert isinstance(document["label"], str)
    del graph["nodes"][0]["label"]
    with pytest.raises(dacite.MissingValueError):
        dacite.from_dict(builder.Graph, graph, dacite.Config(strict=True))


def loaded(file: Path, name: str) -> Any:
    """A module of the parsers."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and its own submodules look there
    spec.loader.exec_module(module)
    return module
