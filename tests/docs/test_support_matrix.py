"""The support matrix is what the benchmark found, and the benchmark found all well."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parloom import zoo

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/support.md").read_text(encoding="utf-8")
LISTED = (
    "BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM",
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "ViTForImageClassification",
    "SwinForImageClassification", "ResNetForImageClassification",
)  # fmt: skip


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "support_matrix", ROOT / "benchmarks/support_matrix.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def document(writer: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = writer.read(writer.RESULTS)
    return found


def test_pages_and_results_agree(writer: ModuleType, document: dict[str, Any]) -> None:
    assert writer.updated(PAGE, document) == PAGE, "run benchmarks/support_matrix.py"
    assert writer.summarized(README, document) == README, "run benchmarks/support_matrix.py"


def test_another_result_is_another_page(writer: ModuleType, document: dict[str, Any]) -> None:
    first, *rest = document["rows"]
    changed = {**first, "plans": {**first["plans"], "fsdp 4": "gradient of x"}}
    text = writer.updated(PAGE, {**document, "rows": [changed, *rest]})
    assert "13 of 14" in text
    assert f"- {first['model']}, fsdp 4: gradient of x" in text
    failed = {"model": "M", "date": first["date"], "failed": "no such thing"}
    assert "- M: no such thing" in writer.updated(PAGE, {**document, "rows": [failed, first]})
    one_less = writer.summarized(README, {**document, "rows": [changed, *rest]})
    assert one_less != README


def test_every_listed_model_is_there(document: dict[str, Any]) -> None:
    there = {row["model"] for row in document["rows"]}
    assert there >= {*LISTED, *(f"zoo:{name}" for name in zoo.names())}


def test_nearly_all_work_has_a_rule(writer: ModuleType, document: dict[str, Any]) -> None:
    calls, flops = writer.coverage(document["rows"])
    assert calls >= 0.98
    assert flops >= 0.999
