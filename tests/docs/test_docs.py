"""The docs: they build without a warning, and every example of the tutorials and how-to pages runs as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import DOCS, ROOT, Block, blocks, text, with_examples, written

from browser import Browser, Page
from evenhand.cli import main
from evenhand.methods import registry

ADULT = ROOT.parent / "shared" / "data" / "adult"
SITE = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?:https?:)?//', re.IGNORECASE)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs")
    line = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(out / "trees")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "EVENHAND_STATE": str(out / "state")}
    made = subprocess.run(
        [*line, str(DOCS), str(out / "html")], capture_output=True, text=True, check=False, env=environment
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return out / "html"


def test_the_docs_build_with_warnings_as_errors(built: Path) -> None:
    for page in written():
        if not page.name.startswith("_"):
            assert (built / page.relative_to(DOCS).with_suffix(".html")).exists(), page
    assert (built / "proofs" / "accountant.html").exists()


def test_no_page_loads_anything_from_the_network(built: Path) -> None:
    assert [page.name for page in built.rglob("*.html") if SITE.search(page.read_text())] == []


def test_the_reference_names_every_command_method_and_error(built: Path) -> None:
    from evenhand import errors
    from evenhand.cli import app
    from evenhand.methods.catalogue import catalogue

    reference = {page.stem: page.read_text() for page in (built / "reference").glob("*.html")}
    for command in app.registered_commands:
        assert f"evenhand {command.name}<" in reference["cli"]
    for recipe in catalogue():
        assert recipe.name in reference["methods"]
    for name in vars(errors):
        assert not name.endswith("Error") or name in reference["errors"]
    assert "not established" in (built / "explanation" / "published-claims.html").read_text()


LOOKED_AT = (
    "index.html",
    "gallery.html",
    "tutorials/csv.html",
    "how-to/which-method.html",
    "how-to/open-runs.html",
    "methods/index.html",
    "results/digits.html",
    "results/index.html",
    "results/papers.html",
    "reference/errors/UsageError.html",
    "explanation/other-libraries.html",
)
"""Front page, pictures, a tutorial, the widest and the longest tables, results, code, a page of an error."""


@pytest.fixture(scope="session")
def pages_to_look_at(built: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Addresses of pages of the site, and of the report of a run."""
    from viewed_runs import folders

    run = folders(tmp_path_factory.mktemp("looked-at"), "first")["first"]
    return [(built / name).as_uri() for name in LOOKED_AT] + [(run / "report.html").as_uri()]


def each(browser: Browser, addresses: list[str], **look: int | bool) -> Iterator[tuple[str, Page]]:
    for address in addresses:
        page = browser.open(address, **look)  # type: ignore[arg-type]
        yield address, page
        page.send("Page.close")


def test_pages_fit_a_phone_are_light_and_have_words_for_pictures(pages_to_look_at: list[str]) -> None:
    with Browser() as browser:
        for address, page in each(browser, pages_to_look_at, width=390):
            assert page.ask("document.documentElement.scrollWidth") <= 390, f"{address} scrolls sideways"
            assert page.ask("[...document.images].filter(i=>!i.alt.trim()).map(i=>i.src)") == [], address
            assert page.ask("[...document.querySelectorAll('svg[role=img]')].every(e=>e.querySelector('title'))"), (
                address
            )
            assert page.ask("[...document.images].filter(i=>i.complete&&!i.naturalWidth).map(i=>i.src)") == [], address
            assert page.complaints() == [], address
            assert page.weight() < 1_000_000, address
            assert page.ask("document.querySelectorAll('h1').length") == 1, address
            narrow = "[...document.querySelectorAll('table')].filter(t=>t.rows[0].cells.length>4&&t.offsetWidth<600)"
            assert address.endswith("report.html") or page.ask(f"{narrow}.length") == 0, f"{address}: a squeezed table"


