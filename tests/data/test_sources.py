"""Named data sets on the real files: published numbers of records, and splits that keep apart what belongs apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from evenhand.data import Data, load
from evenhand.data.fingerprint import fingerprint
from evenhand.data.owners_and_groups import labels

SHARED = Path(__file__).parents[3] / "shared" / "data"


def real(name: str, folder: str = "", **options: object) -> tuple[Data, Data]:
    if not (SHARED / (folder or name)).exists():
        pytest.skip(f"the files of {name} are not in ../shared/data")
    train, test = load(name, data_dir=SHARED, options=options)
    assert test is not None
    return train, test


def by_group(*parts: Data) -> dict[str, int]:
    return dict(Counter(name for part in parts for name in part.group_names()))


@pytest.fixture(scope="module")
def mnist() -> tuple[Data, Data]:
    return real("mnist")


def test_mnist_has_its_published_counts_and_ink_from_zero_to_one(mnist: tuple[Data, Data]) -> None:
    train, test = mnist
    digits = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(train.group).tolist() == digits
    assert torch.bincount(test.group).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert train.facts.inputs == "(1, 28, 28) float32"
    pixels, targets = train.fetch(torch.arange(100))
    assert (pixels.min().item(), pixels.max().item()) == (0.0, 1.0)
    assert targets[:5].tolist() == [5, 0, 4, 1, 9]


def test_unbalanced_mnist_is_that_of_the_paper_and_adds_up_with_mnist(mnist: tuple[Data, Data]) -> None:
    train, test = real("unbalanced-mnist", "mnist")
    assert (len(train), len(test)) == (54649, 10000)
    assert by_group(train)["class 8"] == 500
    assert fingerprint(train) == fingerprint(mnist[0])
    share, _ = real("unbalanced-mnist", "mnist", minority=3, share=0.01)
    assert 0.0099 < by_group(share)["class 3"] / len(share) <= 0.01
    assert by_group(share)["class 8"] == 5851


def test_adult_is_the_clean_table_with_the_papers_forty_features() -> None:
    train, test = real("adult")
    assert by_group(train, test) == {"Male": 30527, "Female": 14695}
    assert Counter(labels(train) + labels(test)) == {"<=50K": 34014, ">50K": 11208}
    assert train.facts.inputs == test.facts.inputs == "(40,) float32"
    assert 0.19 < len(test) / 45222 < 0.21
    inputs, _ = train.fetch(torch.arange(1000))
    assert inputs.unique().tolist() == [0, 1]
    assert inputs.sum(1).unique().tolist() == [5], "one category of each of five attributes"
    assert real("adult", attributes="all")[0].facts.inputs == "(47,) float32"


def test_dutch_is_the_published_table_with_the_papers_thirty_five_features() -> None:
    train, test = real("dutch")
    assert by_group(train, test) == {"female": 30273, "male": 30147}
    assert Counter(labels(train) + labels(test)) == {"0": 31657, "1": 28763}
    assert train.facts.inputs == "(35,) float32"
    assert real("dutch", attributes="all")[0].facts.inputs == "(59,) float32"


def test_the_split_follows_from_a_public_seed() -> None:
    first, again, other = (real("ctg", split_seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first.fetch(torch.arange(50))[0], again.fetch(torch.arange(50))[0])
    assert len(first) == len(again) == len(other)
    assert not torch.equal(first.fetch(torch.arange(50))[0], other.fetch(torch.arange(50))[0])
    assert fingerprint(first) == fingerprint(other), "whoever trains on either side is counted in one ledger"


def test_cardiotocography_has_its_published_counts_inside_declared_bounds() -> None:
    train, test = real("ctg", owners="class")
    assert by_group(train, test) == {"normal": 1655, "suspect": 295, "pathologic": 176}
    assert dict(train.facts.owners) == by_group(train)
    assert dict(test.facts.owners) == by_group(test)
    inputs = torch.cat([part.fetch(torch.arange(len(part)))[0] for part in (train, test)])
    assert inputs.shape == (2126, 21)
    assert (inputs.abs() < 1).float().mean() > 0.5, "the bounds are not those of a few records"
    assert inputs.abs().max() <= 1


def test_ham10000_keeps_every_lesion_on_one_side() -> None:
    train, test = real("ham10000")
    counts = {"nv": 6705, "mel": 1113, "bkl": 1099, "bcc": 514, "akiec": 327, "vasc": 142, "df": 115}
    assert by_group(train, test) == counts
    from evenhand.data.sources.base import held_out

    lesions = files_of_ham()["lesion_id"].tolist()
    side = held_out(lesions, 0.2, seed=0)
    assert int(side.sum()) == len(test)
    assert len(set(lesions)) == 7470
    assert not {lesion for lesion, held in zip(lesions, side, strict=True) if held} & {
        lesion for lesion, held in zip(lesions, side, strict=True) if not held
    }
    assert by_group(*real("ham10000", groups="sex")) == {"male": 5406, "female": 4552, "unknown": 57}


def files_of_ham() -> dict:
    from evenhand.data import read_files

    return read_files.arrays(SHARED / "ham10000" / "ham10000_28x28_rgb.npz")


def test_the_subset_of_cifar10_is_balanced() -> None:
    train, test = real("cifar10-subset", "cifar10")
    assert set(by_group(train).values()) == {1000}
    assert set(by_group(test).values()) == {200}
    assert train.facts.inputs == "(3, 32, 32) float32"


def test_german_credit_has_sex_as_group_and_not_as_feature() -> None:
    train, test = real("german")
    assert by_group(train, test) == {"male": 690, "female": 310}
    assert Counter(labels(train) + labels(test)) == {"good": 700, "bad": 300}


def test_names_are_codes_and_no_name_is_both_learned_and_tested() -> None:
    train, test = real("names", owners={"majority": "Russian", "others": "rest"})
    assert len(train) + len(test) == 20050
    assert by_group(train, test)["Vietnamese"] == 73
    assert train.facts.owner_names == ("majority", "others")
    rows = [part.fetch(torch.arange(len(part))) for part in (train, test)]
    sides = [set(zip(map(tuple, names.tolist()), code.tolist(), strict=True)) for names, code in rows]
    shared = sides[0] & sides[1]
    assert len(shared) < 20, "only names that differ in accents or after twenty letters"
    assert rows[0][0].max() < 128
