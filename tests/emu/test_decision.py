"""The decision record: the first writer decides, whoever asks later learns it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus.emu.decision import (
    CopiedRecord,
    Decision,
    DecisionRecord,
    FileRecord,
    MemoryRecord,
    Outcome,
    StoreRecord,
    await_decision,
)
from nereus.emu.store import Store
from nereus.errors import TransportError


@pytest.fixture(params=["memory", "store", "file", "copied"])
def record(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DecisionRecord]:
    store = Store()
    records: dict[str, DecisionRecord] = {
        "memory": MemoryRecord(),
        "store": StoreRecord(store.client),
        "file": FileRecord(tmp_path / "a"),
        "copied": CopiedRecord(FileRecord(tmp_path / "b"), [StoreRecord(store.client)]),
    }
    yield records[request.param]
    store.close()


def commit(epoch: int) -> Decision:
    return Decision(epoch=epoch, outcome=Outcome.COMMIT, control='{"step": 3}')


def abort(epoch: int) -> Decision:
    return Decision(epoch=epoch, outcome=Outcome.ABORT, reason="worker 3: it died")


def test_the_first_writer_decides(record: DecisionRecord) -> None:
    assert record.read(5) is None
    assert record.decide(commit(5)) == commit(5)
    assert record.decide(abort(5)) == commit(5)
    assert record.read(5) == commit(5)
    assert record.decide(abort(6)) == abort(6)
    assert record.decide(commit(6)) == abort(6)


def test_many_writers_at_once_learn_one_decision(record: DecisionRecord) -> None:
    answers: list[Decision] = []

    def write(number: int) -> None:
        answers.append(record.decide(commit(1) if number % 2 else abort(1)))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 8
    assert len(set(answers)) == 1
    assert record.read(1) == answers[0]


def test_waiting_ends_with_the_decision_or_changes_nothing(record: DecisionRecord) -> None:
    start = time.monotonic()
    assert await_decision(record, 9, wait_s=0.1) is None
    assert 0.1 <= time.monotonic() - start < 2
    timer = threading.Timer(0.2, record.decide, [commit(9)])
    timer.start()
    assert await_decision(record, 9, wait_s=20) == commit(9)
    timer.join(5)


def test_a_durable_record_outlives_the_store(tmp_path: Path) -> None:
    store = Store()
    quick = StoreRecord(store.client)
    CopiedRecord(FileRecord(tmp_path), [quick]).decide(commit(4))
    store.close()
    successor = CopiedRecord(FileRecord(tmp_path), [])
    assert successor.decide(abort(4)) == commit(4)
    assert [path.name for path in tmp_path.iterdir()] == ["00000004.json"]


class Unreachable:
    """A record whose owner is away."""

    def decide(self, decision: Decision) -> Decision:
        raise TransportError("away")

    def read(self, epoch: int) -> Decision | None:
        raise TransportError("away")


def test_an_unreachable_copy_is_passed_over_and_an_unreachable_truth_is_not(tmp_path: Path) -> None:
    truth = FileRecord(tmp_path)
    record = CopiedRecord(truth, [Unreachable()])
    assert record.read(1) is None
    truth.decide(commit(1))
    assert record.read(1) == commit(1)
    with pytest.raises(TransportError, match="away"):
        CopiedRecord(Unreachable(), [MemoryRecord()]).read(1)
    assert await_decision(Unreachable(), 1, wait_s=0.05) is None, "unreachable is undecided, not an error"
