"""The README names what there is: flags, models, files, exit codes."""

import re
from pathlib import Path

import pytest

import parloom
from parloom import errors, zoo
from tests.docs.page import blocks_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_compiles_and_names_exist() -> None:
    blocks = [block.text for block in blocks_of(README) if block.language == "python"]
    assert len(blocks) >= 3
    for text in blocks:
        compile(text, "README.md", "exec")
    assert set(re.findall(r"\bparloom\.(\w+)\(", README)) <= set(parloom.__all__)


def test_flags_exist() -> None:
    modules = sorted((ROOT / "src/parloom").glob("cli*.py"))
    known = "".join(path.read_text(encoding="utf-8") for path in modules).replace("_", "-")
    given = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", README))
    assert {flag for flag in given if not re.search(rf"\b{flag}\b", known)} == set()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/add-an-op.md"]
)
def test_links_and_files_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
    files = re.findall(r"`((?:tests|docs|src|examples|benchmarks)/[\w/.-]+)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_zoo_models_are_all_named() -> None:
    table = README.split("| zoo models |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == list(zoo.names())


def test_exit_codes_are_those_of_the_errors() -> None:
    classes = [e for e in vars(errors).values() if isinstance(e, type)]
    codes = {e.exit_code for e in classes if issubclass(e, errors.ParloomError)}
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.M)}
    assert listed == codes | {0, 1, 130}
