"""The judge against a server of the test's own, well-behaved and not."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from email.utils import formatdate
from typing import Any

import pytest
from pydantic import ValidationError

from nereus.config import JudgeReward
from nereus.errors import Cancelled, ConfigError, DataError
from nereus.rewards.configured import configured_reward
from nereus.rewards.function import RewardRequest, RewardResult
from nereus.rewards.judge import Judge
from tests.rewards.judge_server import Reply, Server, says, serving

KEY = "sk-very-secret"


def request(response: str = "42", prompt: str = "6 x 7?") -> RewardRequest:
    return RewardRequest(
        sample_id=0, prompt=prompt, response=response, response_token_ids=(), ground_truth="forty-two"
    )


def judged(
    server: Server, *requests: RewardRequest, stop: threading.Event | None = None, **settings: Any
) -> tuple[RewardResult, ...]:
    config = JudgeReward(url=server.url, model_name="grader", **settings)
    with configured_reward(config, stop=stop) as reward:
        return reward.score(requests or [request()])


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nereus.rewards.judge.FIRST_PAUSE_S", 0.01)


def test_the_judge_gets_the_filled_prompt_and_its_last_score_is_the_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(lambda n, body: says("A score: 2 would be harsh.\n**Score: 7.5**")) as server:
        (result,) = judged(
            server,
            request("{prompt} or {x}"),
            api_key_variable="JUDGE_KEY",
            prompt="Q {prompt} R {ground_truth} A {response} {as: {json}}",
            parameters={"temperature": 0.0, "seed": 1},
        )
    assert result.value == pytest.approx(0.75)
    assert server.bodies == [
        {
            "temperature": 0.0,
            "seed": 1,
            "model": "grader",
            "messages": [{"role": "user", "content": "Q 6 x 7? R forty-two A {prompt} or {x} {as: {json}}"}],
        }
    ]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert server.headers[0]["path"] == "/v1/chat/completions"


def test_results_come_in_order_and_no_more_requests_are_under_way_than_allowed() -> None:
    def answer(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.02 if number % 2 else 0.05)
        return says(f"Score: {body['messages'][0]['content']}")

    with serving(answer) as server:
        numbers = [str(n % 11) for n in range(12)]
        results = judged(server, *map(request, numbers), prompt="{response}", concurrency=3)
    assert [result.value for result in results] == pytest.approx([int(n) / 10 for n in numbers])
    assert 2 <= server.most_under_way <= 3
    assert results[-1].queue_s >= results[0].queue_s


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        ((200, {}, "not json"), "no chat completion: 'not json'"),
        ((200, {}, "{}"), "no chat completion"),
        ((200, {}, "[]"), "no chat completion"),
        (says(None), "no chat completion"),
        (says("I would rather not."), "no score in 'I would rather not.'"),
        (says("Score: 11"), "score 11 is not in 0..10"),
        (says("Score: -1"), "score -1 is not in 0..10"),
    ],
)
def test_an_answer_without_a_score_is_a_missing_reward(reply: Reply, detail: str) -> None:
    with serving(lambda n, body: reply) as server:
        (result,) = judged(server)
    assert (result.value, result.reason) == (None, "invalid")
    assert detail in result.detail
    assert len(server.bodies) == 1


def test_a_rate_limit_is_waited_out_as_long_as_the_judge_says() -> None:
    def limited(number: int, body: dict[str, Any]) -> Reply:
        return (429, {"Retry-After": "0.4"}, "slow down") if number == 0 else says("Score: 10")

    with serving(limited) as server:
        assert judged(server)[0].value == 1.0
    assert server.times_s[1] - server.times_s[0] >= 0.4


def test_a_pause_may_be_given_as_a_date() -> None:
    def limited(number: int, body: dict[str, Any]) -> Reply:
        until = formatdate(time.time() + 2, usegmt=True)
        return (503, {"Retry-After": until}, "") if number == 0 else says("Score: 10")

    with serving(limited) as server:
        assert judged(server)[0].value == 1.0
    assert server.times_s[1] - server.times_s[0] >= 0.9  # dates have whole seconds


def test_failures_on_the_judges_side_are_tried_again_and_then_missing() -> None:
    with serving(lambda n, body: (500, {}, "overload")) as server:
        (result,) = judged(server, retries=2)
    assert (result.value, result.reason, result.detail) == (None, "exception", "HTTP 500: overload")
    assert len(server.bodies) == 3


def test_a_request_that_the_judge_rejects_is_missing_at_once_and_the_others_are_scored() -> None:
    def picky(number: int, body: dict[str, Any]) -> Reply:
        return (400, {}, "too long") if "long" in body["messages"][0]["content"] else says("Score: 5")

    with serving(picky) as server:
        results = judged(server, request("a"), request("long"), request("b"))
    assert [result.value for result in results] == [0.5, None, 0.5]
    assert results[1].detail == "HTTP 400: too long"
    assert len(server.bodies) == 3


def test_an_answer_that_does_not_come_in_time_is_missing() -> None:
    def slow(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.8)
        return says("Score: 5")

    with serving(slow) as server:
        (result,) = judged(server, timeout_s=0.2, retries=1)
    assert (result.value, result.reason, result.detail) == (None, "timeout", "no answer in 0.2 s")
    assert len(server.bodies) == 2


def test_an_address_where_nobody_listens_is_missing() -> None:
    with serving(lambda n, body: says("")) as server:
        pass
    (result,) = judged(server, retries=1)
    assert (result.value, result.reason) == (None, "exception")
    assert "ConnectError" in result.detail


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_ends_the_run_and_the_key_is_in_no_message(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with (
        serving(lambda n, body: (status, {}, f"no entry for {KEY}")) as server,
        pytest.raises(
            DataError, match=rf"HTTP {status}: no entry for \*\*\*.*the key in \$JUDGE_KEY"
        ) as error,
    ):
        judged(server, *[request()] * 3, api_key_variable="JUDGE_KEY")
    assert KEY not in str(error.value)


def test_a_key_that_is_not_set_is_an_error_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    config = JudgeReward(url="http://localhost", model_name="m", api_key_variable="JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY, which is not set"):
        configured_reward(config)


def test_a_stop_ends_what_is_under_way() -> None:
    stop = threading.Event()

    def slow(number: int, body: dict[str, Any]) -> Reply:
        stop.set()
        time.sleep(5)
        return says("Score: 5")

    began_s = time.monotonic()
    with serving(slow) as server, pytest.raises(Cancelled):
        judged(server, stop=stop)
    assert time.monotonic() - began_s < 4


def test_closing_does_not_wait_for_the_judge() -> None:
    asked = threading.Event()

    def slow(number: int, body: dict[str, Any]) -> Reply:
        asked.set()
        time.sleep(5)
        return says("Score: 5")

    with serving(slow) as server:
        reward = Judge(JudgeReward(url=server.url, model_name="grader"))
        scoring = threading.Thread(target=lambda: suppressed(reward))
        scoring.start()
        assert asked.wait(20)
        began_s = time.monotonic()
        reward.close()
        assert time.monotonic() - began_s < 4
        scoring.join(20)


def suppressed(reward: Judge) -> None:
    with suppress(Cancelled):
        reward.score([request()])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"prompt": "grade it"}, "no {response}"),
        ({"score": "score"}, "no group"),
        ({"score": "("}, "no regular expression"),
        ({"lowest": 3.0, "highest": 3.0}, "not below"),
        ({"url": "localhost:8000"}, "url"),
        ({"url": f"https://me:{KEY}@host/v1"}, "url"),
        ({"api_key_variable": KEY}, "api_key_variable"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        JudgeReward.model_validate({"url": "http://localhost", "model_name": "m"} | changed)
