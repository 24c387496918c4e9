"""Small made-up files in official formats."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np

DRAW = np.random.default_rng(0)


def archive(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"folder/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def pictures(count: int) -> np.ndarray:
    return DRAW.integers(0, 256, (count, 3072), dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def fashion(folder: Path, *, packed: bool) -> Path:
    (folder / "fashion-mnist").mkdir()
    for part, count in (("train", 4), ("t10k", 2)):
        images, codes = DRAW.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8)
        for name, content in ((f"{part}-images-idx3-ubyte", idx(images)), (f"{part}-labels-idx1-ubyte", idx(codes))):
            file = folder / "fashion-mnist" / (f"{name}.gz" if packed else name)
            file.write_bytes(gzip.compress(content) if packed else content)
    return folder


def save(path: Path, level: int, size: tuple[int, int] = (30, 20)) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, level).save(path)


HEADER = "Path,Sex,Age,Frontal/Lateral,AP/PA,Atelectasis,Cardiomegaly,Consolidation,Edema,Pleural Effusion"


def chexpert(folder: Path) -> Path:
    for part in ("train", "valid"):
        rows = [
            f"CheXpert-v1.0-small/{part}/patient1/study1/view1.png,Female,60,Frontal,AP,1.0,,0.0,-1.0,",
            f"CheXpert-v1.0-small/{part}/patient1/study1/view2.png,Female,60,Lateral,,1.0,,,,",
            f"CheXpert-v1.0-small/{part}/patient2/study1/view1.png,Male,60,Frontal,PA,,1.0,,,1.0",
        ]
        for row in rows:
            save(folder / "chexpert" / Path(*Path(row.split(",")[0]).parts[1:]), 255)
        (folder / "chexpert" / f"{part}.csv").write_text("\n".join([HEADER, *rows]))
    return folder
