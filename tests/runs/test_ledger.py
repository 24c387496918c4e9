from __future__ import annotations

import random
from pathlib import Path

import pytest

from evenhand.errors import BudgetExhausted, LedgerError, PlanMismatchError
from evenhand.runs.ledger import BLOCK, Ledger, Reading, read
from evenhand.runs.ledger_rows import encode_row
from evenhand.types import Commit


def opened(path: Path, key: str = "k0", plan: str = "p", steps: int = 1000) -> Ledger:
    return Ledger.open(path, plan=plan, steps=steps, key=key, insecure=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def written(path: Path) -> bytes:
    """Two segments, several blocks of different size, commits and a release."""
    for key in ("k0", "k1"):
        with opened(path, key) as ledger:
            for count in (1, 5, 64):
                first = ledger.reserved
                ledger.reserve(count)
                ledger.commit([Commit(first, count, (1.0, 0.5), 1.1, ((1.0, 10.0),))])
    with opened(path, "k2") as ledger:
        ledger.release("model-hash")
    return path.read_bytes()


def test_what_is_written_is_read(path: Path, written: bytes) -> None:
    found = read(path)
    assert (found.reserved, found.committed, found.steps, found.torn) == (140, 140, 1000, False)
    assert [row["key"] for row in found.segments] == ["k0", "k1", "k2"]
    assert found.commits[1] == Commit(1, 5, (1.0, 0.5), 1.1, ((1.0, 10.0),))
    assert found.released == ("model-hash",)


def test_a_reserve_row_is_on_disk_before_the_call_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with opened(path) as ledger:
        monkeypatch.setattr("os.fsync", lambda _: synced.append(read(path).reserved))
        ledger.reserve(3)
        assert synced == [3]


def test_what_is_told_is_on_disk_before_the_call_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, ...]] = []
    with opened(path) as ledger:
        ledger.reserve(3)
        monkeypatch.setattr("os.fsync", lambda _: synced.append(read(path).told))
        ledger.told(2)
        ledger.told(3)
    assert synced[:2] == [(2,), (2, 3)]
    assert read(path).reserved == 3, "it costs no step"


def test_reserving_past_the_plan_is_refused_and_writes_nothing(path: Path) -> None:
    with opened(path, steps=10) as ledger:
        ledger.reserve(10)
        before = path.read_bytes()
        with pytest.raises(BudgetExhausted, match="All 10 steps"):
            ledger.reserve(1)
        assert path.read_bytes() == before


def test_two_writers_are_refused(path: Path) -> None:
    with opened(path), pytest.raises(LedgerError, match="Another process"):
        opened(path, "k1")
    opened(path, "k1").close()


def test_another_plan_or_a_used_key_cannot_continue(path: Path) -> None:
    opened(path).close()
    with pytest.raises(PlanMismatchError, match="another plan"):
        opened(path, "k1", plan="other")
    with pytest.raises(LedgerError, match="noise would repeat"):
        opened(path, "k0")
    opened(path, "k1").close()


