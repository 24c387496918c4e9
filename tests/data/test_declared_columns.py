"""Settings of built-in data in a config, a TOML file and flags: folder, options, features."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up import chexpert, fashion, save

from commands import evenhand, result
from evenhand.data import Data
from evenhand.data.feature_cache import featured
from evenhand.data.fingerprint import fingerprint
from evenhand.errors import UsageError
from evenhand.training.config import Config, from_toml, of_run, to_toml

BACKBONE = "import torch\n\ndef pooled():\n    return torch.nn.Sequential(torch.nn.AvgPool2d(7), torch.nn.Flatten())\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "evenhand" / "features"


def test_a_file_keeps_folder_options_and_features(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'data = "mnist"\ndata_dir = "files"\nfeatures = "nets.py:pooled"\n\n[source]\nrecords = 100\n\n'
        '[source.owners]\nlow = [0, 1, 2, 3, 4]\nhigh = "rest"\n'
    )
    config = from_toml(file)
    assert config.data_dir == str(tmp_path / "files")
    assert config.features == f"{tmp_path / 'nets.py'}:pooled"
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert from_toml(again) == config


def test_comparisons_take_the_same_settings(tmp_path: Path) -> None:
    from evenhand.comparison.sweep import sweep

    asked = {"data": "mnist", "data_dir": "files", "features": "scattering", "source": {"owners": "digits"}}
    base = sweep({**asked, "budgets": {"0-4": 1, "5-9": 8}}, tmp_path).base
    assert base.data_dir == str(tmp_path / "files")
    assert (base.features, base.source) == ("scattering", {"owners": "digits"})


def test_owners_come_from_one_place() -> None:
    with pytest.raises(UsageError, match="an owner already"):
        Config(owners="label", source={"owners": "class"})
    with pytest.raises(UsageError, match="a file of your own has none"):
        Config(data="people.csv", label="ill", columns={"age": {}}, source={"records": 3}).load_data()


def test_plan_and_train_take_options_of_the_source(tmp_path: Path) -> None:
    flags = ("--data", "digits", "--source", "records=400", "--source", 'owner_shares={"a":0.5,"b":0.5}', "--noise", 2)
    planned = result("plan", *flags, "--epochs", 1)
    trained = result("train", *flags, "--epochs", 1, "--model", "linear", "--out", tmp_path / "run")
    assert set(planned["owners"]) == set(trained["owners"]) == {"a", "b"}
    assert of_run(tmp_path / "run").source == {"records": 400, "owner_shares": {"a": 0.5, "b": 0.5}}
    wrong = evenhand("plan", "--data", "digits", "--source", "recods=3", "--epsilon", 3)
    assert wrong.returncode == 2
    assert "Did you mean 'records'" in wrong.stderr
    assert "--source records=10000" in evenhand("train", "--source", "records", "--epsilon", 3).stderr


def test_features_take_the_place_of_the_inputs_and_runs_on_them_add_up(tmp_path: Path, cache: Path) -> None:
    fashion(tmp_path, packed=False)
    plain, scattered = (
        Config(data="fashion-mnist", data_dir=str(tmp_path), features=name).load_data() for name in (None, "scattering")
    )
    assert plain[0].facts.inputs == "(1, 28, 28) float32"
    inputs, targets = scattered[0].fetch(torch.arange(4))
    assert scattered[0].facts.inputs == f"{tuple(inputs.shape[1:])} float32" != plain[0].facts.inputs
    assert targets.tolist() == [0, 1, 2, 3]
    assert fingerprint(scattered[0]) == fingerprint(plain[0])
    assert len(list(cache.iterdir())) == 2, "training and held-out part"
    assert {stat.S_IMODE(file.stat().st_mode) for file in cache.iterdir()} == {0o600}
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_folder_of_features_that_others_could_read_is_closed(digit_data: tuple[Data, Data], cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    featured(digit_data[1], "same", lambda name, inputs: inputs, keep=True)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_runs_on_one_file_add_up_whatever_is_declared_and_however_it_is_split(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lines = [f"{draw.random():.3f},{draw.random():.3f},{'yes' if row % 3 else 'no'}" for row in range(60)]
    (tmp_path / "mine.csv").write_text("\n".join(["a,b,ill", *lines]))
    (tmp_path / "other.csv").write_text("\n".join(["a,b,ill", *lines[1:]]))
    number = {"kind": "number", "low": 0, "high": 1}
    own = {"data": str(tmp_path / "mine.csv"), "label": "ill", "labels": ["yes", "no"]}
    own["columns"] = {"a": number, "b": number}
    base = fingerprint(Config(**own).load_data()[0])
    for change in (
        {"seed": 1},
        {"split_seed": 5},
        {"test_share": 0.5},
        {"labels": ["no", "yes"]},
        {"columns": {"a": {**number, "high": 2}}},
        {"test_data": str(tmp_path / "other.csv")},
    ):
        assert fingerprint(Config(**{**own, **change}).load_data()[0]) == base, change
    assert fingerprint(Config(**{**own, "data": str(tmp_path / "other.csv")}).load_data()[0]) != base


def test_runs_on_one_folder_of_pictures_add_up_at_any_size(tmp_path: Path) -> None:
    for number in range(20):
        save(tmp_path / "scans" / ("ill", "well")[number % 2] / f"{number}.png", 10 * number)
    own = {"data": str(tmp_path / "scans"), "label": "folder", "labels": ["ill", "well"]}

    def told(side: int, seed: int) -> str:
        picture = {"kind": "image", "height": side, "width": side, "channels": 1, "resize": True}
        return fingerprint(Config(**own, columns={"image": picture}, seed=seed).load_data()[0])

    assert told(8, 0) == told(4, 1)
    before = told(8, 0)
    save(tmp_path / "scans" / "ill" / "0.png", 255)
    assert told(8, 0) != before


def test_kept_features_are_used_and_belong_to_their_records(digit_data: tuple[Data, Data], cache: Path) -> None:
    calls = []

    def doubled(name: str, inputs: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        return 2 * inputs

    train, test = digit_data
    first = featured(train, "twice", doubled, keep=True)
    again = featured(train, "twice", doubled, keep=True)
    rows = torch.arange(len(train))
    assert calls == ["twice"]
    assert torch.equal(first.fetch(rows)[0], again.fetch(rows)[0])
    assert torch.equal(first.fetch(rows)[0], 2 * train.fetch(rows)[0])
    featured(test, "twice", doubled, keep=True)
    featured(train, "other", doubled, keep=True)
    assert calls == ["twice", "twice", "other"]
    for file in cache.iterdir():
        file.write_bytes(b"damaged")
    featured(train, "twice", doubled, keep=True)
    assert len(calls) == 4, "a damaged file is made again"


def test_features_of_a_file_of_ones_own_are_not_kept(tmp_path: Path, cache: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.random.default_rng(0).random((40, 28, 28)), y=[0, 1] * 20)
    (tmp_path / "nets.py").write_text(BACKBONE)
    declared = {"x": {"kind": "number", "low": 0, "high": 1}}
    own = Config(data=str(tmp_path / "mine.npz"), label="y", labels=[0, 1], columns=declared)
    code = f"{tmp_path / 'nets.py'}:pooled"
    train, _ = Config(**{**vars(own), "features": code}).load_data()
    assert train.facts.inputs == "(16,) float32"
    assert not cache.exists()
    assert fingerprint(train) == fingerprint(own.load_data()[0])
    fashion(tmp_path, packed=False)
    Config(data="fashion-mnist", data_dir=str(tmp_path), features=code).load_data()
    assert not cache.exists(), "what a file of code computes may change without its text"


def test_a_run_folder_cannot_bring_code_for_features(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('features = "nets.py:pooled"\n')
    with pytest.raises(UsageError, match="features"):
        _ = of_run(tmp_path).features_named


def test_several_findings_are_labels_of_their_own(tmp_path: Path) -> None:
    train, test = Config(data="chexpert", data_dir=str(chexpert(tmp_path))).load_data()
    assert len(train) == 2
    assert test is not None
    assert test.facts.labels == ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
    one = Config(data="chexpert", data_dir=str(tmp_path), source={"findings": ["Edema"]}).load_data()[0]
    assert one.facts.labels == ("absent", "present")
