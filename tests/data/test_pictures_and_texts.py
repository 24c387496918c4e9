"""Sources for backbones: pictures of HAM10000 in an archive, CIFAR-10 in sheets, rated texts; and rare classes."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from evenhand.data import Data, Declaration, Table, Text, feature_cache, load, wrap
from evenhand.data.feature_cache import featured
from evenhand.data.fingerprint import fingerprint
from evenhand.data.owners_and_groups import labels
from evenhand.data.sources import cifar, sentiment
from evenhand.data.sources.variants import Shape
from evenhand.errors import DataError, UsageError
from evenhand.training.config import Config

SHARED = Path(__file__).parents[3] / "shared" / "data"
DRAW = np.random.default_rng(1)


def saved(pixels: np.ndarray, kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format=kind)
    return stream.getvalue()


def ham(folder: Path, size: tuple[int, int] = (150, 200), absent: str = "") -> Path:
    rows = [("L1", "ISIC_1", "nv", "male"), ("L1", "ISIC_2", "nv", "male"), ("L2", "ISIC_3", "df", "female")]
    rows += [(f"L{n}", f"ISIC_{n + 1}", "mel", "unknown") for n in range(3, 30)]
    (folder / "ham10000").mkdir()
    table = "\n".join(["lesion_id,image_id,dx,sex", *(",".join(row) for row in rows)])
    (folder / "ham10000" / "HAM10000_metadata.csv.gz").write_bytes(gzip.compress(table.encode()))
    with tarfile.open(folder / "ham10000" / "images_200x150.tar", "w") as tar:
        for place, (_, name, _, _) in enumerate(reversed(rows)):
            content = saved(np.full((*size, 3), 255 if name == "ISIC_3" else place, dtype=np.uint8), "JPEG")
            entry = tarfile.TarInfo(f"{name}.jpg")
            entry.size = len(content)
            if name != absent:
                tar.addfile(entry, io.BytesIO(content))
    return folder


def test_pictures_of_ham10000_are_found_by_name_and_divided_by_lesion(tmp_path: Path) -> None:
    train, test = load("ham10000-200x150", data_dir=ham(tmp_path))
    assert test is not None
    assert len(train) + len(test) == 30
    assert train.facts.inputs == "(3, 150, 200) float32"
    part = train if "df" in train.group_names() else test
    row = part.group_names().index("df")
    assert torch.equal(part.fetch(torch.tensor([row]))[0], torch.ones(1, 3, 150, 200))
    assert sum("nv" in side.group_names() for side in (train, test)) == 1, "both pictures of the lesion on one side"
    by_sex, _ = load("ham10000-200x150", data_dir=tmp_path, options={"groups": "sex"})
    assert by_sex.facts.groups == ("female", "male", "unknown")
    assert fingerprint(by_sex) == fingerprint(train)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"absent": "ISIC_7"}, "pictures that the metadata name"), ({"size": (15, 20)}, "Picture 1 .* is not 200 x 150")],
)
def test_archives_without_a_picture_or_of_another_size_are_refused(tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load("ham10000-200x150", data_dir=ham(tmp_path, **options))


def sheets(folder: Path, codes: list[int] | None = None) -> np.ndarray:
    (folder / "cifar10").mkdir()
    pictures = DRAW.integers(0, 256, (6, 4, 32, 32, 3), dtype=np.uint8)
    for name, part in zip([*cifar._BATCHES, "test_batch"], pictures, strict=True):
        (folder / "cifar10" / f"{name}.png").write_bytes(saved(part.reshape(4, 1024, 3), "PNG"))
    (folder / "cifar10" / "train_lables.json").write_text(json.dumps(codes or [n % 10 for n in range(20)]))
    (folder / "cifar10" / "test_lables.json").write_text("[3, 1, 4, 1]")
    return pictures


def test_cifar10_is_read_from_the_sheets_of_the_npm_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "_ROWS", 4)
    pictures = sheets(tmp_path)
    train, test = load("cifar10", data_dir=tmp_path)
    assert test is not None
    bytes_of = [((part.fetch(torch.arange(len(part)))[0] + 1) * 127.5).round().numpy() for part in (train, test)]
    expected = pictures.transpose(0, 1, 4, 2, 3)
    assert np.array_equal(bytes_of[0], expected[:5].reshape(20, 3, 32, 32))
    assert np.array_equal(bytes_of[1], expected[5])
    assert test.group_names() == ["cat", "automobile", "deer", "automobile"]


@pytest.mark.parametrize("codes", [[1] * 19, [10] * 20, [[1]], ["a"] * 20])
def test_lists_of_other_classes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list) -> None:
    monkeypatch.setattr(cifar, "_ROWS", 4)
    sheets(tmp_path, codes)
    with pytest.raises(DataError, match=r"train_lables.json is not a list"):
        load("cifar10", data_dir=tmp_path)


def test_the_real_texts_have_a_domain_and_a_sentiment() -> None:
    if not (SHARED / "sentiment").exists():
        pytest.skip("the files of sentiment are not in ../shared/data")
    train, test = load("sentiment", data_dir=SHARED)
    assert test is not None
    counts = Counter(train.group_names()) + Counter(test.group_names())
    assert counts == {"movie reviews": 10605, "editorials": 5190, "tweets": 4200, "product reviews": 3708}
    assert 0.19 < len(test) / 23703 < 0.21
    assert 0.45 < labels(train).count("positive") / len(train) < 0.6
    rows = {tuple(row) for row in train.fetch(torch.arange(len(train)))[0].tolist()}
    cut = sum(row[-1] != 0 for row in rows)
    assert cut < 30
    both = rows & {tuple(row) for row in test.fetch(torch.arange(len(test)))[0].tolist()}
    assert len(both) <= cut, "equal texts are on one side, but for those that are cut"


@pytest.mark.parametrize("line", ["1\t5.0\ttoo good", "1\tnan\twhat", "1\ttext only", ""])
def test_tables_of_ratings_that_are_damaged_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "sentiment").mkdir()
    for name in sentiment.FILES.values():
        (tmp_path / "sentiment" / name).write_text(line)
    with pytest.raises(DataError, match="is not a table"):
        load("sentiment", data_dir=tmp_path)


def test_a_class_is_made_rare_by_its_first_records() -> None:
    codes = [n % 4 for n in range(400)]
    data = wrap(torch.arange(400).float()[:, None], codes, labels=range(4))
    cut, held_out = Shape(rare=3, rare_share=0.05, label_noise=0.5)(data, data)
    numbers = cut.fetch(torch.arange(len(cut)))[0][:, 0].int().tolist()
    rare = [number for number in numbers if codes[number] == 3]
    assert rare == [3 + 4 * n for n in range(15)], "by the true class, whatever became of the labels"
    assert len(numbers) == 315
    assert held_out is data
    with pytest.raises(UsageError, match="class of these data"):
        Shape(rare="frog")(data, None)
    with pytest.raises(UsageError, match="rare_share"):
        Shape(rare=3, rare_share=2.0)


def test_a_text_column_is_the_only_feature(tmp_path: Path) -> None:
    declared = Declaration({"said": Text(8)}, label="mood", labels=("good", "bad"))
    data = declared.data(Table({"said": ["ja", "naïveté!"], "mood": ["good", "bad"]}))
    assert data.facts.inputs == "(8,) int64"
    assert bytes(data.fetch(torch.arange(2))[0][1].tolist()).decode("utf-8", "ignore") == "naïvet"
    (tmp_path / "said.csv").write_text("said,city,mood\nja,a,good\nnein,b,bad\nja doch,a,good\n")
    own = {"data": str(tmp_path / "said.csv"), "label": "mood", "labels": ["good", "bad"], "groups": "city"}
    city = {"kind": "category", "values": ["a", "b"], "feature": False}
    columns = {"said": {"kind": "text", "length": 8}, "city": city}
    assert Config(**own, columns=columns).load_data()[0].facts.groups == ("a", "b")
    with pytest.raises(UsageError, match="the only feature"):
        Config(**own, columns={**columns, "city": {**city, "feature": True}}).load_data()
    with pytest.raises(UsageError, match="length = 256"):
        Config(**own, columns={**columns, "said": {"kind": "text"}}).load_data()


def test_features_of_data_that_are_fetched_in_parts_are_those_of_the_whole(
    digit_data: tuple[Data, Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(name: str, inputs: torch.Tensor) -> torch.Tensor:
        sizes.append(len(inputs))
        return inputs * 2

    sizes: list[int] = []
    whole = featured(digit_data[1], "twice", doubled)
    monkeypatch.setattr(feature_cache, "LARGEST", 100 * 64 * 4)
    parts = featured(digit_data[1], "twice", doubled, provenance="A network")
    rows = torch.arange(len(whole))
    assert sizes == [450, 100, 100, 100, 100, 50]
    assert all(torch.equal(a, b) for a, b in zip(whole.fetch(rows), parts.fetch(rows), strict=True))
    assert (whole.facts.features, parts.facts.features) == ("", "A network")
