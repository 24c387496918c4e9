"""Official file formats, on small made-up files: archives of CIFAR, IDX, folders of pictures and of thermal frames."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up import archive, chexpert, fashion, idx, pictures, save

from evenhand.data import Data, load, sources
from evenhand.data.fingerprint import fingerprint
from evenhand.errors import DataError, UsageError


def python10(path: Path, images: np.ndarray, codes: list[int]) -> None:
    parts = {f"data_batch_{number}": slice(number - 1, number) for number in range(1, 6)} | {"test_batch": slice(5, 6)}
    batches = {
        name: pickle.dumps({b"data": images[part], b"labels": codes[part]}, protocol=2) for name, part in parts.items()
    }
    archive(path / "cifar10" / "cifar-10-python.tar.gz", {**batches, "batches.meta": b"not read", "readme.html": b""})


def binary10(path: Path, images: np.ndarray, codes: list[int]) -> None:
    rows = [bytes([code]) + image.tobytes() for code, image in zip(codes, images, strict=True)]
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    archive(path / "cifar10" / "cifar-10-binary.tar.gz", dict(zip(names, rows, strict=True)))


def published10(path: Path, images: np.ndarray, codes: list[int]) -> None:
    """As Python 2 pickled the official batches: text as bytes, an old name of numpy's module."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01M\x00\x0c\x86"
    kind = (
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
        + 2 * b"J\xff\xff\xff\xff"
        + b"K\x00tb\x89T\x00\x0c\x00\x00"
    )
    batches = [
        b"\x80\x02}(U\x04data" + array + kind + image.tobytes() + b"tbU\x06labels](K" + bytes([code]) + b"eu."
        for code, image in zip(codes, images, strict=True)
    ]
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    archive(path / "cifar10" / "cifar-10-python.tar.gz", dict(zip(names, batches, strict=True)))


@pytest.mark.parametrize("write", [python10, published10, binary10])
def test_all_versions_of_cifar10_are_read_alike(tmp_path: Path, write: object) -> None:
    images, codes = pictures(6), [3, 0, 9, 1, 1, 7]
    write(tmp_path, images, codes)  # type: ignore[operator]
    train, test = load("cifar10", data_dir=tmp_path)
    assert test is not None
    assert (len(train), len(test)) == (5, 1)
    inputs, targets = train.fetch(torch.arange(5))
    assert targets.tolist() == codes[:5]
    assert torch.allclose(inputs.reshape(5, -1), torch.from_numpy(images[:5] / 127.5 - 1).float(), atol=1e-6)
    assert test.group_names() == ["horse"]


def test_cifar100_has_fine_and_coarse_classes_in_both_versions(tmp_path: Path) -> None:
    images, fine, coarse = pictures(2), [1, 0], [0, 2]
    made = {b"data": images, b"fine_labels": fine, b"coarse_labels": coarse}
    meta = {b"fine_label_names": [b"apple", b"bear"], b"coarse_label_names": [b"fish", b"people", b"trees"]}
    members = {name: pickle.dumps(part, protocol=2) for name, part in (("train", made), ("test", made), ("meta", meta))}
    archive(tmp_path / "a" / "cifar100" / "cifar-100-python.tar.gz", members)
    rows = b"".join(bytes([c, f]) + image.tobytes() for c, f, image in zip(coarse, fine, images, strict=True))
    texts = {"fine_label_names.txt": b"apple\nbear\n", "coarse_label_names.txt": b"fish\npeople\ntrees\n"}
    archive(tmp_path / "b" / "cifar100" / "cifar-100-binary.tar.gz", {"train.bin": rows, "test.bin": rows, **texts})
    for version in "ab":
        train, _ = load("cifar100", data_dir=tmp_path / version)
        assert train.group_names() == ["bear", "apple"]
        train, _ = load("cifar100", data_dir=tmp_path / version, options={"classes": "coarse"})
        assert train.group_names() == ["fish", "trees"]


