"""What all sources can be asked for: fewer records, owners, noisy labels; always by public seeds."""

from __future__ import annotations

import pytest
import torch

from evenhand.data import Data, load, wrap
from evenhand.data.fingerprint import fingerprint
from evenhand.data.owners_and_groups import labels
from evenhand.data.sources.variants import Shape
from evenhand.errors import UsageError


def data(count: int = 1000) -> Data:
    return wrap(torch.arange(count).float()[:, None], [row % 10 for row in range(count)], labels=range(10))


def owners(made: Data) -> list[str]:
    return [made.facts.owner_names[code] for code in made.owner.tolist()]


def rows(made: Data) -> list[int]:
    return made.fetch(torch.arange(len(made)))[0][:, 0].int().tolist()


def test_fewer_records_are_a_public_draw_in_the_old_order() -> None:
    made, _ = Shape(records=100)(data(), None)
    kept = rows(made)
    assert len(set(kept)) == 100
    assert kept == sorted(kept) != list(range(100))
    assert kept == rows(Shape(records=100)(data(), None)[0])
    with pytest.raises(UsageError, match="there are 1000"):
        Shape(records=1001)(data(), None)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("digits", {"0-4": "01234", "5-9": "56789"}),
        ("0,8/1-7,9", {"0,8": "08", "1-7,9": "12345679"}),
        ("class", {str(digit): str(digit) for digit in range(10)}),
        ({"few": [8], "many": "rest"}, {"few": "8", "many": "012345679"}),
    ],
)
def test_classes_have_owners(asked: object, names: dict[str, str]) -> None:
    made, held = Shape(owners=asked)(data(), data(50))  # type: ignore[arg-type]
    for part in (made, held):
        assert part is not None
        assert all(label in names[owner] for label, owner in zip(labels(part), owners(part), strict=True))
        assert set(part.facts.owner_names) == set(names)


def test_every_owner_can_hold_a_class_drawn_by_the_seed() -> None:
    held = [Shape(owners="random class", owner_seed=seed)(data(), None)[0] for seed in (1, 1, 2)]
    pairs = [sorted({*zip(owners(made), labels(made), strict=True)}) for made in held]
    assert len(pairs[0]) == 10
    assert pairs[0] == pairs[1] != pairs[2]


def test_owners_can_be_given_at_random_in_shares() -> None:
    shape = Shape(owner_shares={"strict": 0.34, "open": 0.66})
    made, held = shape(data(), data(500))
    assert 0.3 < owners(made).count("strict") / 1000 < 0.38
    assert held is not None
    assert owners(held) != owners(made)[:500], "another draw for what is held out"


def test_overlap_moves_records_to_other_owners() -> None:
    plain, mixed = (Shape(owners="digits", owner_overlap=share)(data(), None)[0] for share in (0.0, 0.3))
    moved = [one != two for one, two in zip(owners(plain), owners(mixed), strict=True)]
    assert 0.25 < sum(moved) / 1000 < 0.35


def test_label_noise_changes_labels_of_the_owners_named_and_nothing_else() -> None:
    made, held = Shape(owners="digits", label_noise={"0-4": 0.5})(data(), data(100))
    changed = [int(label) != row % 10 for label, row in zip(labels(made), rows(made), strict=True)]
    noisy = [flag for flag, owner in zip(changed, owners(made), strict=True) if owner == "0-4"]
    assert 0.4 < sum(noisy) / len(noisy) < 0.6
    assert sum(changed) == sum(noisy)
    assert held is not None
    assert labels(held) == labels(data(100))
    everywhere, _ = Shape(label_noise=0.5)(data(), None)
    assert 400 < sum(a != b for a, b in zip(labels(everywhere), labels(data()), strict=True)) < 600


def test_all_shapes_of_a_source_add_up_as_runs_on_the_same_data() -> None:
    whole, _ = load("digits")
    for options in ({"records": 300}, {"label_noise": 0.1}, {"owners": "digits"}):
        made, _ = load("digits", options=options)
        assert fingerprint(made) == fingerprint(whole)
        assert fingerprint(made.take(torch.arange(10))) == fingerprint(whole)
        assert str(made.origin) not in repr(made)


def test_what_a_record_is_given_does_not_depend_on_how_many_follow() -> None:
    few, many = (Shape(owners="digits", owner_overlap=0.3, label_noise=0.5)(data(n), None)[0] for n in (900, 1000))
    assert owners(few) == owners(many)[:900]
    assert labels(few) == labels(many)[:900]
    shares = [Shape(owner_shares={"a": 0.5, "b": 0.5}, owner_overlap=0.3)(data(n), None)[0] for n in (900, 1000)]
    assert owners(shares[0]) == owners(shares[1])[:900]


def test_one_record_more_moves_at_most_one_other_out_of_those_kept() -> None:
    asked = {"owners": "digits", "owner_overlap": 0.3, "label_noise": 0.5}
    for count in range(900, 920):
        one, two = (Shape(records=300, **asked)(data(n), None)[0] for n in (count, count + 1))
        first, second = ({*zip(rows(made), owners(made), labels(made), strict=True)} for made in (one, two))
        assert len(first - second) <= 1


def test_a_share_of_an_owners_training_records_is_dropped_by_coins_that_do_not_look_at_others() -> None:
    asked = Shape(owners="digits", owner_drop={"5-9": 0.4})
    fewer, held = asked(data(), data(100))
    counts = dict(fewer.facts.owners)
    assert counts["0-4"] == 500
    assert 250 < counts["5-9"] < 350
    assert held is not None
    assert len(held) == 100
    assert set(rows(asked(data(900), None)[0])) == {row for row in rows(fewer) if row < 900}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"owners": "digits", "owner_drop": {"lax": 0.5}}, "owner"),
        ({"recrods": 3}, "Did you mean 'records'"),
        ({"minority": 3}, "no option of the source digits"),
        ({"owners": "0-4"}, "none left out"),
        ({"owners": "0-5/5-9"}, "none twice"),
        ({"owners": "0-4/5-10"}, "no class of these data"),
        ({"owners": 3}, "owners takes"),
        ({"owners": "class", "owner_shares": {"a": 1.0}}, "two owners"),
        ({"owner_shares": {"a": 0.5}}, "add up to 1"),
        ({"owner_shares": 0.5}, "takes a table"),
        ({"label_noise": {"nobody": 0.5}}, "no owner called"),
        ({"label_noise": 1.5}, "label_noise"),
        ({"records": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_refused_in_words(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load("digits", options=options)
