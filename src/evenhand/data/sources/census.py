"""Adult (Census Income 1994) and the Dutch census of 2001, as paper 003 (DPSGD-F) uses them: sex is the group.

The paper says only that the unprotected attributes are one-hot and that there are 40 of them for Adult and 35 for
Dutch. Which ones is OUR choice: the attributes whose published categories add up to exactly that.
"""

from __future__ import annotations

from collections.abc import Mapping

from evenhand import _validate
from evenhand.data.columns import Category, Column, Number
from evenhand.data.sources.base import File, Loaded, Place, Source, choice, damaged
from evenhand.data.tables import Declaration, Table, split

HELD_OUT = 0.2
_ADULT_NAMES = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
_ADULT = {
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
    "Married-AF-spouse",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
    "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
}
_ADULT_MORE: dict[str, Column] = {
    "age": Number(17, 90),
    "education-num": Number(1, 16),
    "capital-gain": Number(0, 99999),
    "capital-loss": Number(0, 5000),
    "hours-per-week": Number(1, 99),
    "native-country": Category(("United-States",), other="elsewhere"),
}
_DUTCH = {
    "household_position": "1110 1121 1122 1131 1132 1140 1210 1220",
    "household_size": "111 112 113 114 125 126",
    "prev_residence_place": "1 2",
    "citizenship": "1 2 3",
    "country_birth": "1 2 3",
    "edu_level": "0 1 2 3 4 5",
    "economic_status": "111 112 120",
    "marital_status": "1 2 3 4",
}
_DUTCH_MORE: dict[str, Column] = {
    "age": Category([str(code) for code in range(4, 16)]),
    "cur_eco_activity": Category([str(code) for code in (111, 122, 124, *range(131, 140))]),
}


def adult(place: Place, attributes: str = "paper", split_seed: int = 0) -> Loaded:
    """Read Adult (does a person earn more than 50,000 dollars?): 45,222 complete records, a fifth held out.

    Args:
      place: the folder.
      attributes: "paper" (40 features, one-hot: workclass 8, marital-status 7, occupation 14, relationship 6, race 5,
        the categories being those that adult.names lists), or "all": also age 17-90, education-num 1-16, capital-gain
        0-99,999, capital-loss 0-5,000, hours-per-week 1-99, each scaled to [-1, 1], and whether native-country is the
        United States (47 features). Sex is never a feature.
      split_seed: public seed of the split.
    """
    more = _ADULT_MORE if choice(attributes, ("paper", "all"), "attributes") == "all" else {}
    rows = [row for name in ("adult.data", "adult.test") for row in _adult_rows(place, name) if "?" not in row]
    table = Table(dict(zip(_ADULT_NAMES, zip(*rows, strict=True), strict=True)))
    declared = Declaration(
        {**_one_hot(_ADULT), **more, "sex": Category(("Female", "Male"), feature=False)},
        label="income",
        labels=("<=50K", ">50K"),
        groups="sex",
    )
    return split(declared.data(table), HELD_OUT, _validate.whole(split_seed, "split_seed", low=0))


def _adult_rows(place: Place, name: str) -> list[list[str]]:
    lines = place.text(name).splitlines()
    rows = [line.strip().removesuffix(".").split(", ") for line in lines if line.strip() and not line.startswith("|")]
    if all("?" in row for row in rows) or any(len(row) != len(_ADULT_NAMES) for row in rows):
        raise damaged(place.path(name), "a list of 15 values a line")
    return rows


def dutch(place: Place, attributes: str = "paper", split_seed: int = 0) -> Loaded:
    """Read the Dutch census (has a person a high occupation?): 60,420 records, a fifth held out.

    Paper 003 prints M 30,273 and F 30,147; in the published file 30,273 records are female.

    Args:
      place: the folder.
      attributes: "paper" (35 features: every attribute but age and current economic activity, one-hot), or "all" (59).
        Sex is never a feature.
      split_seed: public seed of the split.
    """
    more = _DUTCH_MORE if choice(attributes, ("paper", "all"), "attributes") == "all" else {}
    lines = place.text("dutch.csv").splitlines()
    names = lines[0].split(",") if lines else []
    rows = [line.split(",") for line in lines[1:]]
    if len(names) != 12 or not rows or any(len(row) != len(names) for row in rows):
        raise damaged(place.path("dutch.csv"), "a CSV file of 12 columns")
    declared = Declaration(
        {**_one_hot(_DUTCH), **more, "sex": Category(("female", "male"), feature=False)},
        label="occupation",
        labels=("0", "1"),
        groups="sex",
    )
    data = declared.data(Table(dict(zip(names, zip(*rows, strict=True), strict=True))))
    return split(data, HELD_OUT, _validate.whole(split_seed, "split_seed", low=0))


def _one_hot(values: Mapping[str, str]) -> dict[str, Column]:
    return {name: Category(tuple(listed.split())) for name, listed in values.items()}


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
ADULT = Source(
    "adult",
    adult,
    records="45,222, a fifth of them held out",
    groups="sex",
    licence="UCI, listed as CC BY 4.0",
    files=(
        (
            File(
                "adult.data",
                f"{_UCI}adult.data",
                "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            ),
            File(
                "adult.test",
                f"{_UCI}adult.test",
                "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
            ),
        ),
    ),
)
DUTCH = Source(
    "dutch",
    dutch,
    records="60,420, a fifth of them held out",
    groups="sex",
    licence="none stated; microdata of Statistics Netherlands by way of IPUMS",
    files=((File("dutch.csv"),),),
    hint="The file is experiments/data/dutch.csv of the fairness survey of Le Quy et al. 2022 "
    "(github.com/tailequy/fairness_dataset); it states no licence, so it is not downloaded for you.",
)
