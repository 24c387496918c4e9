"""Surnames of 18 languages (the data of the PyTorch tutorial on character RNNs), as padded character codes."""

from __future__ import annotations

import csv
import unicodedata

import numpy as np
import torch
from numpy.typing import NDArray

from evenhand import _validate
from evenhand.data.sources.base import File, Loaded, Place, Source, classified, damaged, divided, held_out

HELD_OUT = 0.2
LENGTH = 20
VOCABULARY = 128
"""Codes are below this: an embedding of so many rows takes them. Code 0 is padding."""
DIGESTS = {
    "Arabic": "6f424a8dbe51cbbbabab7a57d38b617210125e4e3991f3c657cb79b8f104bafc",
    "Chinese": "09ba8f1f7e38dbc99372d461b26ad4433b811fc6bfa6a3ecca6fe11a9a777465",
    "Czech": "e17ab0ec47616a72c39cb85c783f70c3663ab64488721e5d8378f146d2226be7",
    "Dutch": "924f32b635170eae561f84538632138fc07d4c8bbd70ba3fb980de1ecc4d2af3",
    "English": "9cca037066d3d5989e24bc01801416162de506b5e28e15b7c092a47905d29bf2",
    "French": "81e65b36c60ed5b89a17422f6edcadbb89546f38ad69e960e64e7ba682012a95",
    "German": "7449cd590b97a733e18d613a4155decd77ec35dc5f8aadd7a82204dce4f051db",
    "Greek": "3555b5186de7f401e6d991b088e9e644ca3099116477818c25ab5793801389e6",
    "Irish": "cf8c7013256252a88d2503127b87282a11f21b2ff6db1bded68834c19a1ec058",
    "Italian": "f88414c27d0606a11a678b4859277828c2565d6cc4d9ee932deef6e94f3b35e4",
    "Japanese": "e0e717e114fec3e7eade4d9dabe0067c475f43147e36a22b47902ee76ad9e67f",
    "Korean": "cd54221ccb362a6cba4c78828838cf3268a0e59744767a37cf6ec4b74036b136",
    "Polish": "45bab898af2f60ed3a728bbf6980e28821011a7caa53227553b5785903a40826",
    "Portuguese": "50a8735f41f4f73757c8ce5b16cb0275cd86b2b214bcbc8c9805f508cb131c53",
    "Russian": "0cfe53ac18041e8f63666aa77313e0a3ff378facb132abee052d8ebdc8c3d62c",
    "Scottish": "78d0252711d87d948ea86fe34826c51d2d794a8e52d15b5d6f7b6244d45d62dd",
    "Spanish": "1bcb462ed3316756a85781d68232bddae04498fdddd5d9219c53fd1fbdeba7a7",
    "Vietnamese": "f3f9e4164ab47601178a6e45b216464a64122f49d05541f24bf18a757253281d",
}
COUNTRIES = tuple(DIGESTS)


def names(place: Place, split_seed: int = 0) -> Loaded:
    """Read about 20,050 surnames as 20 ASCII codes each, padded with 0 at the end; groups are the 18 languages.

    Preprocessing, name by name: accents dropped, other characters that are not ASCII dropped, cut at 20. Equal names of
    one language are on the same side of the split, so none is both learned and tested.
    """
    pairs = _pairs(place)
    inputs = torch.from_numpy(np.stack([encoded(name) for _, name in pairs]))
    data = classified(inputs, np.array([COUNTRIES.index(country) for country, _ in pairs]), COUNTRIES)
    keys = [f"{country} {name}" for country, name in pairs]
    return divided(data, held_out(keys, HELD_OUT, _validate.whole(split_seed, "split_seed", low=0)))


def encoded(name: str) -> NDArray[np.int64]:
    """Return a name as codes.

    Examples:
      >>> encoded("Ünal")[:6].tolist()
      [85, 110, 97, 108, 0, 0]
    """
    plain = unicodedata.normalize("NFD", name).encode("ascii", "ignore")[:LENGTH]
    return np.frombuffer(plain.ljust(LENGTH, b"\0"), dtype=np.uint8).astype(np.int64)


def _pairs(place: Place) -> list[tuple[str, str]]:
    if place.find("names.csv"):
        rows = list(csv.reader(place.text("names.csv").splitlines()))
        if rows[:1] != [["country", "surname"]] or any(len(row) != 2 or row[0] not in DIGESTS for row in rows[1:]):
            raise damaged(place.path("names.csv"), "a CSV file of country and surname")
        return [(row[0], row[1].strip()) for row in rows[1:]]
    listed = {country: place.text(f"{country}.txt").splitlines() for country in COUNTRIES}
    return [(country, name.strip()) for country, lines in listed.items() for name in lines if name.strip()]


_BASE = "https://raw.githubusercontent.com/spro/practical-pytorch/master/data/names/"
NAMES = Source(
    "names",
    names,
    records="20,050, about a fifth of them held out",
    groups="18 languages",
    licence="MIT",
    files=(
        tuple(File(f"{name}.txt", f"{_BASE}{name}.txt", f"sha256:{digest}") for name, digest in DIGESTS.items()),
        (File("names.csv"),),
    ),
)