def test_a_missing_or_empty_ledger_is_an_error(path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(LedgerError, match="open row"):
        read(path)


def accepted(path: Path, data: bytes) -> Reading | None:
    path.write_bytes(data)
    try:
        return read(path)
    except LedgerError:
        return None


def test_a_cut_last_line_counts_as_a_full_block_and_can_be_continued(path: Path, written: bytes) -> None:
    """Except where it shows that it is a row of another kind, which charges nothing."""
    for cut in range(1, written.rstrip(b"\n").rfind(b"\n")):
        shorter = written[: -cut - 1]
        found = accepted(path, shorter)
        assert found is not None or not shorter.startswith(written[: written.index(b"\n")])
        if found is None:
            continue
        whole = accepted(path, shorter[: shorter.rfind(b"\n") + 1])
        assert whole is not None
        assert found.reserved >= whole.reserved
        if found.torn:
            other = shorter[shorter.rfind(b"\n") + 1 :].startswith((b'{"type":"c', b'{"type":"s', b'{"type":"rel'))
            assert found.reserved == whole.reserved + (0 if other else BLOCK)
        path.write_bytes(shorter)
        with opened(path, "k9") as ledger:
            assert ledger.reserved == found.reserved
            ledger.reserve(1)
        again = read(path)
        assert again.reserved == found.reserved + 1
        assert not again.torn
        if cut > 400:
            break


def test_no_bit_flip_lowers_what_is_charged(path: Path, written: bytes) -> None:
    source = random.Random(0)
    truth = read(path).reserved
    for _ in range(1500):
        place, bit = source.randrange(len(written)), source.randrange(8)
        mutated = bytearray(written)
        mutated[place] ^= 1 << bit
        found = accepted(path, bytes(mutated))
        assert found is None or found.reserved >= truth


def test_white_space_in_a_row_is_a_change(path: Path, written: bytes) -> None:
    assert accepted(path, written.replace(b":", b": ", 1)) is None


def test_no_dropped_or_swapped_row_is_accepted(path: Path, written: bytes) -> None:
    rows = written.splitlines(keepends=True)
    for index in range(len(rows) - 1):
        assert accepted(path, b"".join(rows[:index] + rows[index + 1 :])) is None
        swapped = rows[:]
        swapped[index], swapped[index + 1] = swapped[index + 1], swapped[index]
        assert accepted(path, b"".join(swapped)) is None


def test_a_full_disk_stops_before_the_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        ledger.reserve(1)
    assert ledger.reserved == 0
    monkeypatch.undo()
    ledger.close()


def test_a_failed_write_closes_the_ledger_for_good_and_a_resume_reads_it_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(path)
    ledger.reserve(3)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        ledger.reserve(5)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="earlier write"):
        ledger.reserve(5)
    ledger.close()
    with opened(path, "k1") as again:
        assert again.reserved in (3, 8)
        again.reserve(1)


def test_a_crash_while_a_torn_line_is_sealed_can_be_resumed(path: Path, written: bytes) -> None:
    cut = written[:-30]
    path.write_bytes(cut)
    charged = read(path).reserved
    with opened(path, "k7"):
        pass
    sealed = path.read_bytes()
    for end in range(len(cut) + 1, len(sealed) + 1):
        path.write_bytes(sealed[:end])
        if sealed[:end].endswith(b"\n") and end == len(cut) + 1:
            continue
        assert read(path).reserved >= charged
        with opened(path, "k8") as ledger:
            ledger.reserve(1)
        assert read(path).torn == 0


def test_a_removed_or_replaced_ledger_stops_the_run(path: Path) -> None:
    with opened(path) as ledger:
        ledger.reserve(1)
        path.rename(path.with_name("elsewhere"))
        with pytest.raises(LedgerError, match="removed or replaced"):
            ledger.reserve(1)
        path.write_bytes(b"")
        with pytest.raises(LedgerError, match="removed or replaced"):
            ledger.reserve(1)
        path.with_name("elsewhere").replace(path)


@pytest.mark.parametrize(
    "change",
    [
        {"count": -5},
        {"count": 2.5},
        {"count": True},
        {"first": 0},
        {"std": float("nan")},
        {"sensitivity": ["x"]},
        {"std": None},
    ],
)
def test_rows_rewritten_with_a_valid_hash_are_still_checked(path: Path, written: bytes, change: dict) -> None:
    import json

    from evenhand.runs.ledger_rows import row_hash

    rows = [json.loads(line) for line in written.splitlines()]
    index = next(i for i, row in enumerate(rows) if row["type"] == "commit" and row["first"] == 1)
    rows[index].update(change)
    previous = rows[index]["prev"]
    for row in rows[index:]:
        body = {key: value for key, value in row.items() if key != "hash"} | {"prev": previous}
        previous = row["hash"] = row_hash(body)
        row["prev"] = body["prev"]
    assert accepted(path, b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)) is None


def test_a_row_of_no_known_kind_is_refused(path: Path, written: bytes) -> None:
    row, _ = encode_row({"type": "discount", "count": 10}, read(path).head)
    path.write_bytes(written + row)
    with pytest.raises(LedgerError, match="of no known kind"):
        read(path)