class Trap:
    ran = False

    def __reduce__(self) -> tuple:
        return setattr, (Trap, "ran", True)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    archive(tmp_path / "cifar10" / "cifar-10-python.tar.gz", {name: pickle.dumps(Trap()) for name in names})
    with pytest.raises(DataError, match="not an archive of CIFAR"):
        load("cifar10", data_dir=tmp_path)
    assert not Trap.ran


@pytest.mark.parametrize("content", [b"", b"garbage", gzip.compress(b"garbage", mtime=0)])
def test_damaged_archives_are_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-python.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match="not an archive of CIFAR"):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_gzipped_or_not(tmp_path: Path, packed: bool) -> None:
    train, test = load("fashion-mnist", data_dir=fashion(tmp_path, packed=packed))
    assert test is not None
    assert train.group_names() == ["T-shirt/top", "Trouser", "Pullover", "Dress"]
    assert len(test) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\0\x08\x03", idx(np.zeros((2, 2), np.uint8))[:-1], gzip.compress(b"", mtime=0)[:9]],
    ids=["empty", "header", "short", "gzip"],
)
def test_damaged_idx_files_are_told(tmp_path: Path, content: bytes) -> None:
    fashion(tmp_path, packed=False)
    file = tmp_path / "fashion-mnist" / "t10k-images-idx3-ubyte"
    file.unlink()
    file.with_suffix(".gz" if content[:1] == b"\x1f" else "").write_bytes(content)
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.*(as published|damaged)"):
        load("fashion-mnist", data_dir=tmp_path)


@pytest.mark.parametrize("name", sorted(set(sources.SOURCES) - {"digits"}))
def test_missing_files_are_named_with_folder_and_way_to_get_them(tmp_path: Path, name: str) -> None:
    found = sources.SOURCES[name]
    with pytest.raises(UsageError) as caught:
        load(name, data_dir=tmp_path)
    message = str(caught.value)
    assert all(file.name in message for file in found.files[0])
    assert str(tmp_path / (found.folder or name)) in message
    assert (f"evenhand data fetch {name}" in message) == found.fetchable
    assert found.fetchable or found.hint in message


def test_pneumonia_folders_are_read_with_two_or_three_classes(tmp_path: Path) -> None:
    for part in ("train", "test"):
        save(tmp_path / "pneumonia" / part / "NORMAL" / "IM-1.png", 0)
        save(tmp_path / "pneumonia" / part / "PNEUMONIA" / "person1_bacteria_1.png", 255)
        save(tmp_path / "pneumonia" / part / "PNEUMONIA" / "person2_virus_2.png", 51)
    train, _ = load("pneumonia", data_dir=tmp_path, options={"size": 16})
    assert train.group_names() == ["normal", "pneumonia", "pneumonia"]
    assert train.facts.inputs == "(1, 16, 16) float32"
    assert train.fetch(torch.arange(3))[0].mean((1, 2, 3)).tolist() == pytest.approx([-1, 1, -0.6])
    three, _ = load("pneumonia", data_dir=tmp_path, options={"classes": "three"})
    assert three.group_names() == ["normal", "bacterial", "viral"]
    (tmp_path / "pneumonia" / "test" / "OTHER").mkdir()
    with pytest.raises(DataError, match="NORMAL and PNEUMONIA"):
        load("pneumonia", data_dir=tmp_path)


