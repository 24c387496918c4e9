"""What a run shares has no figure of a group with few held-out records; its private folder has all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import evenhand as eh
from commands import result
from evenhand.cli.result import summary
from evenhand.errors import UsageError
from evenhand.reporting.held_out.small_cells import shareable
from evenhand.runs import statement_files
from evenhand.training.evaluate import row
from evenhand.training.run import Run

SIZES = {"common": 120, "usual": 60, "rare": 4}


def data(sizes: dict[str, int], seed: int) -> eh.data.Data:
    draw = np.random.default_rng(seed)
    groups = [name for name, size in sizes.items() for _ in range(size)]
    inputs = draw.normal(size=(len(groups), 3)).astype("float32")
    return eh.data.wrap(inputs, (inputs[:, 0] + draw.normal(size=len(groups)) > 0).astype(int), groups=groups)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    train, test = data({"common": 200, "usual": 100, "rare": 50}, 0), data(SIZES, 1)
    out = tmp_path_factory.mktemp("small") / "run"
    return eh.fit(torch.nn.Linear(3, 2), train, epsilon=3, epochs=2, test=test, out=out, insecure_seed=1)


def test_no_file_that_may_be_shared_has_a_figure_of_a_small_group(run: Run) -> None:
    full = run.folder.metrics(full=True)
    assert [set(line["groups"]) for line in full] == [set(SIZES)] * 2
    assert full[-1]["group_records"]["rare"] == 4
    digits = {
        f"{value:.5f}"[2:] for line in full for value in (line["groups"]["usual"], line["group_log_loss"]["rare"])
    }
    for name in (*statement_files.FROM_NOISE, *statement_files.FROM_FACTS):
        file = run.path / name
        if file.exists() and file.suffix != ".safetensors":
            assert not [digit for digit in digits if digit in file.read_text()], name
    for line in run.evaluations:
        assert set(line["groups"]) == set(line["group_records"]) == {"common"}, "usual would give rare away"
        assert all(set(table) == {"common"} for table in line["group_metrics"].values())
        assert line["left_out"] == {"least": 10, "groups": ["rare", "usual"], "owners": []}


def test_groups_left_out_are_named(run: Run) -> None:
    for name in ("report.html", "model-card.md"):
        text = (run.path / name).read_text()
        assert "rare" in text
        assert "left out to protect fewer than 10 records" in text, name
    assert "2 groups are not shown" in (run.path / "report.html").read_text().replace("\u00a0", " ")


def test_the_owner_reads_everything_in_private(run: Run) -> None:
    assert "accuracy[rare]" in run.metrics.columns
    page = run.report(full=True)
    assert "not shown" not in page.page
    with pytest.raises(UsageError, match="must not be shared"):
        page.save(run.path / "elsewhere.html")
    assert page.save(run.folder.private / "report-full.html").exists()
    assert "left out" in run.report(data(SIZES, 1), least_records=10).page


def test_json_has_null_for_small_groups(run: Run) -> None:
    figures = summary(run)
    nothing = {"n": None, "effective": None, "accuracy": None, "interval": None}
    assert figures["groups"]["rare"] == figures["groups"]["usual"] == nothing
    assert figures["groups"]["common"]["n"] == 120
    assert figures["least_records"] == 10
    assert set(figures["group_accuracy"]) == {"common"}
    json.dumps(figures, allow_nan=False)
    assert result("report", run.path, "--full")["report"].endswith("private/report-full.html")


def test_of_two_groups_with_one_too_small_neither_is_shown() -> None:
    row = {"records": 54, "accuracy": 0.9, "groups": {"a": 0.94, "b": 0.5}, "group_records": {"a": 50, "b": 4}}
    assert shareable(row)["groups"] == {}
    assert shareable(row, 4) == row
    assert shareable(row)["accuracy"] == 0.9


def test_rates_of_few_records_of_a_class_do_not_follow_from_the_others() -> None:
    """Group b has 3 positives: overall and a would give its true positive rate away, so a's is left out too."""
    rates = {"base_rate": {"a": 0.5, "b": 0.05, "c": 0.5}, "tpr": {"a": 0.8, "b": 1 / 3, "c": 0.7}}
    row = {
        "records": 260,
        "accuracy": 0.8,
        "balanced_accuracy": 0.7,
        "groups": {"a": 0.8, "b": 0.7, "c": 0.6},
        "group_records": {"a": 100, "b": 60, "c": 100},
        "metrics": {"accuracy": 0.8, "balanced_accuracy": 0.7, "base_rate": 103 / 260, "tpr": 0.7},
        "group_metrics": {**rates, "accuracy": {"a": 0.8, "b": 0.7, "c": 0.6}},
    }
    shown = shareable(row)
    hidden = [name for name, value in shown["group_metrics"]["tpr"].items() if value is None]
    assert len(hidden) == 2
    assert "b" in hidden
    assert sum(round(row["group_records"][name] * rates["base_rate"][name]) for name in hidden) >= 10
    assert shown["groups"] == row["groups"]
    assert shown["metrics"] == row["metrics"]
    few = {**row, "metrics": {**row["metrics"], "base_rate": 4 / 260}}
    assert shareable(few)["metrics"]["tpr"] is None
    assert shareable(few)["balanced_accuracy"] is None


