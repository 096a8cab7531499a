"""The reward function and the tools that a campaign asks for."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from nereus.config import CodeReward, JudgeReward, PythonReward, ReasoningGymReward, ToolsConfig
from nereus.errors import ConfigError, explain
from nereus.rewards.function import RewardFunction
from nereus.rewards.process import ProcessReward
from nereus.rewards.sandbox import Sandbox, SandboxError, check_sandbox
from nereus.rewards.tools import Tools

GYM_TARGET = "nereus.rewards.gym_score:score"
CODE_TARGET = "nereus.rewards.code_score:score"
FIRST_PROCESSES = 1  # until something was measured
START_ALLOWANCE_S = 300.0  # sandboxes that start slowly are not the program's fault; see `run_program`

AnyReward = PythonReward | ReasoningGymReward | CodeReward | JudgeReward


def configured_reward(
    config: AnyReward, *, stop: threading.Event | None = None
) -> AbstractContextManager[RewardFunction]:
    """The reward; it is ready inside the context, and closed after it. `stop` ends calls under way.

    Raises ConfigError when the machine cannot do what is asked: a sandbox, or a judge's key.
    """
    if isinstance(config, JudgeReward):
        from nereus.rewards.judge import Judge  # loads an HTTP client

        return Judge(config, stop=stop)
    if isinstance(config, CodeReward):
        return _code_reward(config, stop)
    if isinstance(config, ReasoningGymReward):
        return ProcessReward(
            target=GYM_TARGET,
            limit_s=config.timeout_s,
            num_processes=config.workers or FIRST_PROCESSES,
            stop=stop,
        )
    return ProcessReward(
        target=config.function,
        limit_s=config.timeout_s,
        num_processes=config.workers or FIRST_PROCESSES,
        batched=config.batched,
        stop=stop,
    )


def configured_tools(config: ToolsConfig, *, stop: threading.Event | None = None) -> Tools:
    """The tools; their processes run inside the context. `stop` ends calls under way."""
    return Tools(
        target=config.function,
        limit_s=config.timeout_s,
        num_processes=config.workers or FIRST_PROCESSES,
        stop=stop,
    )


def _code_reward(config: CodeReward, stop: threading.Event | None) -> ProcessReward:
    memory_bytes = int(config.memory_gb * 1e9)
    sandbox = Sandbox(isolation=config.isolation, memory_bytes=memory_bytes, num_processes=config.processes)
    try:
        check_sandbox(sandbox)
    except SandboxError as error:
        raise ConfigError(
            explain(
                "cannot run programs in a sandbox",
                values=f"reward.isolation = {config.isolation}: {error}",
                rule="namespaces need Linux 5.14, and unprivileged user namespaces or root with "
                "CAP_SYS_ADMIN",
                remedy="allow them on this machine (a container: --cap-add SYS_ADMIN and a seccomp profile "
                "that lets unshare and mount pass), or set reward.isolation: limits where the programs may "
                "do whatever you may: read your files, use the network",
            )
        ) from error
    return ProcessReward(
        target=CODE_TARGET,
        limit_s=config.timeout_s + START_ALLOWANCE_S,
        num_processes=config.workers or FIRST_PROCESSES,
        arguments={
            "tests": config.tests,
            "program": config.program,
            "counts": config.counts,
            "timeout_s": config.timeout_s,
            "memory_bytes": memory_bytes,
            "num_processes": config.processes,
            "isolation": config.isolation,
        },
        stop=stop,
    )
