"""Sign run folders: an Ed25519 key signs the ledger's head, every recorded file and the statement.

``signature.json`` holds the public key, what was signed and the signature. It is not recorded in the ledger: it is over
the ledger's head, which a row of its own would move. Files may be added to a folder later, and ``check`` names them as
not signed; a file that was signed must stay as it was. A private key is read, used and never written to a run folder.
"""

from __future__ import annotations

import base64
import binascii
import getpass
import hashlib
import json
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import durable, untrusted
from evenhand.errors import UsageError, VerificationError
from evenhand.runs.folder import Folder, as_json, write_json
from evenhand.runs.ledger import Reading
from evenhand.runs.ledger_rows import read_until
from evenhand.runs.run_files import LEDGER, RECORDED

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = 1
DOMAIN = b"evenhand run folder signature 1\n"
"""Stands before the signed bytes, so that no signature of this key made for another purpose can serve here."""
PASSPHRASE = "EVENHAND_KEY_PASSPHRASE"
_SHAPE: untrusted.Shape = {
    "format": int,
    "public_key": str,
    "signed": {"format": int, "plan": str, "ledger_head": str, "statement": str, "files": {str: str}},
    "signature": str,
}
UNSIGNED = (
    "not signed: a folder that was rewritten as a whole, consistently, cannot be told from the original. Ask the "
    "trainer to sign it (evenhand statement RUN --sign KEY) and pass --key, or compare the ledger head with one that "
    "was noted elsewhere at the time of training."
)


@dataclass(frozen=True)
class Checked:
    """Result of checking a signature: its key's fingerprint if it is valid, what is wrong, what a reader must know."""

    signer: str | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def new_key(path: Path, passphrase: str | None = None) -> str:
    """Write a new private key to ``path`` and its public key to ``path.pub``; return the fingerprint.

    The private key is readable by its owner only. Nothing is ever overwritten, and no key is put into a run folder.
    """
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    _refuse_run_folder(path)
    public = path.with_name(path.name + ".pub")
    for file in (path, public):
        if file.exists() or file.is_symlink():
            raise UsageError(f"{file} is there already, and a key is never overwritten: choose another --out.")
    key = Ed25519PrivateKey.generate()
    lock = form.BestAvailableEncryption(passphrase.encode()) if passphrase else form.NoEncryption()
    _create(path, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, lock), 0o600)
    shown = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    _create(public, shown, 0o644)
    return fingerprint(key.public_key().public_bytes_raw())


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in a PEM file; a passphrase is taken from EVENHAND_KEY_PASSPHRASE, or asked for.

    Raises:
      UsageError: the file cannot be read, holds no Ed25519 private key, needs another passphrase, or lies in a run
        folder, where it would be shared.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    _refuse_run_folder(path)
    data = _key_bytes(path)
    try:
        try:
            key = load_pem_private_key(data, None)
        except TypeError:
            key = load_pem_private_key(data, _passphrase(path).encode())
    except UsageError:
        raise
    except (ValueError, TypeError, UnsupportedAlgorithm):
        hint = " It is a public key: pass the file without .pub." if b"PUBLIC KEY" in data else ""
        raise UsageError(
            f"{path} holds no private key that can be read, or the passphrase is another one.{hint} "
            "Make a key with: evenhand keys new"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} holds a key of another kind: signatures take Ed25519. Make one: evenhand keys new")
    return key


