"""Rewards in their own processes: order, faults, time limits, isolation. Real processes throughout."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus.config import PythonReward, ReasoningGymReward
from nereus.errors import DataError
from nereus.rewards import pool
from nereus.rewards.configured import configured_reward
from nereus.rewards.function import RewardFunction, RewardRequest, first_missing, missing_by_reason
from nereus.rewards.process import ProcessReward

SOURCE = """
import math, os, sys, time

def length(response):
    print("noise on stdout")
    return len(response)

def moody(response, ground_truth=None):
    if response == "raise":
        raise ValueError("no such answer")
    if response == "hang":
        while True:
            pass
    if response == "sleep":
        time.sleep(60)
    if response == "crash":
        os._exit(7)
    if response == "exit":
        sys.exit("bye")
    if response == "none":
        return None
    if response == "nan":
        return math.nan
    if response == "text":
        return "0.5"
    return True if response == "true" else 0.5

def child_too(response):
    if response == "hang":
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        open(os.environ["PIDS"], "w").write(str(pid))
        time.sleep(60)
    return 1.0

def batch(response, sample_id):
    return [len(r) + i for r, i in zip(response, sample_id)]

def batch_short(response):
    return [1.0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = data_source == "d" and solution_str == ground_truth and extra_info == {"index": 3}
    return {"score": float(right)}

def everything(**given):
    names = ["extra", "ground_truth", "prompt", "response", "response_token_ids", "sample_id", "turns"]
    return float(sorted(given) == names
                 and given["response_token_ids"] == [1, 2] and given["extra"] == {"a": [1, None]}
                 and given["ground_truth"] == {"x": 1} and given["prompt"] == "p\u00e9\\n")

def modules(response):
    return float(not {"torch", "ray", "prefect", "numpy", "nereus"} & set(sys.modules))

def process(response):
    time.sleep(0.05)
    return os.getpid()

def environment(response):
    return float(response in os.environ)

def reads_stdin(response):
    try:
        input()
    except EOFError:
        return 1.0

def needs_more(response, teacher):
    return 0.0

def sibling(response):
    import neighbour
    return neighbour.VALUE
"""


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "neighbour.py").write_text("VALUE = 0.25\n")
    path = folder / "scores.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def moody(file: Path) -> Iterator[ProcessReward]:
    with ProcessReward(target=f"{file}:moody", limit_s=1.0, num_processes=2) as reward:
        yield reward


def requests(*responses: str) -> list[RewardRequest]:
    return [
        RewardRequest(sample_id=i, prompt="p", response=text, response_token_ids=(1,))
        for i, text in enumerate(responses)
    ]


def values(reward: RewardFunction, *responses: str) -> list[float | None]:
    return [result.value for result in reward.score(requests(*responses))]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_results_come_in_order_from_several_processes(file: Path) -> None:
    responses = ["x" * (i % 7) for i in range(40)]
    with ProcessReward(target=f"{file}:length", limit_s=5, num_processes=2) as reward:
        assert values(reward, *responses) == [float(len(text)) for text in responses]
        assert reward.score([]) == ()


def test_several_processes_share_the_work(file: Path) -> None:
    with ProcessReward(target=f"{file}:process", limit_s=5, num_processes=2) as reward:
        assert set(values(reward, *"abcdefgh")) == {float(pid) for pid in reward.pids}
        assert os.getpid() not in reward.pids


@pytest.mark.parametrize(
    ("response", "reason", "detail"),
    [
        ("raise", "exception", "ValueError: no such answer (scores.py line "),
        ("exit", "exception", "SystemExit: bye"),
        ("none", "none", "returned None"),
        ("nan", "invalid", "returned nan"),
        ("text", "invalid", "returned '0.5', a str and no number"),
        ("crash", "exit", "ended with code 7"),
        ("hang", "timeout", "no answer in 1 s"),
        ("sleep", "timeout", "no answer in 1 s"),
    ],
)
def test_a_fault_is_a_missing_reward_and_the_others_are_scored(
    moody: ProcessReward, response: str, reason: str, detail: str
) -> None:
    results = moody.score(requests("ok", response, "true", "ok"))
    assert [result.value for result in results] == [0.5, None, 1.0, 0.5]
    assert results[1].reason == reason
    assert detail in results[1].detail
    assert missing_by_reason(results) == {reason: 1}
    assert first_missing(results).startswith(f"{reason}: ")


@pytest.mark.parametrize("fault", ["crash", "sleep", "raise"])
def test_calls_that_were_sent_ahead_of_a_fault_are_scored(
    file: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(pool, "AHEAD_S", 1e3)  # all calls count as short
    with ProcessReward(target=f"{file}:moody", limit_s=1.0) as reward:
        assert values(reward, "ok") == [0.5]
        for number, text in enumerate(["ok", fault, "true", "ok", "true"]):
            reward.pool.submit(number, requests(text))
        reward.pool.turn(0.0)
        assert len(reward.pool._seats[0].jobs) > 1
        reward.pool.drop()
        values(reward, "ok")
        results = reward.score(requests("ok", fault, "true", *["ok"] * 40, fault, "true"))
        assert [result.value for result in results] == [0.5, None, 1.0, *[0.5] * 40, None, 1.0]
        assert reward.pool.num_open == 0
        assert 47 <= reward.pool.take_load().num_calls <= 52, "of those dropped some may have been answered"


def test_a_stuck_process_is_killed_by_id_and_replaced(moody: ProcessReward) -> None:
    before = set(moody.pids)
    began_s = time.monotonic()
    assert values(moody, "hang", "hang", "hang", "ok", "ok") == [None, None, None, 0.5, 0.5]
    assert time.monotonic() - began_s < 20  # three limits of 1 s in two processes, and new interpreters
    killed = before - set(moody.pids)
    assert len(killed) == 2
    assert not any(is_alive(pid) for pid in killed)
    assert values(moody, "ok") == [0.5]


def test_what_a_stuck_function_started_is_killed_too(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pid"))
    with ProcessReward(target=f"{file}:child_too", limit_s=1.0) as reward:
        assert values(reward, "hang", "ok") == [None, 1.0]
        grandchild = int((tmp_path / "pid").read_text())
        deadline_s = time.monotonic() + 5
        while is_alive(grandchild) and time.monotonic() < deadline_s:
            time.sleep(0.05)  # killed already; its new parent has yet to collect it
        assert not is_alive(grandchild)


def test_loading_time_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(0.8)\ndef f(response):\n    return 1.0\n")
    with ProcessReward(target=f"{path}:f", limit_s=0.4) as reward:
        assert values(reward, "a", "b") == [1.0, 1.0]


def test_a_batched_function_gets_all_responses_in_one_call(file: Path) -> None:
    with ProcessReward(target=f"{file}:batch", limit_s=5, batched=True, num_processes=4) as reward:
        assert len(reward.pids) == 1
        assert values(reward, "a", "bb", "ccc") == [1.0, 3.0, 5.0]
        assert reward.score([]) == ()


def test_a_batched_function_that_returns_too_few_loses_the_whole_batch(file: Path) -> None:
    with ProcessReward(target=f"{file}:batch_short", limit_s=5, batched=True) as reward:
        results = reward.score(requests("a", "b"))
        assert missing_by_reason(results) == {"exception": 2}
        assert "must return 2 values; it returned 1" in results[0].detail


def test_all_arguments_arrive_as_they_were(file: Path) -> None:
    request = RewardRequest(
        sample_id=9, prompt="pé\n", response="r" * 300_000, response_token_ids=(1, 2), ground_truth={"x": 1},
        extra={"a": [1, None]},
    )  # fmt: skip  # a response larger than a pipe's buffer
    with ProcessReward(target=f"{file}:everything", limit_s=10) as reward:
        assert [result.value for result in reward.score([request] * 3)] == [1.0] * 3


def test_a_verl_compute_score_works_as_it_is(file: Path) -> None:
    request = RewardRequest(
        sample_id=0, prompt="p", response="42", response_token_ids=(), ground_truth="42",
        extra={"data_source": "d", "extra_info": {"index": 3}},
    )  # fmt: skip
    with ProcessReward(target=f"{file}:compute_score", limit_s=5) as reward:
        assert reward.score([request])[0].value == 1.0


def test_the_process_holds_no_more_than_the_users_file_imports(file: Path) -> None:
    with ProcessReward(target=f"{file}:modules", limit_s=5) as reward:
        assert values(reward, "x") == [1.0]


def test_siblings_of_the_file_can_be_imported_and_stdin_is_empty(file: Path) -> None:
    with ProcessReward(target=f"{file}:sibling", limit_s=5) as reward:
        assert values(reward, "x") == [0.25]
    with ProcessReward(target=f"{file}:reads_stdin", limit_s=5) as reward:
        assert values(reward, "x", "y") == [1.0, 1.0]


def test_secrets_do_not_reach_the_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "db_password", "PLAIN_SETTING"):
        monkeypatch.setenv(name, "x")
    with ProcessReward(target=f"{file}:environment", limit_s=5) as reward:
        got = values(reward, "HF_TOKEN", "OPENAI_API_KEY", "db_password", "PLAIN_SETTING", "PATH")
    assert got == [0.0, 0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent", "has no function 'absent'"),
        ("needs_more", "needs an argument 'teacher'.*response_token_ids.*solution_str"),
    ],
)
def test_a_function_that_cannot_be_called_is_an_error_before_any_response(
    file: Path, name: str, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        ProcessReward(target=f"{file}:{name}", limit_s=5).start()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("absent.py:f", "does not exist"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("nothing", "not of the form"),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error(target: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        ProcessReward(target=target, limit_s=5).start()


def test_a_file_that_raises_or_ends_its_process_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(DataError, match=r"ZeroDivisionError.*broken.py line 1"):
        ProcessReward(target=f"{path}:f", limit_s=5).start()
    path.write_text("import os\nos._exit(3)\n")
    with pytest.raises(DataError, match="ended with code 3"):
        ProcessReward(target=f"{path}:f", limit_s=5).start()


def test_an_exception_in_the_middle_does_not_leave_an_answer_for_the_next_call(
    moody: ProcessReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(range(2))

    def interrupted(wait_s: float) -> None:
        if next(turns, None) is None:
            raise KeyboardInterrupt
        original(wait_s)

    original = moody.pool.turn
    monkeypatch.setattr(moody.pool, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        moody.score(requests(*["sleep"] * 6))
    monkeypatch.undo()
    assert values(moody, "true", "ok", "true") == [1.0, 0.5, 1.0]


def test_closing_ends_the_processes(file: Path) -> None:
    reward = ProcessReward(target=f"{file}:length", limit_s=5, num_processes=2)
    reward.start()
    pids = reward.pids
    reward.close()
    assert reward.pids == ()
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        reward.score(requests("a"))


def test_a_stuck_process_ends_when_its_parent_is_killed(file: Path) -> None:
    program = f"""
from nereus.rewards.function import RewardRequest
from nereus.rewards.process import ProcessReward
reward = ProcessReward(target={f"{file}:moody"!r}, limit_s=60)
reward.start()
print(*reward.pids, flush=True)
reward.score([RewardRequest(sample_id=0, prompt="", response="hang", response_token_ids=())])
"""
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    deadline_s = time.monotonic() + 20  # it looks once a second
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not is_alive(pid)


def test_the_configuration_chooses_function_limit_and_processes(file: Path) -> None:
    config = PythonReward(function=f"{file}:length", timeout_s=5, workers=2)
    with configured_reward(config) as reward:
        assert isinstance(reward, ProcessReward)
        assert len(reward.pids) == 2
        assert values(reward, "abc") == [3.0]


def test_gym_problems_are_scored_by_their_task() -> None:
    problem = {"name": "chain_sum", "size": 3, "seed": 5, "config": {}, "index": 1}
    import reasoning_gym

    answer = reasoning_gym.create_dataset("chain_sum", size=3, seed=5)[1]["answer"]
    asked = [
        RewardRequest(
            sample_id=0, prompt="", response=text, response_token_ids=(), extra={"reasoning_gym": problem}
        )
        for text in (f"I think <answer>0</answer> no <answer> {answer} </answer>", f" {answer}\n", "nothing")
    ]
    with configured_reward(ReasoningGymReward(timeout_s=20)) as reward:
        right, plain, wrong = (result.value for result in reward.score(asked))
    assert right == plain == 1.0
    assert wrong is not None
    assert wrong < 0.1
