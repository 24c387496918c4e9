"""The page: self-contained, in order, honest in words, and deaf to what group names say."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser

import pytest

from evenhand.reporting import run_findings
from evenhand.reporting.charts import multiples
from evenhand.reporting.group_metrics import Estimate, estimate
from evenhand.reporting.page import asset
from evenhand.reporting.run_page import ReportData, headline, render

Make = Callable[..., ReportData]
PAYLOADS = [
    "<script>alert({n})</script>",
    "</text></svg><script>alert({n})</script>",
    "</title><img src=x onerror=alert({n})>",
    '" onload="alert({n})',
    "' onmouseover='alert({n})",
    "</style><style>*{{display:none}}</style>{n}",
    "<svg><foreignObject><iframe src=//evil.example/{n}>",
    "<a href=javascript:alert({n})>x</a>",
    "]]><!--{n}--><![CDATA[",
    "&lt;b&gt;{n}&#60;script&#62;",
    "\u202egnp.{n}\u202c\u2066<b>\u2069",
    "\x00<\x00script>{n}\x1b[2J\x07",
    "\ud800\udfff\ufffe{n}",
    "</details></table></main></body></html><h1>{n}",
    "<meta http-equiv=refresh content=0;url=//evil.example/{n}>",
    "<base href=//evil.example/{n}>",
    "%s{{}}${{7*7}}{{{{7*7}}}}{n}",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert({n})>",
    "{n}" + "\u0627\u0644\u0645\u0631\u0636\u0649 " * 20,
    "=cmd|' /C calc'!A{n}" + "\n\r\t\u2028\u2029",
]
HOSTILE = [payload.format(n=n) for n in range(10) for payload in PAYLOADS]


class Structure(HTMLParser):
    """Records every element with its attributes, and the visible words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.nodes: list[tuple[str, tuple[str, ...]]] = []
        self.values: dict[str, list[str]] = {}
        self.words: list[str] = []
        self.comments: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.nodes.append((tag, tuple(name for name, _ in attrs)))
        for name, value in attrs:
            self.values.setdefault(name, []).append(value or "")

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.nodes]


def test_two_hundred_hostile_names_change_no_node(make_report: Make) -> None:
    assert len(set(HOSTILE)) == 200
    found = [estimate((50 + i % 50) / 100, 100 + i) for i in range(200)]
    evil = dict(zip(HOSTILE, found, strict=True))
    tame = dict(zip((f"group {i} of {'many ' * 30}" for i in range(200)), found, strict=True))
    owners = {name: [(0, 0.0), (1, 1.0)] for name in HOSTILE[:20]}
    calm = {f"owner {i}": [(0, 0.0), (1, 1.0)] for i in range(20)}
    text = HOSTILE[:20]
    page = render(
        make_report(
            evil, title=text[0], warnings=text, statement=text, facts=dict(zip(text, text, strict=True)),
            reproduce=text[1], spending=owners, budgets=dict.fromkeys(owners, 2.0),
        )
    )  # fmt: skip
    rows = [f"row {i}" for i in range(20)]
    safe = render(
        make_report(
            tame, title="t", warnings=rows, statement=rows, facts=dict(zip(rows, rows, strict=True)),
            reproduce="r", spending=calm, budgets=dict.fromkeys(calm, 2.0),
        )
    )  # fmt: skip
    page.encode("utf-8")
    seen, expected = Structure(page), Structure(safe)
    drawn, wanted = ([node for node in each.nodes if node[0] != "text"] for each in (seen, expected))
    assert drawn == wanted, "long names take more lines of text; nothing else may differ"
    assert set(seen.nodes) <= set(expected.nodes)
    assert not seen.comments
    assert not {"img", "iframe", "foreignobject", "a", "base", "form", "link"} & set(seen.tags)
    assert seen.tags.count("script") == 1
    assert page.count("<script") == 1
    assert f"<script>{asset('report.js')}</script>" in page
    assert not [name for name in seen.values if name.startswith("on") or name in ("style", "href", "src")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page)


def test_the_policy_allows_exactly_the_style_and_the_script(digits: ReportData) -> None:
    page = render(digits)
    style = re.search("<style>(.*?)</style>", page, re.S)
    assert style is not None
    script = re.search("<script>(.*?)</script>", page, re.S)
    assert script is not None
    first, second = (base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode() for found in (style, script))
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert unescape(policy[1]) == (
        f"default-src 'none'; style-src 'sha256-{first}'; script-src 'sha256-{second}'; base-uri 'none'; "
        "form-action 'none'"
    )
    assert not re.search("innerHTML|insertAdjacent|eval|fetch|XMLHttp|document.write|import", script[1])
    assert page.index("Content-Security-Policy") < page.index("<style>")
    assert page.count("<style") == 1
    assert not re.search(r"url\(|@import|javascript:|<link", page)
    assert set(re.findall(r"https?://[^\"\s<]*", page)) == {"http://www.w3.org/2000/svg"}


