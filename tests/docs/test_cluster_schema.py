"""The schema of cluster files refuses what the strict reader refuses, and takes what it takes."""

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from parloom.cost.cluster_file import one_line, read_cluster_text
from parloom.cost.clusters import load_cluster
from parloom.errors import InputError
from tests.docs.cluster_schema import cluster_schema
from tests.docs.page import DOCS
from tests.property.test_cluster_yaml import DOCUMENTS
from tests.unit import test_clusters as corpus

ROOT = Path(__file__).parents[2]
FILES = (*(ROOT / "benchmarks").glob("*x*.yaml"), ROOT / "tests/docs/terminal/lab.yaml")
CASES = ROOT / "benchmarks" / "cases.yaml"
SPECS = ("2x8xH100", "4xcpu", "64xTPU-v4", "8xMI300X", "64x4xGB200")
PAGE = (DOCS / "reference" / "clusters.md").read_text(encoding="utf-8")
WHOLE = """\
name: lab
device: {name: chip, memory: 64GiB, memory_bandwidth: 1.6TB/s, rates: {bf16: 200TFLOP/s}, cores: 8,
  generation: new, price_per_hour: 2USD, price_source: us, price_date: 2026,
  efficiency: {matmul: 0.7}}
backend: other
host: {memory: 1TB, devices: 2, bandwidth: 25GB/s, latency: 1us, efficiency: 1}
levels:
  - {name: bus, size: 2, bandwidth: {up: 64GB/s, down: 32GB/s}, latency: 5us, efficiency: 0.5,
     oversubscription: 2, fabric: ring, reduces: true}
  - {name: links, torus: [2, 2], bandwidth: 50GB/s per direction, wraps: false}
"""
VALID = [
    corpus.LAB,
    corpus.OWN,
    corpus.UNEVEN,
    *DOCUMENTS,
    corpus.UNEVEN.replace("300GB/s}]", "300GB/s}], uplink: {bandwidth: 9Gbit/s, efficiency: 0.9}"),
    WHOLE,
    *(path.read_text(encoding="utf-8") for path in FILES if path != CASES),
    *(one_line(load_cluster(spec)) for spec in SPECS),
    *re.findall(r"```yaml\n((?:name|device):.*?)```", PAGE, re.DOTALL),
]
VALIDATOR = jsonschema.Draft202012Validator(cluster_schema())
# What no schema says: sums over the file, texts that mean the same key, and sizes of quantities.
UNSAID = (
    r"both directions|can be planned for|a host of|has back end|given twice|a cycle"
    r"|100000 values|1 EiB|cannot be printed|not YAML"
)


def read_by_editors(text: str) -> Any:
    """Plain values as YAML 1.2 has them: `yes` is a text."""
    return _value(yaml.compose(text, Loader=yaml.SafeLoader))


def _value(node: Any) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(one) for one in node.value]
    if node.style is None and node.value in {"true", "false"}:
        return node.value == "true"
    if node.style is None and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", node.value):
        return float(node.value) if set(".e") & set(node.value) else int(node.value)
    return node.value


def is_taken(document: object) -> bool:
    """By the schema."""
    return bool(VALIDATOR.is_valid(document))


def is_read(text: str) -> bool:
    """By the strict reader."""
    try:
        read_cluster_text(text, "lab.yaml")
    except InputError:
        return False
    return True


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(cluster_schema())


@pytest.mark.parametrize("text", VALID)
def test_every_cluster_file_fits(text: str) -> None:
    assert is_read(text)
    assert is_taken(read_by_editors(text))


def refused() -> Iterator[tuple[str, str]]:
    """Files of the tests of the reader that are refused, and with which words."""
    (lab,) = _marks(corpus.test_faults_in_a_file_have_a_place)
    for old, new, message in lab.args[1]:
        yield corpus.LAB.replace(old, new), message
    (more,) = _marks(corpus.test_more_faults_have_a_place)
    yield from more.args[1]


def _marks(test: Any) -> Any:
    return test.pytestmark


@pytest.mark.parametrize(("text", "message"), tuple(refused()))
def test_what_the_reader_refuses_does_not_fit(text: str, message: str) -> None:
    assert not is_read(text)
    if not re.search(UNSAID, message) and "write" not in message:
        with contextlib.suppress(yaml.YAMLError):  # no editor reads it
            assert not is_taken(read_by_editors(text))


def changed(document: Any) -> Iterator[Any]:
    """The document with one key left out, renamed or added, or one value of another kind."""
    for path in _paths(document):
        edits: tuple[Any, ...] = ("drop", "rename", [], {}, "x", 0, 2.5, "1GiB")
        for edit in edits:
            found = copy.deepcopy(document)
            place = found
            for key in path[:-1]:
                place = place[key]
            if edit in ("drop", "rename") and isinstance(place, dict):
                value = place.pop(path[-1])
                place |= {f"{path[-1]}x": value} if edit == "rename" else {}
            else:
                place[path[-1]] = edit
            yield found


def _paths(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in inside:
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from _paths(value, (*above, key))


@pytest.mark.parametrize("text", [WHOLE, *DOCUMENTS])
def test_it_says_what_the_reader_says_of_changed_files(text: str) -> None:
    """The reader decides; a schema may take what only a sum over the file shows."""
    both = disputed = 0
    for document in changed(read_by_editors(text)):
        flow = json.dumps(document)
        taken, read = is_taken(read_by_editors(flow)), is_read(flow)
        assert taken or not read, flow
        both += not taken and not read
        disputed += taken and not read
    assert both > 50
    assert disputed <= 0.05 * both
