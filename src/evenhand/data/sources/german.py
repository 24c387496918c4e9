"""German Credit (UCI Statlog): 1,000 loans, good or bad, with sex as the group."""

from __future__ import annotations

from evenhand import _validate
from evenhand.data.columns import Category, Column, Number
from evenhand.data.sources.base import File, Loaded, Place, Source, damaged
from evenhand.data.tables import Declaration, Table, split

HELD_OUT = 0.2
NAMES = (
    *("status", "duration", "history", "purpose", "amount", "savings", "employment", "rate", "personal", "debtors"),
    *(
        "residence",
        "property",
        "age",
        "plans",
        "housing",
        "credits",
        "job",
        "dependents",
        "telephone",
        "foreign",
        "risk",
    ),
)
CODES = {
    "status": "A11 A12 A13 A14",
    "history": "A30 A31 A32 A33 A34",
    "purpose": "A40 A41 A42 A43 A44 A45 A46 A47 A48 A49 A410",
    "savings": "A61 A62 A63 A64 A65",
    "employment": "A71 A72 A73 A74 A75",
    "debtors": "A101 A102 A103",
    "property": "A121 A122 A123 A124",
    "plans": "A141 A142 A143",
    "housing": "A151 A152 A153",
    "job": "A171 A172 A173 A174",
    "telephone": "A191 A192",
    "foreign": "A201 A202",
}
NUMBERS = {
    "duration": (0, 72),
    "amount": (0, 20000),
    "rate": (1, 4),
    "residence": (1, 4),
    "age": (18, 80),
    "credits": (1, 4),
    "dependents": (1, 2),
}
FEMALE = ("A92", "A95")


def german(place: Place, split_seed: int = 0) -> Loaded:
    """Read 19 of 20 attributes: names one-hot, numbers scaled to [-1, 1] by declared bounds; a fifth held out.

    Attribute 9 holds marital status and sex together: it gives the group and is not a feature.
    """
    rows = [line.split() for line in place.text("german.data").splitlines() if line.strip()]
    if not rows or any(len(row) != len(NAMES) for row in rows):
        raise damaged(place.path("german.data"), "a list of 21 values a line")
    cells = dict(zip(NAMES, zip(*rows, strict=True), strict=True))
    columns: dict[str, Column] = {name: Category(tuple(listed.split())) for name, listed in CODES.items()}
    columns |= {name: Number(low, high) for name, (low, high) in NUMBERS.items()}
    declared = Declaration(
        {**columns, "sex": Category(("female", "male"), feature=False)},
        label="risk",
        labels=("good", "bad"),
        groups="sex",
    )
    sex = ["female" if code in FEMALE else "male" for code in cells["personal"]]
    risk = [{"1": "good", "2": "bad"}.get(code, "") for code in cells["risk"]]
    data = declared.data(Table({**cells, "sex": sex, "risk": risk}))
    return split(data, HELD_OUT, _validate.whole(split_seed, "split_seed", low=0))


GERMAN = Source(
    "german",
    german,
    records="1,000, a fifth of them held out",
    groups="sex",
    licence="UCI, listed as CC BY 4.0",
    files=(
        (
            File(
                "german.data",
                "https://archive.ics.uci.edu/ml/machine-learning-databases/statlog/german/german.data",
                "sha256:b21f3d81db8071257d5ff1deaeba1fd4303b62712e6fcc9715c7a86202cb5871",
            ),
        ),
    ),
)
