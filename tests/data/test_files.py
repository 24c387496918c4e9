"""Whatever the bytes of a file are: a table or a refusal that does not repeat them, never another error."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenhand.data import read_files
from evenhand.errors import UsageError

SECRET = "alice-secret-4711"


def npz() -> bytes:
    made = io.BytesIO()
    np.savez_compressed(made, age=np.arange(50), name=np.array([SECRET] * 50))
    return made.getvalue()


def parquet() -> bytes:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    made = io.BytesIO()
    pq.write_table(pa.table({"age": list(range(50)), "name": [SECRET] * 50}), made)
    return made.getvalue()


GOOD = {".csv": f'age,name\n1,"{SECRET}"\n2,x\n'.encode() * 3, ".npz": npz(), ".parquet": parquet()}


def told(folder: Path, suffix: str, data: bytes) -> str:
    """The messages of reading a file and its header; any other error than a refusal comes through."""
    file, messages = folder / f"data{suffix}", []
    file.write_bytes(data)
    for reader in (read_files.read, read_files.header):
        try:
            reader(file)
        except UsageError as error:
            messages.append(str(error))
    return " ".join(messages)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300), suffix=st.sampled_from(sorted(GOOD)))
def test_any_bytes_are_read_or_refused(data: bytes, suffix: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert SECRET not in told(tmp_path_factory.getbasetemp(), suffix, data)


@settings(max_examples=300, deadline=None)
@given(
    suffix=st.sampled_from(sorted(GOOD)),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=6),
    kept=st.floats(0.2, 1),
)
def test_damaged_files_are_read_or_refused(
    suffix: str, changes: list[tuple[float, int]], kept: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(GOOD[suffix])
    for place, value in changes:
        data[int(place * len(data))] = value
    assert SECRET not in told(tmp_path_factory.getbasetemp(), suffix, bytes(data[: max(1, int(kept * len(data)))]))
