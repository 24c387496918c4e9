"""The page of runs in a real browser: clicks, keyboard, what a screen reader says, phones and print."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, Page
from evenhand._numbers import NO_BREAK, percent
from evenhand.comparison.viewer import page, planner, released
from evenhand.comparison.viewer.server import Viewer
from evenhand.reporting.run_findings import difference
from evenhand.runs.folder import Folder
from viewed_runs import folders, hostile_copy


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders(tmp_path_factory.mktemp("browsed"), "first", "second", "owners")


@pytest.fixture(scope="module")
def exported(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("exported") / "all.html"
    file.write_text(page.exported([released.read(runs[name]) for name in ("first", "second")]), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[Viewer]:
    with Viewer(list(runs.values())) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def chosen(view: Page, select: str, option: int) -> None:
    """Choose as a hand does: focus, then arrow keys from the first option."""
    view.ask(f"document.querySelector('{select}').focus()")
    view.press("Home")
    view.press("ArrowDown", option)


def rows(view: Page, table: str) -> dict[str, list[str]]:
    cells = f"[...document.querySelectorAll('{table} tr')].map(r=>[...r.cells].map(c=>c.textContent))"
    return {name: values for name, *values in view.ask(cells)}


def test_moving_tau_by_keyboard_shows_every_class_as_recorded(browser: Browser, exported: Path, runs: dict) -> None:
    view = browser.open(exported.as_uri())
    recorded = Folder(runs["first"]).last_evaluation()["frontier"]
    view.ask("document.getElementById('tau').focus()")
    assert "the answers of this run as they are" in view.text("#fsay")
    for row in recorded[1:]:
        view.press("ArrowRight")
        assert view.text("#tauout") == f"{row['tau']:g}"
        assert view.ask("document.getElementById('tau').getAttribute('aria-valuetext')") == f"tau {row['tau']:g}"
        shown = rows(view, "#cells")
        assert list(shown) == [f"class {name}" for name in row["classes"]]
        for name, cell in row["classes"].items():
            records, _, correct, change = shown[f"class {name}"]
            assert records == str(cell["n"])
            assert correct.startswith(f"{percent(cell['accuracy'], cell['n']).removesuffix(f'{NO_BREAK}%')} (")
            before = recorded[0]["classes"][name]["accuracy"]
            moved = 100 * (cell["accuracy"] - before)
            assert float(change.replace("−", "-")) == pytest.approx(moved, abs=0.0501)
        assert view.text("#fsay").startswith(f"At tau {row['tau']:g}")
    chosen(view, "#frun", 1)
    assert view.text("#tauout") == "0"
    assert view.complaints() == []


def test_two_runs_are_compared_with_the_intervals_of_the_library(browser: Browser, exported: Path, runs: dict) -> None:
    view = browser.open(exported.as_uri())
    first, second = (released.read(runs[name]).groups for name in ("first", "second"))
    shown = rows(view, "#pairs")
    assert shown["promise"][0].startswith("epsilon 3")
    for name in first:
        apart = difference(second[name], first[name])
        ends = [f"{100 * value:+.1f}".replace("-", "−") for value in (apart.value, apart.low, apart.high)]
        assert shown[name][2] == f"{ends[0]} ({ends[1]} to {ends[2]})"
    assert "The promises differ" in view.text("#pairnote")
    chosen(view, "#right", 0)
    assert rows(view, "#pairs")["all"][2].startswith("+0.0 (")
    assert view.text("#pairnote") == ""


def test_an_interval_stays_on_one_line_of_the_list(browser: Browser, exported: Path) -> None:
    view = browser.open(exported.as_uri(), width=800)
    lines = "(e=>{const r=document.createRange();r.selectNodeContents(e);return r.getClientRects().length})"
    assert set(view.ask(f"[...document.querySelectorAll('.list tbody td:nth-child(5)')].map({lines})")) == {1}


def test_runs_about_different_data_are_not_subtracted_from_each_other(
    browser: Browser, runs: dict, tmp_path: Path
) -> None:
    first, second = (released.read(runs[name]) for name in ("first", "second"))
    facts = dataclasses.replace(second.plan.facts, inputs="(3,) float32")
    other = dataclasses.replace(second, plan=dataclasses.replace(second.plan, facts=facts))
    (tmp_path / "apart.html").write_text(page.exported([first, other, second]), encoding="utf-8")
    view = browser.open((tmp_path / "apart.html").as_uri())
    assert {cells[2] for cells in rows(view, "#pairs").values()} == {""}
    assert "not about the same data" in view.text("#pairnote")
    chosen(view, "#right", 2)
    assert rows(view, "#pairs")["all"][2] != ""
    assert "not about the same data" not in view.text("#pairnote")


def test_a_tau_is_that_of_the_run_only_where_it_moved_the_answers(browser: Browser, runs: dict, tmp_path: Path) -> None:
    run = released.read(runs["first"])
    for goal, own in (("overall", True), ("parity:demographic_parity_difference", False)):
        file = tmp_path / f"{own}.html"
        file.write_text(page.exported([dataclasses.replace(run, goal=goal)]), encoding="utf-8")
        view = browser.open(file.as_uri())
        assert ("the answers of this run as they are" in view.text("#fsay")) is own
        assert {cells[3] for cells in rows(view, "#cells").values()} == ({"+0.0"} if own else {""})
        assert view.complaints() == []


def test_the_file_needs_no_network_and_its_planner_knows_each_position(
    browser: Browser, exported: Path, runs: dict
) -> None:
    view = browser.open(exported.as_uri())
    assert [address for address in view.requests() if not address.startswith("file:")] == []
    assert view.ask("fetch('https://evil.example').then(()=>'sent',()=>'blocked')") == "blocked"
    run = released.read(runs["first"])
    of = planner.dials(run.plan, fine=False)
    place = [dial.start for dial in of]
    assert rows(view, "#plan")["Steps"][0].startswith(f"{run.plan.steps}, ")
    for number, dial in enumerate(of):
        view.ask(f"document.getElementById('dial{number}').focus()")
        view.press("End")
        place[number] = len(dial.values) - 1
        expected = planner.answer(run.plan, of, place)
        assert {name: values[0] for name, values in rows(view, "#plan").items()} == expected | {
            "Nearest study": planner.study(run.plan, of[0].values[place[0]], "table")
        }
    assert len([text for text in view.complaints() if "evil.example" not in text]) == 0


def test_served_the_planner_asks_for_each_owners_budget(browser: Browser, server: Viewer, runs: dict) -> None:
    view = browser.open(server.address)
    chosen(view, "#prun", 2)
    view.wait("document.querySelectorAll('#dials input').length===5 && document.querySelector('#plan tr')!==null")
    run = released.read(runs["owners"])
    view.ask("document.getElementById('dial0').focus()")
    view.press("ArrowLeft", 2)
    place = view.ask("[...document.querySelectorAll('#dials input')].map(e=>+e.value)")
    assert place != [dial.start for dial in planner.dials(run.plan, fine=True)]
    expected = page.reply(run, place, "table")
    view.wait(f"document.getElementById('plan').innerText.includes({json.dumps(expected['Spent at the end'])})")
    assert {name: values[0] for name, values in rows(view, "#plan").items()} == expected
    assert [address for address in view.requests() if not address.startswith(server.address)] == []
    assert view.complaints() == []


def test_served_a_click_leads_to_the_report_and_nothing_of_it_gets_out(
    browser: Browser, server: Viewer, runs: dict, tmp_path: Path
) -> None:
    view = browser.open(server.address)
    view.click("a[href='report/0']")
    view.wait("document.querySelector('dl.cards')!==null")
    assert view.complaints() == []
    hostile = hostile_copy(runs["first"], tmp_path)
    (hostile / "report.html").write_text("<title>report</title><script>document.title='owned'</script><p>here</p>")
    with Viewer([hostile]) as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            view = browser.open(f"{other.address}report/0")
            assert view.ask("document.title") == "report"
            assert any("Content Security Policy" in text for text in view.complaints())
            view = browser.open(other.address)
            assert view.ask("document.title") == "Runs of evenhand"
            assert view.ask("document.querySelectorAll('img,b').length") == 0
            assert view.complaints() == []
        finally:
            other.shutdown()
            thread.join()


def test_a_screen_reader_finds_a_name_for_every_control(browser: Browser, exported: Path) -> None:
    view = browser.open(exported.as_uri())
    controls = view.controls()
    assert [role for role, name in controls if not name.strip()] == []
    names = {name for role, name in controls if role in ("slider", "combobox")}
    assert names == {
        "First run", "Second run", "Run", "tau", "As in run", "Kind of data, for the nearest study", "epsilon",
        "epochs", "expected batch",
    }  # fmt: skip
    assert view.ask("document.querySelectorAll('[aria-live=polite]').length") >= 4
    tables = "[...document.querySelectorAll('table')]"
    assert view.ask(f"{tables}.every(t=>t.querySelector('th[scope=row]')!==null)")
    assert view.ask(f"{tables}.filter(t=>!t.classList.contains('facts')).every(t=>t.caption)")


def test_every_control_is_reached_by_tab(browser: Browser, exported: Path) -> None:
    view = browser.open(exported.as_uri())
    seen = []
    for _ in range(30):
        view.press("Tab")
        seen.append(view.ask("document.activeElement.id||document.activeElement.tagName"))
    assert {"left", "right", "frun", "tau", "prun", "kind", "dial0", "dial1", "dial2"} <= set(seen)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_scroll_to_the_side(browser: Browser, server: Viewer, dark: bool) -> None:
    view = browser.open(server.address, width=390, dark=dark)
    chosen(view, "#prun", 2)
    assert view.ask("document.documentElement.scrollWidth") <= 390
    assert view.ask("getComputedStyle(document.querySelector('main')).maxWidth") == "1060px"


def test_paper_shows_what_is_chosen_without_the_controls(browser: Browser, exported: Path) -> None:
    view = browser.open(exported.as_uri())
    view.ask("document.getElementById('tau').focus()")
    view.press("End")
    view.look(794, media="print")
    hidden = "[...document.querySelectorAll('select,input,nav')].every(e=>getComputedStyle(e).display==='none')"
    assert view.ask(hidden)
    assert "At tau 6" in view.text("#fsay")
    assert view.ask("document.documentElement.scrollWidth") <= 794
    assert view.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert view.printed().startswith(b"%PDF")
