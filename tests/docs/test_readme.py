"""The pages name what there is: functions, flags, models, files, exit codes."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import parloom
from parloom import errors, zoo
from tests.docs.page import DOCS, ROOT, blocks_of

ALL = sorted(
    f"docs/{path.relative_to(DOCS)}" for path in DOCS.rglob("*.md") if path.name != "progress.md"
)
PAGES = ["README.md", "CONTRIBUTING.md", *ALL]
# Where users read; the others speak of operators, of benchmarks and of other frameworks, too.
USERS = re.compile(
    r"README|docs/(index|tutorial|support|limitations|glossary)|docs/how-to/(?!from-other)"
    r"|docs/reference/(?!exports|rules)"
)
FOR_USERS = [page for page in PAGES if USERS.match(page)]
OF_OTHERS = {"epochs", "index-url", "nproc-per-node"}  # flags of a script, pip and torchrun


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles_and_names_exist(page: str) -> None:
    text = text_of(page)
    for block in blocks_of(text):
        if block.language == "python":
            compile(block.text, page, "exec")
    if page in FOR_USERS:
        assert set(re.findall(r"\bparloom\.(\w+)\(", text)) <= set(parloom.__all__)


def test_there_is_python_to_compile() -> None:
    assert sum(b.language == "python" for page in PAGES for b in blocks_of(text_of(page))) >= 20


@pytest.mark.parametrize("page", FOR_USERS)
def test_flags_exist(page: str) -> None:
    modules = sorted((ROOT / "src/parloom").glob("cli*.py"))
    known = "".join(path.read_text(encoding="utf-8") for path in modules).replace("_", "-")
    given = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", text_of(page)))
    assert {flag for flag in given if not re.search(rf"\b{flag}\b", known)} <= OF_OTHERS


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_exist(page: str) -> None:
    text = text_of(page)
    assert broken_links(page, text) == []
    files = re.findall(r"`((?:tests|docs|src|examples|benchmarks)/[\w/.-]+)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


def broken_links(page: str, text: str) -> list[str]:
    """Links to files that are not there, and to headings that a page has not."""
    found = []
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", plain):
        target = (ROOT / page).parent / link if link else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{link}#{anchor}")
    return found


def anchors(path: Path) -> set[str]:
    """The headings of a page as links name them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    words = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in heads)
    return {re.sub(r"[\s-]+", "-", head) for head in words}


def test_a_broken_link_is_seen() -> None:
    text = "[a](reference/pins.md) [b](pins.md) [c](reference/pins.md#no-such) [d](#no)\n# Other\n"
    assert broken_links("docs/index.md", text) == ["pins.md#", "reference/pins.md#no-such", "#no"]


def test_names_of_the_python_reference_exist() -> None:
    names = re.findall(r"^::: (.+)$", text_of("docs/reference/python.md"), re.M)
    assert len(names) >= 30
    for name in names:
        module, _, own = name.rpartition(".")
        assert hasattr(import_module(module), own), name
        assert import_module(module).__dict__[own].__doc__, f"{name} has no docstring"


def test_zoo_models_are_all_named() -> None:
    named = re.findall(r"`zoo:(\w+)`", text_of("docs/reference/models.md"))
    assert named == [*zoo.names(), *zoo.denoisers()]


def test_user_pages_are_found() -> None:
    assert {"README.md", "docs/tutorial.md", "docs/how-to/pipelines.md"} <= set(FOR_USERS)


def test_exit_codes_are_those_of_the_errors() -> None:
    classes = [e for e in vars(errors).values() if isinstance(e, type)]
    codes = {e.exit_code for e in classes if issubclass(e, errors.ParloomError)}
    page = text_of("docs/reference/exit-codes.md")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)}
    assert listed == codes | {0, 1, 130}