def test_the_page_is_small_and_in_order(digits: ReportData) -> None:
    page = render(digits)
    assert len(page.encode()) < 150_000
    seen = Structure(page)
    assert seen.values["lang"] == ["en"]
    assert [tag for tag in seen.tags if re.fullmatch("h[1-6]", tag)] == ["h1"] + ["h2"] * 6
    assert seen.tags.count("svg") == 6
    assert seen.tags.count("details") == 3
    for tag in ("html", "head", "body", "main", "header", "footer"):
        assert seen.tags.count(tag) == 1
        assert page.count(f"</{tag}>") == 1


def test_the_page_says_what_it_must(digits: ReportData) -> None:
    words = " ".join(Structure(render(digits)).words).replace("\u00a0", " ").replace("\u2013", "-")
    for expected in (
        "Class 8 is served worst: 51 % correct (37-65 %) against 92 % overall.",
        "spent epsilon (per record, add/remove)",
        "per record, add/remove, delta 0.0001",
        "all: at most 3",
        "which the privacy promise does not cover",
        "dpsgd (guarantee: by construction)",
        "evenhand train --data digits",
        "43 held-out records",
    ):
        assert expected in words
    assert not re.search(r"\bfair|debias|unbias|\bsolv", words, re.I)


def test_every_epsilon_has_its_terms(make_report: Make) -> None:
    page = render(make_report({"a": estimate(0.9, 100)}, delta=None))
    assert "per record, add/remove, delta: see the statement" in page
    for block in re.findall(r"<caption>.*?</caption>|<dt>Spent epsilon</dt>.*?</div>|<title>Spent.*?</title>", page):
        if "psilon" in block:
            assert "per record, add/remove" in block


@pytest.mark.parametrize("spending", [{}, {"all": []}, {"all": [(0, 0.0), (9, math.inf)]}])
def test_without_a_bound_the_page_says_not_private(
    make_report: Make, spending: dict[str, list[tuple[int, float]]]
) -> None:
    page = render(make_report({"a": estimate(0.9, 100)}, spending=spending, budgets={"all": None}))
    assert "<strong>Not private:</strong>" in page
    assert "Spent epsilon" not in page
    assert "inf" not in re.sub("information", "", page.split("<body>")[1])


def test_one_unbounded_owner_is_named_beside_the_chart(make_report: Make) -> None:
    spending = {"strict": [(0, 0.0), (9, 1.0)], "public": [(9, math.inf)]}
    page = render(make_report({"a": estimate(0.9, 9)}, spending=spending, budgets={"strict": 1.0, "public": None}))
    assert "Not private, for records of public" in page
    assert "strict: at most 1" in page
    assert "partly private" in page


def test_owners_are_shown_with_what_they_were_promised(make_report: Make) -> None:
    owners = {"strict": estimate(0.7, 40), "usual": estimate(0.9, 60)}
    budgets = {"strict": 1.0, "usual": 3.0}
    spending = {name: [(0, 0.0), (9, limit)] for name, limit in budgets.items()}
    groups = {"a": estimate(0.5, 50), "b": estimate(0.9, 50)}
    page = render(make_report(groups, owners=owners, budgets=budgets, spending=spending))
    assert "Accuracy per owner" in page
    assert "promised epsilon" in page
    assert "Accuracy per owner" not in render(make_report(groups, owners={"all": estimate(0.7, 40)}))


def test_the_initial_drop_is_shaded_and_told(make_report: Make) -> None:
    values = [0.3, 0.2, 0.1, 0.4, 0.6]
    curves = [
        {"step": e, "epoch": float(e), "accuracy": 0.2 + e / 10, "groups": {"a": 0.2 + e / 9, "b": value}}
        for e, value in enumerate(values)
    ]
    page = render(make_report({"a": estimate(0.9, 50), "b": estimate(0.6, 50)}, curves=curves))
    assert "b: initial drop" in page
    assert "b stayed below its start until epoch 3, at most 20 points." in page


def test_without_groups_curves_or_facts(make_report: Make) -> None:
    page = render(make_report({}, curves=[], facts={}, reproduce="", statement=[]))
    for expected in ("none were measured", "No evaluation was recorded", "There is no privacy statement"):
        assert expected in page
    assert "How to reproduce" not in page
    assert "nan" not in page


def test_a_group_may_be_called_overall(make_report: Make) -> None:
    page = render(make_report({"overall": estimate(0.5, 50), "b": estimate(0.9, 50)}))
    assert "all records" in page


def test_evaluations_may_lack_groups(make_report: Make) -> None:
    curves = [{"step": 1, "epoch": 0.5, "accuracy": 0.4, "groups": {}}, {"step": 2, "epoch": 1.0, "accuracy": math.nan}]
    page = render(make_report({"a": estimate(0.5, 50), "b": estimate(0.9, 50)}, curves=curves))
    assert "nan" not in page


