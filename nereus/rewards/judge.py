"""A language model as a judge, asked at an address that speaks OpenAI's chat completions.

    score() -- all at once, `concurrency` under way --> POST <url>/chat/completions
        200 ─▶ last match of the pattern in the answer ─▶ reward in [0, 1], or missing: "invalid"
        429, 5xx, no connection, no answer in time ─▶ again later, `retries` times, then missing
        401, 403, 404 ─▶ DataError: no response would fare better

The response stands in the judge's prompt: a policy can learn to talk to the judge. Watch what it learns.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from nereus.config import JudgeReward
from nereus.config.environment import secret
from nereus.errors import Cancelled, ConfigError, DataError, explain
from nereus.rewards.function import Json, RewardRequest, RewardResult

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
WAKE_S = 0.2  # how often a stop is looked for
MAX_DETAIL = 300
PLACES = re.compile(r"\{(prompt|response|ground_truth)\}")


class Judge:
    """Implements `RewardFunction`. The key is read once, here, and is in no message.

    Raises ConfigError when the variable of the key is not set.
    """

    def __init__(self, config: JudgeReward, *, stop: threading.Event | None = None) -> None:
        self._config, self._stop = config, stop or threading.Event()
        self._closed = threading.Event()
        self._key = _key(config)
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._pattern = re.compile(config.score)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")

    def score(self, requests: Sequence[RewardRequest]) -> tuple[RewardResult, ...]:
        """One result for each request, in order. Raises DataError when the judge refuses the key, the model
        or the address, Cancelled when the stop flag is set.
        """
        # A thread of its own: the caller's may have an event loop running.
        return self._thread.submit(asyncio.run, self._score(requests)).result()

    def close(self) -> None:
        """End what is under way, and the thread."""
        self._closed.set()
        self._thread.shutdown(wait=True)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _score(self, requests: Sequence[RewardRequest]) -> tuple[RewardResult, ...]:
        began_s, free = time.monotonic(), asyncio.Semaphore(self._config.concurrency)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        limits = httpx.Limits(max_connections=self._config.concurrency)
        async with httpx.AsyncClient(headers=headers, limits=limits, timeout=None) as client:

            async def one(request: RewardRequest) -> RewardResult:
                async with free:
                    return await self._judged(client, request, queue_s=time.monotonic() - began_s)

            asked = asyncio.gather(*(one(request) for request in requests))
            while not asked.done():
                if self._stop.is_set() or self._closed.is_set():
                    asked.cancel()
                    await asyncio.gather(asked, return_exceptions=True)
                    raise Cancelled(explain("stopped while the judge was asked"))
                await asyncio.wait([asked], timeout=WAKE_S)
            return tuple(asked.result())

    async def _judged(
        self, client: httpx.AsyncClient, request: RewardRequest, *, queue_s: float
    ) -> RewardResult:
        """The reward of one response, by as many tries as it takes and is allowed."""
        body = self._body(request)
        missing = RewardResult(value=None, reason="exception", queue_s=queue_s)
        for attempt in range(self._config.retries + 1):
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    response = await client.post(self._url, json=body)
            except TimeoutError:
                detail = f"no answer in {self._config.timeout_s:g} s"
                missing = RewardResult(value=None, reason="timeout", detail=detail, queue_s=queue_s)
            except httpx.TransportError as error:
                detail = self._safe(f"{type(error).__name__}: {error}")
                missing = RewardResult(value=None, reason="exception", detail=detail, queue_s=queue_s)
            else:
                if response.status_code == httpx.codes.OK:
                    return self._read(response.text, queue_s)
                detail = self._safe(f"HTTP {response.status_code}: {response.text}")
                if response.status_code in (401, 403, 404):
                    raise self._refused(detail)
                missing = RewardResult(value=None, reason="exception", detail=detail, queue_s=queue_s)
                if response.status_code != 429 and response.status_code < 500:
                    return missing
                pause_s = _retry_after_s(response) or pause_s
            if attempt < self._config.retries:
                await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
        return missing

    def _body(self, request: RewardRequest) -> dict[str, Any]:
        texts = {
            "prompt": request.prompt,
            "response": request.response,
            "ground_truth": _text(request.ground_truth),
        }
        # In one pass, so that braces in a response are text.
        content = PLACES.sub(lambda place: texts[place[1]], self._config.prompt)
        return {
            **self._config.parameters,
            "model": self._config.model_name,
            "messages": [{"role": "user", "content": content}],
        }

    def _read(self, text: str, queue_s: float) -> RewardResult:
        """The reward in a completion, else what was wrong with it."""

        def invalid(detail: str) -> RewardResult:
            return RewardResult(value=None, reason="invalid", detail=self._safe(detail), queue_s=queue_s)

        content = _content(text)
        if content is None:
            return invalid(f"no chat completion: {text!r}")
        if not (found := list(self._pattern.finditer(content))):
            return invalid(f"no score in {content!r}")
        try:
            score = float(found[-1][1])
        except (TypeError, ValueError):
            return invalid(f"{found[-1][1]!r} is no number")
        low, high = self._config.lowest, self._config.highest
        if not low <= score <= high:
            return invalid(f"score {score:g} is not in {low:g}..{high:g}")
        return RewardResult(value=(score - low) / (high - low), queue_s=queue_s)

    def _refused(self, detail: str) -> DataError:
        variable = self._config.api_key_variable
        return DataError(
            explain(
                f"the judge at {self._config.url} refuses every request",
                values=detail,
                remedy="check reward.url, reward.model_name and "
                + (f"the key in ${variable}" if variable else "whether it needs reward.api_key_variable"),
            )
        )

    def _safe(self, text: str) -> str:
        """Text for people: short, and without the key, which servers like to repeat."""
        return (text.replace(self._key, "***") if self._key else text)[:MAX_DETAIL]


def _key(config: JudgeReward) -> str | None:
    if config.api_key_variable is None:
        return None
    if key := secret(config.api_key_variable):
        return key.strip()
    raise ConfigError(
        explain(
            "cannot ask the judge",
            values=f"reward.api_key_variable = {config.api_key_variable}, which is not set",
            remedy="set the variable where the campaign runs, or leave it out for a judge without keys",
        )
    )


def _content(text: str) -> str | None:
    """The answer in a chat completion, or None where it is none."""
    try:
        content = json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        return None
    return content if isinstance(content, str) else None


def _retry_after_s(response: httpx.Response) -> float | None:
    """The pause that the server asks for, in seconds or until a date (RFC 9110, section 10.2.3)."""
    told = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(told))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(told).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def _text(value: Json) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