def test_the_mean_over_labels_does_not_give_a_hidden_label_away() -> None:
    row = {
        "records": 200,
        "metrics": {"roc_auc": 0.7, "roc_auc[x]": 0.9, "roc_auc[y]": 0.5, "base_rate[x]": 0.5, "base_rate[y]": 0.02},
        "group_records": {},
        "group_metrics": {},
    }
    shown = shareable(row)["metrics"]
    assert shown == {"roc_auc": 0.9, "roc_auc[x]": 0.9, "roc_auc[y]": None, "base_rate[x]": 0.5, "base_rate[y]": None}


def test_balanced_accuracy_does_not_give_a_small_class_away(tmp_path: Path) -> None:
    """The mean over classes minus the others is the small one's figure, so it is shared only where none is small."""
    draw = torch.Generator().manual_seed(0)

    def classes(last: int) -> eh.data.Data:
        targets = torch.tensor([0] * 60 + [1] * 60 + [2] * last)
        return eh.data.wrap(torch.randn(len(targets), 3, generator=draw) + targets.unsqueeze(1), targets)

    for last, shared in ((4, False), (30, True)):
        run = eh.fit(
            torch.nn.Linear(3, 3), classes(50), epsilon=3, epochs=1, test=classes(last), out=tmp_path / str(last)
        )
        line, figures = run.folder.last_evaluation(), summary(run)
        assert (line["balanced_accuracy"] is not None) == shared
        assert (
            (line["metrics"]["balanced_accuracy"] is not None) == (figures["balanced_accuracy"] is not None) == shared
        )
        assert (line["frontier"][0]["balanced"] is not None) == shared
        assert "fewest_of_class" not in (run.path / "metrics.jsonl").read_text()
        assert run.metrics.iloc[-1]["balanced_accuracy"] > 0, "the owner reads it in private"


def test_rates_of_a_group_with_few_records_of_one_of_several_classes_are_not_shared() -> None:
    """All records together have enough of every class, the groups have not."""
    draw = torch.Generator().manual_seed(0)
    targets = torch.tensor([0, 1] * 120 + [2] * 24)
    groups = ["a"] * 120 + ["b"] * 120 + ["a"] * 4 + ["b"] * 20
    data = eh.data.wrap(torch.randn(264, 3, generator=draw) + targets.unsqueeze(1), targets, groups=groups)
    full = row(torch.nn.Linear(3, 3), data, step=1, epoch=1.0)
    assert full["fewest_of_class"] == {"": 24, "a": 4, "b": 20}
    shown = shareable(full)
    assert shown["balanced_accuracy"] is not None
    assert shown["group_metrics"]["balanced_accuracy"] == {"a": None, "b": None}, "b and all together would tell a"
    assert shown["groups"].keys() == {"a", "b"}
    assert shareable({**full, "fewest_of_class": 4})["balanced_accuracy"] is None, "as runs of before have it"