def test_small_groups_and_research_copies_are_marked(make_report: Make) -> None:
    groups = {f"g{i}": estimate(0.5 + i / 100, 5) for i in range(8)}
    page = render(make_report(groups, research=True, warnings=["delta is large"]))
    assert "Fewer than 30 held-out records: g0, g1, g2, g3, g4 and 3 more." in page
    assert "Research copy" in page
    assert "<li>delta is large</li>" in page
    assert "accuracy on the training records" not in page


def plain(words: str) -> str:
    return words.replace("\u00a0", " ").replace("\u2013", "-")


WHOLE = Estimate(0.96, 0.94, 0.97, 450)
TOLD = (
    "of held-out records are answered correctly; no group can be told apart as worst: groups of 20 records or more "
    "range from"
)
WHY = "correct."


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            {"class 8": Estimate(0.74, 0.66, 0.81, 99), "b": Estimate(0.98, 0.9, 1.0, 99)},
            "Class 8 is served worst: 74 % correct (66-81 %) against 96 % overall.",
        ),
        (
            {"a": Estimate(0.95, 0.9, 0.98, 99), "b": Estimate(0.97, 0.9, 1.0, 99)},
            f"96 % {TOLD} 95 % to 97 % {WHY}",
        ),
        (
            {name: Estimate(0.5 + 0.4 * (name == "d"), 0.4, 0.6, 99) for name in "abcd"},
            f"96 % {TOLD} 50 % to 90 % {WHY}",
        ),
        ({name: Estimate(0.96, 0.9, 0.98, 99) for name in "ab"}, "All 2 groups score the same: 96 % correct."),
        ({}, "96 % of held-out records are answered correctly (94-97 %). No groups to compare."),
        (
            {"a": Estimate(0.96, 0.9, 0.98, 99), "b": estimate(math.nan, 0)},
            "96 % of held-out records are answered correctly (94-97 %). No groups to compare. "
            "1 group has no held-out records.",
        ),
    ],
)
def test_headline(groups: dict[str, Estimate], expected: str) -> None:
    assert plain(headline(WHOLE, groups)) == expected


def test_headline_without_records_and_with_long_names() -> None:
    assert headline(estimate(math.nan, 0), {}) == "Nothing was measured: there are no held-out records."
    assert len(headline(WHOLE, {"x" * 200: estimate(0.1, 9), "b": estimate(1.0, 9)})) < 140
    long = headline(WHOLE, {"x" * 200: estimate(0.1, 90), "b": estimate(1.0, 90)})
    assert "X" + "x" * 199 in long, "no name is cut"


def test_many_groups_get_a_small_chart_each_and_no_name_is_cut() -> None:
    names = [f"district = number {place:02d} of the northern county" for place in range(20)]
    curves = {"overall": [(0.0, 10.0), (1.0, 90.0)]} | {
        name: [(0.0, 5.0), (1.0, 60.0 + k)] for k, name in enumerate(names)
    }
    for size in (340, 760):
        drawing = multiples(
            curves, title="T", x_label="epoch", y_label="correct, %", whole="overall", highlight=names[3], size=size
        )
        words = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", drawing))
        assert all(name in words for name in names), size
        assert "\u2026" not in words


def test_a_rate_is_chosen_on_the_page_and_without_a_script_the_first_shows() -> None:
    groups = {name: Estimate(0.8, 0.7, 0.9, 100) for name in ("a", "b")}
    metrics = {"base_rate": {"a": 0.5, "b": 0.5}, "fpr": {"a": 0.2, "b": 0.4}}
    data = ReportData("T", "H", groups["a"], groups, [], {}, {}, [], [], {}, "", metrics=metrics)
    page = render(data)
    part = page[page.index('class="pick"') :]
    assert "<label hidden>Metric: <select><option>accuracy</option><option>fpr</option></select>" in part
    assert part.count("<figure hidden>") == 1
    assert part.index("<figure>") < part.index("<figure hidden>")


def test_bounds_over_training_are_drawn_by_group_and_damaged_ones_left_out() -> None:
    rows = [
        {"epoch": epoch, "followed": {"clip bound": {"a": 1.0 + epoch, "b": 2.0}, "threshold Z": {"": 9.0 / epoch}}}
        for epoch in (1, 2, 3)
    ]
    section = run_findings.bounds_section([*rows, {"epoch": 4, "followed": {"clip bound": "<b>"}}], "a")
    assert section is not None
    assert section.heading == "Bounds over training"
    assert [block.kind for block in section.blocks] == ["words", "figure", "figure", "table"]
    assert section.blocks[-1].rows[0] == ["clip bound", "a", "2", "3", "4"]  # type: ignore[union-attr]
    assert section.blocks[-1].rows[2] == ["threshold Z", "", "9", "4.5", "3"]  # type: ignore[union-attr]
    assert run_findings.bounds_section([{"epoch": 1}, {"epoch": 2, "followed": {}}], None) is None
    still = [{"epoch": epoch, "followed": {"clip bound": {"": 1.0}}} for epoch in (1, 2, 3)]
    assert run_findings.bounds_section(still, None) is None, "one number that never moves needs no picture"
