"""Line 8: a recipient can tell whose statement it is, and that it is the folder which was signed."""

from __future__ import annotations

import io
import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import forging
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey

import evenhand as eh
from commands import evenhand, result
from evenhand.errors import UsageError, VerificationError
from evenhand.runs import signatures
from evenhand.runs.folder import Folder, sha256
from evenhand.runs.verify import sign
from evenhand.training.run import Run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed run; its key lies beside it."""
    out = tmp_path_factory.mktemp("signed") / "run"
    forging.signed(out)
    return out


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    for name in ("run-key", "run-key.pub"):
        shutil.copy2(original.with_name(name), tmp_path / name)
    return Path(shutil.copytree(original, tmp_path / "run"))


def public(run: Path) -> Path:
    return run.with_name("run-key.pub")


def test_keys_are_made_once_and_the_private_one_is_for_its_owner_only(tmp_path: Path) -> None:
    made = result("keys", "new", "--out", tmp_path / "mine")
    private, shown = tmp_path / "mine", tmp_path / "mine.pub"
    assert (made["private"], made["public"]) == (str(private), str(shown))
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert signatures.fingerprint(signatures.read_public_key(shown)) == made["fingerprint"]
    before = private.read_bytes()
    for left in (private, shown):
        again = evenhand("keys", "new", "--out", private)
        assert again.returncode == 2
        assert "never overwritten" in again.stderr
        assert not private.exists() or private.read_bytes() == before
        left.unlink()
    assert evenhand("keys", "old", "--out", private).returncode == 2
    assert evenhand("keys", "new", "--out", tmp_path / "no" / "folder").returncode == 2


def test_a_signed_run_names_its_signer(run: Path) -> None:
    key = signatures.fingerprint(signatures.read_public_key(public(run)))
    done = evenhand("verify", run, "--key", public(run))
    assert done.returncode == 0
    assert f"signed by {key}" in done.stdout
    assert eh.verify(run, key=public(run))["signed_by"] == key
    without = evenhand("verify", run)
    assert without.returncode == 0
    assert f"signed by {key}. Only --key tells whose key that is" in without.stdout
    shared = shutil.copytree(
        run, run.with_name("shared"), ignore=shutil.ignore_patterns("private", "config.toml", "env.json", "*.lock")
    )
    assert eh.verify(shared, key=public(run))["ok"]


def test_the_private_key_stays_out_of_the_run_folder(run: Path) -> None:
    secret = run.with_name("run-key").read_bytes()
    body = b"".join(secret.splitlines()[1:-1])
    assert all(secret not in file.read_bytes() for file in run.rglob("*") if file.is_file())
    assert all(body not in file.read_bytes() for file in run.rglob("*") if file.is_file())
    for place in (run / "key", run / "private" / "key"):
        with pytest.raises(UsageError, match="lies in a run folder"):
            signatures.new_key(place)
        shutil.copy2(run.with_name("run-key"), place)
        with pytest.raises(UsageError, match="lies in a run folder"):
            sign(run, place)


def test_an_unsigned_run_works_and_verify_says_what_that_means(run: Path) -> None:
    (run / "signature.json").unlink()
    done = evenhand("verify", run)
    assert done.returncode == 0
    assert "rewritten as a whole" in done.stdout
    asked = evenhand("verify", run, "--key", public(run))
    assert asked.returncode == 1
    assert "NOT verified: not signed" in asked.stdout


def test_another_key_is_refused(run: Path, tmp_path: Path) -> None:
    other = signatures.new_key(tmp_path / "other")
    done = evenhand("verify", run, "--key", tmp_path / "other.pub")
    assert done.returncode == 1
    assert f"not by the key that --key names: {other}" in done.stdout
    sign(run, tmp_path / "other")
    assert eh.verify(run)["signed_by"] == other, "whoever has the folder can sign it again, as themselves"
    assert not eh.verify(run, key=public(run))["ok"]


def test_a_signature_of_something_else_does_not_serve(run: Path) -> None:
    text = (run / "signature.json").read_bytes()
    for old, new in (
        (b'"format": 1', b'"format": 2'),
        (b'"signature": "', b'"signature": "A'),
        (b'"plan": "', b'"plan": "0'),
    ):
        (run / "signature.json").write_bytes(text.replace(old, new))
        found = eh.verify(run, key=public(run))
        assert not found["ok"]
        assert found["signed_by"] is None
    body = json.loads(text)
    body["signed"]["files"]["report.html"] = "0" * 64
    (run / "signature.json").write_bytes(signatures.as_json(body))
    assert eh.verify(run)["problems"] == ["signature.json holds no valid signature: it was damaged, edited or made up."]


def forged_page(run: Path) -> bytes:
    """A page that names the model's file, as one who knows the format would write it."""
    return f"<p>epsilon 0.098 of {sha256(run / 'model.safetensors')[:16]}</p>".encode()


def test_a_consistent_rewrite_of_a_signed_folder_is_noticed(run: Path) -> None:
    shutil.rmtree(run / "private")
    forging.rechain(run, "report.html", forged_page(run))
    assert any("row that was signed" in problem or "was signed" in problem for problem in eh.verify(run)["problems"])
    (run / "signature.json").unlink()
    assert eh.verify(run)["ok"], "without a signature nobody can tell, and a note says so"
    assert not eh.verify(run, key=public(run))["ok"]


