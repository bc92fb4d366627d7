"""Cluster files: whatever the text, a cluster that reads back or an error with a place."""

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from parloom.cost.cluster_file import MAX_DEVICES, one_line, read_cluster_text
from parloom.cost.clusters import resolve_cluster
from parloom.errors import InputError
from parloom.report.clusters import cluster_document, cluster_screen
from tests.examples import examples

UNIFORM = """\
name: lab
device: A100-40GB
backend: nccl
price_per_hour: 1.5USD
host: {memory: 1TiB, devices: 4, bandwidth: 25GB/s, latency: 10us}
levels:
  - {name: nvlink, size: 4, bandwidth: 300GB/s, latency: 4us, reduces: true}
  - {name: leaf, size: 3, bandwidth: 25Gbit/s, efficiency: 0.9}
  - {name: spine, size: 2, bandwidth: {up: 25Gbit/s, down: 10Gbit/s}, oversubscription: 3}
"""
TORUS = """\
name: slice
device: {name: chip, memory: 16GiB, memory_bandwidth: 800GB/s, rates: {bf16: 200TFLOP/s}}
backend: other
levels:
  - {name: links, torus: [4, 4, 2], bandwidth: 50GB/s, latency: 1us, wraps: true}
  - {name: network, size: 2, bandwidth: 100Gbit/s, fabric: full_mesh}
"""
MIXED = """\
name: mixed
join: {name: ethernet, bandwidth: 25Gbit/s, latency: 30us, oversubscription: 2}
parts:
  - name: old
    count: 2
    device: V100
    levels: [{name: NVLink2, size: 4, bandwidth: 150GB/s}]
    uplink: {bandwidth: 10Gbit/s}
  - name: new
    parts:
      - {device: A100, count: 2, levels: [{name: NVLink3, size: 8, bandwidth: 300GB/s}]}
      - {device: A100, levels: [{name: NVLink3, size: 4, bandwidth: 300GB/s}]}
    join: {name: InfiniBand, bandwidth: 25GB/s}
"""
DOCUMENTS = (UNIFORM, TORUS, MIXED)
NASTY = (
    "nan", ".nan", "-1", "0", "1e400GB", "-80GiB", "99999999999999999999", "25Gb/s", "900GB/s",
    "0GB/s", "1e-300B/s", "null", "~", "true", "&a", "*a", "&a [*a]", "!!python/none x", "{}",
    "[]", "{", "]", ": ", "- ", "\n", "\t", '"\\uD800"', '"\\U7FFFFFFF"', "'", "#", "%YAML 1.3",
    "---", "<<: *a", "?", "|\n  x", "1:2:3", "0x10", "1_000", "\x00", "\ufeff", "½", "٣",
)  # fmt: skip
KEYS = (
    "name", "device", "backend", "levels", "parts", "join", "host", "size", "torus", "bandwidth",
    "latency", "memory", "memory_bandwidth", "rates", "count", "uplink", "up", "down", "fabric",
    "efficiency", "oversubscription", "reduces", "wraps", "devices", "price_per_hour", "bf16",
)  # fmt: skip
WORDS = ("A100", "4xcpu", "nccl", "4", "8", "300GB/s", "5us", "16GiB", "200TFLOP/s", "ring", "2USD")


def check(text: str) -> None:
    """Read `text`: an error that names a place, or a cluster that prints and reads back equal."""
    said = ""
    try:
        cluster, assumed = read_cluster_text(text, "lab.yaml")
    except InputError as error:
        said = str(error)
    if said:
        assert re.match(r"lab.yaml(:\d+:\d+)?: ", said), said
        assert "\n" not in said
        return
    assert 1 <= cluster.num_devices <= MAX_DEVICES
    assert all(line.startswith("lab.yaml: ") for line in assumed)
    again, more = read_cluster_text(one_line(cluster), "cluster")
    assert again == cluster
    assert more == ()
    json.dumps(cluster_document(cluster, assumed), allow_nan=False)
    Console(file=None, quiet=True).print(cluster_screen(cluster, assumed))


@pytest.mark.parametrize("text", DOCUMENTS)
def test_the_documents_that_are_damaged_below_are_fine(text: str) -> None:
    read_cluster_text(text, "lab.yaml")
    check(text)


@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    check(text)


@given(st.sampled_from(DOCUMENTS), st.data())
@examples(300)
def test_damaged_documents(text: str, data: st.DataObject) -> None:
    """Stretches of the text deleted, doubled, or replaced by what breaks readers."""
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        put = data.draw(st.sampled_from(("", text[start:end] * 2, *NASTY)))
        text = text[:start] + put + text[end:]
    check(text)


@given(st.sampled_from(DOCUMENTS), st.data())
@examples(300)
def test_values_replaced(text: str, data: st.DataObject) -> None:
    """Whole values replaced, so that the structure mostly survives."""
    values = list(re.finditer(r"(?<=: )[^\s,{}\[\]]+", text))
    match = data.draw(st.sampled_from(values))
    put = data.draw(st.sampled_from((*NASTY, *WORDS)))
    check(text[: match.start()] + put + text[match.end() :])


def trees(depth: int) -> st.SearchStrategy[Any]:
    scalars = st.sampled_from((*WORDS, *NASTY)) | st.integers() | st.floats() | st.booleans()
    if not depth:
        return scalars
    inside = trees(depth - 1)
    return (
        scalars
        | st.lists(inside, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS), inside, max_size=5)
    )


@given(st.dictionaries(st.sampled_from(KEYS), trees(3), max_size=6))
@examples(200)
def test_any_tree_of_known_keys(document: dict[str, Any]) -> None:
    check(json.dumps(document))


@given(st.text(max_size=20) | st.sampled_from(["a\x00.yaml", "/", "x" * 5000 + ".yaml", "2x8x"]))
def test_any_spec(spec: str) -> None:
    with contextlib.suppress(InputError):
        assert resolve_cluster(spec).cluster.num_devices > 0