def test_thermal_frames_are_cut_around_the_hottest_pixel(tmp_path: Path) -> None:
    place = tmp_path / "thinwall"
    (place / "frames").mkdir(parents=True)
    kinds = ["porous" if number % 5 == 0 else "healthy" for number in range(20)]
    for number in range(20):
        frame = np.full((12, 16), 1500.0)
        frame[number % 12, 15] = 9999.0
        np.savetxt(place / "frames" / f"{number}.csv", frame, delimiter=",")
    lines = [f"{number}.csv,{kind}" for number, kind in enumerate(kinds)]
    (place / "labels.csv").write_text("\n".join(["file,label", *lines]))
    train, test = load("thinwall", data_dir=tmp_path, options={"size": 8})
    assert test is not None
    assert len(train) + len(test) == 20
    inputs, _ = train.fetch(torch.arange(len(train)))
    assert inputs.shape[1:] == (1, 8, 8)
    assert inputs.unique().tolist() == [0, 1], "clipped to the declared temperatures"
    assert (inputs.amax((1, 2, 3)) == 1).all()
    for options in ({"size": 8, "split_seed": 1}, {"size": 5}, {"size": 8, "high": 2000.0}, {"size": 8, "records": 9}):
        made, held = load("thinwall", data_dir=tmp_path, options=options)
        assert held is not None
        assert fingerprint(made) == fingerprint(held) == fingerprint(train), "runs on the same frames add up"
    with pytest.raises(DataError, match="frame 1, a table of at least 13 x 13"):
        load("thinwall", data_dir=tmp_path, options={"size": 13})
    for content in ("", "1,2\n3", "1,hot"):
        (place / "frames" / "0.csv").write_text(content)
        with pytest.raises(DataError, match="frame 1, a table"):
            load("thinwall", data_dir=tmp_path, options={"size": 1})
    (place / "labels.csv").write_text("file,label\n../../labels.csv,porous\n")
    with pytest.raises(DataError, match="plain file names"):
        load("thinwall", data_dir=tmp_path)


def test_chexpert_has_several_findings_or_one_class(tmp_path: Path) -> None:
    train, test = load("chexpert", data_dir=chexpert(tmp_path), options={"size": 8})
    inputs, targets = train.fetch(torch.tensor([0, 1]))
    assert inputs.shape == (2, 1, 8, 8)
    assert inputs.min() == 1
    assert targets.tolist() == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 1]]
    assert train.fetch(torch.arange(0))[0].shape == (0, 1, 8, 8)
    assert train.group_names() == ["Female", "Male"]
    assert train.facts.inputs == "(1, 8, 8) float32"
    assert isinstance(test, Data)
    ones, _ = load("chexpert", data_dir=tmp_path, options={"uncertain": "ones"})
    assert ones.fetch(torch.tensor([0]))[1].tolist() == [[1, 0, 0, 1, 0]]
    single, _ = load("chexpert", data_dir=tmp_path, options={"findings": ["Edema"], "uncertain": "ones"})
    assert single.facts.labels == ("absent", "present")
    assert single.fetch(torch.arange(2))[1].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("adult", "adult.data", "39, Private\n"),
        ("adult", "adult.data", "?, " * 14 + "<=50K\n"),
        ("adult", "adult.data", ""),
        ("dutch", "dutch.csv", "sex,age\nmale,4\n"),
        ("ctg", "ctg.csv", "LB,AC\n1,2\n"),
        ("german", "german.data", "A11 6\n"),
        ("names", "names.csv", "country,surname\nArabic\n"),
        ("names", "names.csv", "country,surname\nKlingon,Worf\n"),
        ("thinwall", "labels.csv", "file,label\na.csv,warm\n"),
    ],
)
def test_other_tables_than_the_published_ones_are_told(tmp_path: Path, name: str, file: str, content: str) -> None:
    for other in (other.name for files in sources.SOURCES[name].files for other in files):
        (tmp_path / name / other).parent.mkdir(exist_ok=True)
        (tmp_path / name / other).touch()
    (tmp_path / name / file).write_text(content)
    with pytest.raises(DataError, match=f"{file} is not .* as published"):
        load(name, data_dir=tmp_path)


def test_chexpert_stays_inside_its_folder(tmp_path: Path) -> None:
    chexpert(tmp_path)
    table = tmp_path / "chexpert" / "train.csv"
    table.write_text(table.read_text().replace("train/patient2", "train/../../patient2"))
    with pytest.raises(DataError, match="below train"):
        load("chexpert", data_dir=tmp_path)