@pytest.mark.parametrize("dark", [False, True])
def test_letters_stand_out_in_light_and_dark(pages_to_look_at: list[str], dark: bool) -> None:
    with Browser() as browser:
        for address, page in each(browser, pages_to_look_at, dark=dark):
            ground = page.ask("getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) is dark, address
            assert page.faint() == [], address


def test_pages_say_where_they_stand_and_the_search_finds_them(built: Path) -> None:
    with Browser() as browser:
        page = browser.open((built / "reference/errors/UsageError.html").as_uri())
        assert page.text("nav.breadcrumbs").split("\n") == [
            "evenhand",
            "Reference",
            "Errors and exit codes",
            "UsageError",
        ]
        assert page.ask("document.querySelector('nav.breadcrumbs a').getBoundingClientRect().top") >= 8
        assert page.ask("document.querySelectorAll('button.copybtn').length") > 0
        page.click("nav.breadcrumbs li:nth-child(2) a")
        page.wait("document.title.startsWith('Reference')")
        page.go((built / "search.html").as_uri() + "?q=tau")
        page.wait("document.querySelectorAll('#search-results li a').length > 3")


def test_every_error_has_a_page_that_says_what_to_do() -> None:
    from evenhand import errors

    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    told = {page.stem: page.read_text() for page in (DOCS / "reference" / "errors").glob("*.md")}
    assert set(told) == kinds
    for name, words in told.items():
        assert words.startswith(f"# {name}\n"), name
        assert "\n## What to do\n\n- " in words, name


@pytest.mark.parametrize("page", with_examples(), ids=lambda page: str(page.relative_to(DOCS)))
def test_every_example_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "csv.md":
        if not ADULT.exists():
            pytest.skip("the Adult files are not in ../shared/data/adult")
        monkeypatch.setenv("ADULT", str(ADULT))
    if page.name == "hugging-face.md":
        pytest.importorskip("datasets", reason="the extra transformers is not installed")
        pytest.importorskip("transformers", reason="the extra transformers is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENHAND_STATE", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._parts, "rule", dict(registry._parts["rule"]))
    names: dict[str, object] = {"__name__": page.stem}
    before = set(sys.modules)
    try:
        for block in blocks(page):
            follow(block, names, page, monkeypatch)
    finally:
        for name in set(sys.modules) - before:
            if (tmp_path / f"{name}.py").exists():
                del sys.modules[name]


def follow(block: Block, names: dict[str, object], page: Path, patch: pytest.MonkeyPatch) -> None:
    """Do what the reader would do."""
    if block.caption:
        Path(block.caption).write_text(block.text)
    elif block.language == "python":
        exec(compile(block.text, str(page), "exec"), names)
    else:
        for command in block.commands():
            assert command.arguments[0] in ("evenhand", "torchrun"), "a console block holds commands of evenhand only"
            start = run if command.arguments[0] == "evenhand" else in_processes
            assert start(command.arguments, patch) == command.code, command.arguments


def run(arguments: list[str], patch: pytest.MonkeyPatch) -> int:
    patch.setattr(sys, "argv", arguments)
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def in_processes(arguments: list[str], patch: pytest.MonkeyPatch) -> int:
    """Run a command of torchrun."""
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("PYTHONPATH", os.pathsep.join(part for part in sys.path if part))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", *arguments[1:]], check=False, timeout=300)
    return done.returncode


def test_the_rule_of_the_tutorial_is_the_one_of_contributing() -> None:
    (rule,) = [block for block in blocks(DOCS / "tutorials" / "research.md") if block.caption == "smooth_clip.py"]
    assert f"```python\n{rule.text}```" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_output_that_is_shown_is_of_the_commands_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import _generate

    lines = "\n".join(page.read_text() for page in with_examples())
    commands = (_generate.PLAN, _generate.OWNERS, _generate.SCALES, _generate.ALIKE, _generate.COST)
    for command in (*commands, _generate.STEPS, _generate.PAPER, _generate.TRAIN):
        assert command in lines, command


def test_every_setting_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import _generate

    rows = [[part.strip() for part in line.split("|")] for line in _generate.config_keys().splitlines()]
    assert [row[1] for row in rows if not row[2]] == [], "say in docs/_generate.py what a key without a flag means"


def test_the_page_on_installing_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (DOCS / "how-to" / "install.md").read_text()
    named = [
        name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`([\w-]+)`", row)
    ]
    assert sorted(named) == sorted(extras)
    python = (ROOT / "pyproject.toml").read_text().partition('requires-python = ">=')[2].partition('"')[0]
    assert f"Python {python} or later" in page


def test_no_figure_is_typed_into_a_page() -> None:
    """Percentages, and epsilons that something is said to have spent, come from generated files only."""
    figure = re.compile(r"\d\s?%|(?:spen[dt]s?|true|accuracy)\s(?:epsilon\s)?\d", re.IGNORECASE)
    assert {str(page): found for page in written() if (found := figure.findall(text(page)))} == {}


def test_pages_describe_and_never_promise() -> None:
    promising = re.compile(r"\b(fair(?:er|est)?|unbiased|debias\w*|solv(?:e|es|ed|ing))\b", re.IGNORECASE)
    pages = [page for page in written() if page.name != "talking-about-fairness.md"]
    titles = re.compile(r"^(?:  title = .*|\| `\w+` \|.*)$", re.MULTILINE)  # a paper is cited as it is called
    assert {str(page): found for page in pages if (found := promising.findall(titles.sub("", text(page))))} == {}


def test_pages_name_no_place_on_a_machine() -> None:
    place = re.compile(r"(?<![\w.])/(?:home|work|tmp|Users|root)/")
    assert [str(page) for page in written() if place.search(text(page))] == []


def test_checking_needs_only_what_the_page_says(
    tmp_path: Path, digit_data: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of the page on checking work when every other dependency is missing."""
    import torch

    import evenhand as eh

    page = (DOCS / "how-to" / "check-without-torch.md").read_text()
    (packages,) = re.findall(r"pip install (numpy .*)", page)
    project = (ROOT / "pyproject.toml").read_text()
    needed = set(re.findall(r'^  "([a-z-]+)[>=]', project.partition("optional-dependencies")[0], re.MULTILINE))
    modules = {"scikit-learn": "sklearn"}
    absent = [modules.get(name, name) for name in needed - set(packages.split())]
    assert "torch" in absent
    eh.fit(torch.nn.Linear(64, 10), digit_data[0], epsilon=3.0, epochs=1, out=tmp_path / "run", compose=False)
    for command in ("verify", "statement"):
        code = (
            f"import sys; sys.modules.update(dict.fromkeys({absent!r})); "
            f"sys.argv = ['evenhand', {command!r}, {str(tmp_path / 'run')!r}]; from evenhand.cli import main; main()"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr


def test_the_look_would_tell(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><body style='background:#fff'>"
        "<p style='color:#777'>faint</p><p style='color:#767676'>enough</p><h1 style='color:#888'>large</h1>"
        "<div style='background:#333'><span style='color:#888'>dark</span></div><p style='opacity:.5'>half</p>"
        "<svg width=100 height=30><text y=20 fill='#aaa'>drawn</text></svg><div style='width:500px'>wide</div>"
        "<script>missing()</script>"
    )
    with Browser() as browser:
        page = browser.open((tmp_path / "bad.html").as_uri(), width=390)
        assert {words for _, words, *_ in page.faint()} == {"faint", "dark", "half", "drawn"}
        assert page.ask("document.documentElement.scrollWidth") > 390
        assert len(page.complaints()) == 1