def read_public_key(path: Path) -> bytes:
    """Return the 32 bytes of the public key in a PEM file.

    Raises:
      UsageError: the file cannot be read or holds no Ed25519 public key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _key_bytes(path)
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        hint = " It is a PRIVATE key, which must not leave its owner: pass the .pub file." if b"PRIVATE" in data else ""
        raise UsageError(f"{path} holds no public key that can be read.{hint}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} holds a key of another kind: --key takes an Ed25519 public key.")
    return key.public_bytes_raw()


def fingerprint(public: bytes) -> str:
    """Return a short name of a public key, to be compared over another channel.

    Examples:
      >>> fingerprint(bytes(32))
      '6668:7aad:f862:bd77:6c8f:c18b:8e9f:8e20'
    """
    digits = hashlib.sha256(public).hexdigest()[:32]
    return ":".join(digits[place : place + 4] for place in range(0, 32, 4))


def write(folder: Folder, reading: Reading, key: Ed25519PrivateKey) -> str:
    """Sign the folder as it is and write signature.json, durable on return; return the fingerprint of the key.

    Nothing is checked here: the caller has verified the folder and holds the ledger's lock.
    """
    names = {*RECORDED, *reading.files()}
    digests = {name: untrusted.digest(folder.path / name) for name in sorted(names)}
    signed = {
        "format": FORMAT,
        "plan": reading.plan,
        "ledger_head": reading.head,
        "statement": str(untrusted.read_json(folder.statement_file, {"digest": str})["digest"]),
        "files": {name: digest for name, digest in digests.items() if digest is not None},
    }
    public = key.public_key().public_bytes_raw()
    body = {
        "format": FORMAT,
        "public_key": _text(public),
        "signed": signed,
        "signature": _text(key.sign(_bytes(signed))),
    }
    write_json(folder.signature_file, body)
    return fingerprint(public)


def check(folder: Folder, reading: Reading, public: bytes | None, may_be_missing: Collection[str]) -> Checked:
    """Check the signature of a folder, against ``public`` if a key is given.

    Args:
      folder: the run folder.
      reading: its ledger, read and checked.
      public: the key that must have signed, None if any may have.
      may_be_missing: files that a copy of the folder leaves out since they must not be shared.
    """
    if not folder.signature_file.exists() and not folder.signature_file.is_symlink():
        if public is None:
            return Checked(None, notes=(UNSIGNED,))
        return Checked(None, (f"not signed: there is no signature.json, and --key asks for {fingerprint(public)}.",))
    try:
        written = untrusted.read_json(folder.signature_file, _SHAPE)
        if untrusted.read_bytes(folder.signature_file) != as_json(written):
            raise VerificationError("signature.json was changed.")
        signer = _signer(written)
    except VerificationError as error:
        return Checked(None, (str(error),))
    except ModuleNotFoundError:
        return Checked(None, notes=("signature.json was not checked: that needs the package cryptography.",))
    name = fingerprint(signer)
    if public is not None and signer != public:
        return Checked(name, (f"signed by {name}, not by the key that --key names: {fingerprint(public)}.",))
    problems, added = _differences(folder, reading, written["signed"], may_be_missing)
    notes = [f"written after the signature and not signed: {', '.join(added)}."] if added else []
    if public is None and not problems:
        notes.append(f"signed by {name}. Only --key tells whose key that is: get the public key from its owner.")
    return Checked(name, tuple(problems), tuple(notes))


def _signer(written: Mapping[str, Any]) -> bytes:
    """Return the public key that made a signature; raise VerificationError if the signature is not valid."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public, signature = (base64.b64decode(written[key], validate=True) for key in ("public_key", "signature"))
        if written["format"] != FORMAT or written["signed"]["format"] != FORMAT or len(public) != 32:
            raise ValueError
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _bytes(written["signed"]))
    except (ValueError, binascii.Error, InvalidSignature):
        raise VerificationError("signature.json holds no valid signature: it was damaged, edited or made up.") from None
    return public


def _differences(
    folder: Folder, reading: Reading, signed: Mapping[str, Any], may_be_missing: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return what has changed since the folder was signed, and which files were added."""
    if signed["ledger_head"] not in reading.hashes[1:]:
        return ["the ledger does not contain the row that was signed: it is another one, or was shortened."], []
    then = read_until(folder.ledger_file, signed["ledger_head"])
    problems = []
    if then.charged_head != reading.charged_head or then.plan != signed["plan"]:
        problems.append("the run went on after it was signed: the signature is not for what it spent since.")
    present = {name: untrusted.digest(folder.path / name) for name in {*RECORDED, *reading.files(), *signed["files"]}}
    there = {name for name in present if (folder.path / name).exists() or (folder.path / name).is_symlink()}
    for name, digest in signed["files"].items():
        if present[name] != digest and (name in there or (name in RECORDED and name not in may_be_missing)):
            problems.append(
                f"{name} is not the file that was signed." if name in there else f"{name} was signed and is missing."
            )
    return problems, sorted(there - signed["files"].keys())


def _bytes(signed: Mapping[str, Any]) -> bytes:
    return DOMAIN + json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _passphrase(path: Path) -> str:
    given = os.environ.get(PASSPHRASE)
    if given:
        return given
    if not sys.stdin.isatty():
        raise UsageError(f"{path} is protected by a passphrase: set {PASSPHRASE}, or run this in a terminal.")
    return getpass.getpass(f"Passphrase of {path}: ")


def _key_bytes(path: Path) -> bytes:
    try:
        return untrusted.read_bytes(path, largest=2**16)
    except VerificationError as error:
        raise UsageError(f"The key {path}: {error} Make a key with: evenhand keys new") from None


def _refuse_run_folder(path: Path) -> None:
    for folder in path.resolve().parents:
        if (folder / LEDGER).exists() and (folder / "plan.json").exists():
            raise UsageError(f"{path} lies in a run folder, with which it would be shared: keep keys elsewhere.")


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        durable.create(path, data, mode)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): choose another --out.") from None