def test_files_that_came_later_are_named_and_changed_ones_refused(run: Path) -> None:
    Run(Folder(run)).report().save(run / "second.html")
    found = eh.verify(run, key=public(run))
    assert found["ok"]
    assert "written after the signature and not signed: second.html." in found["notes"]
    signatures.write_json(run / "composition.json", json.loads((run / "composition.json").read_bytes()))
    assert eh.verify(run, key=public(run))["ok"], "the same bytes"
    from evenhand.runs.run_files import write_durably

    write_durably(run / "report.html", forged_page(run))
    assert eh.verify(run, key=public(run))["problems"] == ["report.html is not the file that was signed."]


def test_a_run_that_went_on_must_be_signed_again(run: Path) -> None:
    eh.rebudget(run, eh.Privacy(4), epochs=1, train=forging.data())
    eh.resume(run, model=forging.nn.Linear(3, 2), train=forging.data(), average=eh.averaging.EMA(0.9), progress=False)
    assert any("went on after it was signed" in problem for problem in eh.verify(run)["problems"])
    assert result("statement", run, "--sign", run.with_name("run-key"))["signed_by"]
    assert eh.verify(run, key=public(run))["ok"]


def test_what_does_not_verify_is_not_signed(run: Path, tmp_path: Path) -> None:
    (run / "owners.csv").write_text("forged")
    with pytest.raises(VerificationError, match="nothing to sign"):
        sign(run, run.with_name("run-key"))
    train = forging.data()
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=train.facts, epochs=1, batch_size=20)
    model = forging.nn.Linear(3, 2)
    optimizer = forging.torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(
        model, optimizer, forging.nn.CrossEntropyLoss(reduction="none"), plan, out=tmp_path / "begun"
    ) as private:
        private.step(next(private.batches(train)))
    with pytest.raises(UsageError, match="released no model yet"):
        sign(tmp_path / "begun", run.with_name("run-key"))


def test_training_signs_and_a_bad_key_stops_it_before_anything_is_spent(tmp_path: Path) -> None:
    options = ("--data", "digits", "--model", "linear", "--epsilon", 3, "--epochs", 0.1, "--out", tmp_path / "run")
    missing = evenhand("train", *options, "--sign", tmp_path / "mine")
    assert missing.returncode == 2
    assert "evenhand keys new" in missing.stderr
    assert not (tmp_path / "run").exists()
    result("keys", "new", "--out", tmp_path / "mine")
    assert evenhand("train", *options, "--sign", tmp_path / "mine").returncode == 0
    assert eh.verify(tmp_path / "run", key=tmp_path / "mine.pub")["ok"]


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_key_files_that_cannot_be_used_are_usage_errors(text: bytes, run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(text)
    for done in (
        evenhand("verify", run, "--key", tmp_path / "bad"),
        evenhand("statement", run, "--sign", tmp_path / "bad"),
        evenhand("verify", run, "--key", tmp_path),
        evenhand("statement", run, "--sign", tmp_path / "none"),
    ):
        assert done.returncode == 2, done
        assert "Traceback" not in done.stderr


def test_keys_of_other_kinds_and_exchanged_keys_are_refused(run: Path, tmp_path: Path) -> None:
    other = Ed448PrivateKey.generate()
    form, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "448").write_bytes(other.private_bytes(form, kind, serialization.NoEncryption()))
    (tmp_path / "448.pub").write_bytes(
        other.public_key().public_bytes(form, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(UsageError, match="another kind"):
        sign(run, tmp_path / "448")
    with pytest.raises(UsageError, match="another kind"):
        eh.verify(run, key=tmp_path / "448.pub")
    with pytest.raises(UsageError, match="PRIVATE key"):
        eh.verify(run, key=run.with_name("run-key"))
    with pytest.raises(UsageError, match="public key: pass the file without"):
        sign(run, public(run))


def test_a_passphrase_protects_the_private_key(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signatures.PASSPHRASE, "open sesame")
    made = result("keys", "new", "--out", tmp_path / "locked", "--passphrase")
    assert b"ENCRYPTED" in (tmp_path / "locked").read_bytes()
    assert sign(run, tmp_path / "locked") == made["fingerprint"]
    monkeypatch.setenv(signatures.PASSPHRASE, "wrong")
    with pytest.raises(UsageError, match="passphrase is another one"):
        sign(run, tmp_path / "locked")
    monkeypatch.delenv(signatures.PASSPHRASE)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UsageError, match="protected by a passphrase"):
        sign(run, tmp_path / "locked")


def test_checking_a_signature_imports_nothing_heavy(run: Path) -> None:
    code = (
        "import sys; from evenhand.cli import app\n"
        f"try: app(['verify', {str(run)!r}, '--key', {str(public(run))!r}])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'sklearn', 'pandas', 'fairlearn', 'dp_accounting', 'scipy.stats'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_killed_signing_left_is_removed_by_the_next(run: Path) -> None:
    left = run / f"evenhand-{'0' * 32}.part"
    left.write_bytes(b"half of a signature")
    sign(run, run.with_name("run-key"))
    assert not left.exists()
