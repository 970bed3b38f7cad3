"""`check_env`: finds what is wrong with an environment, by playing it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import gymnasium
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from agentgym.envs.base.action import Action
from agentgym.envs.base.policies import RandomPolicy
from agentgym.envs.base.text_env import EpisodeOver, StepResult, TextEnv
from agentgym.envs.base.wrapped_env import WrappedEnv
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.errors import UnknownName, nearest
from agentgym.rollout.hosting.tracebacks import is_scaffolding
from agentgym.testing.contracts.env_claims import CLAIMS
from agentgym.testing.contracts.env_isolation import ISOLATION
from agentgym.testing.contracts.env_output import captured_output
from agentgym.testing.contracts.env_subject import (
    LONGEST_EPISODE,
    MAX_STEPS,
    Check,
    Complaint,
    EnvUnderTest,
    difference,
    json_default,
    line,
    transcript,
)
from agentgym.testing.contracts.env_tasks import TASK_CHECKS
from agentgym.testing.contracts.env_tools import TOOL_CHECKS
from agentgym.tools.calling.definition import MARK
from agentgym.types import JSON, AnyCall, MalformedCall, Message, ToolCall

__all__ = ["CHECKS", "Finding", "Verdict", "check_env", "examine_env"]

SEEDS = range(8)
RELEASE = "release in `release(self)` what `start` opened; it is called once for each `start`"
LIBRARIES = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
Make = Callable[..., TextEnv]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem: `Finding("ignored seed", "8 seeds give the same episode; ...")`."""

    check: str
    """The name of the check."""
    message: str
    """The observation, and what to do."""
    severity: Literal["error", "warning"] = "error"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of one check: `Verdict("fork", "not claimed", (), "it has no method fork")`."""

    check: str
    """The name of the check."""
    verdict: Literal["passed", "warned", "failed", "not claimed"]
    """"failed" if a finding is an error; "not claimed" if the environment promises nothing that could be checked."""
    findings: tuple[Finding, ...] = ()
    not_claimed: str = ""
    """The promises that the environment does not make; the check may still pass."""
    printed: str = ""
    """The last lines that the environment printed, if the check failed."""


def check_env(env: str | Make | TextEnv, kwargs: Mapping[str, JSON] | None = None) -> list[Finding]:
    """Returns everything found wrong with an environment; [] if it is fine.

    `env` is an id, a `package.module:Class`, a `path/to/file.py:Class`, a class or function that makes one, or an
    environment (more are then made by its class, without keywords). An exception of the environment is a finding.
    """
    return [finding for verdict in examine_env(env, kwargs) for finding in verdict.findings]


def examine_env(
    env: str | Make | TextEnv, kwargs: Mapping[str, JSON] | None = None, *, only: Collection[str] = ()
) -> list[Verdict]:
    """Returns the result of every check of `check_env`, also of those that passed; stops if no environment can be made.

    `only` names the checks to run; () runs all.
    """
    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise UnknownName(f"no check {unknown[0]!r}{nearest(unknown[0], CHECKS) or '.'} Known: {', '.join(CHECKS)}")
    if isinstance(env, str):
        resolve_env(env)  # an unknown name is the caller's mistake, not a finding
        subject = EnvUnderTest(lambda **own: resolve_env(env, own)(), dict(kwargs or {}), env)
    else:
        maker: Any = type(env) if isinstance(env, TextEnv) else env
        subject = EnvUnderTest(maker, dict(kwargs or {}))
    verdicts: list[Verdict] = []
    for name, check in CHECKS.items():
        if only and name not in only:
            continue
        verdicts.append(_verdict(name, check, subject))
        if name == "makes" and verdicts[0].findings:
            break
    return verdicts


def _verdict(name: str, check: Check, subject: EnvUnderTest) -> Verdict:
    findings: list[Finding] = []
    unclaimed: list[str] = []
    with captured_output() as printed:
        try:
            for severity, message in check(subject):
                if severity == "not claimed":
                    unclaimed.append(message)
                else:
                    findings.append(Finding(name, message, severity))
        except Exception as error:  # noqa: BLE001  # the boundary: an environment is user code
            findings.append(Finding(name, f"raised {_last_lines(error)}"))
    reasons = "; ".join(unclaimed)
    if findings:
        failed = any(finding.severity == "error" for finding in findings)
        return Verdict(name, "failed" if failed else "warned", tuple(findings), reasons, str(printed) if failed else "")
    return Verdict(name, "not claimed" if unclaimed else "passed", (), reasons)


def _makes(make: EnvUnderTest) -> Iterator[Complaint]:
    env: object = make()
    if not isinstance(env, TextEnv | WrappedEnv):
        yield "error", f"it is a {type(env).__name__}; derive it from agentgym.envs.TextEnv or ToolEnv"
        return
    observation, _ = env.reset(seed=0)
    env.close()
    if not env.system_prompt and not observation.strip():
        yield "error", "there is neither a system_prompt nor a first observation: nothing says what to do"


def _gymnasium(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    with warnings.catch_warnings(record=True) as caught, contextlib.closing(env):
        warnings.simplefilter("always")
        gymnasium_check_env(env, skip_render_check=True)
    resources = [warning for warning in caught if issubclass(warning.category, ResourceWarning)]
    for warning in [*resources[:1], *(warning for warning in caught if warning not in resources)]:
        advice = f". {len(resources)} were left open: {RELEASE}" if warning in resources else ""
        if "different from the unwrapped version" not in str(warning.message):  # what the wrappers do counts
            yield "warning", f"Gymnasium's check_env: {warning.message}{advice}"


def _reproducible(make: EnvUnderTest) -> Iterator[Complaint]:
    for seed in (0, 1):
        env = make()
        first, again, fresh = transcript(env, seed), transcript(env, seed), _transcript_of_new(make, seed)
        env.close()
        for other, what in ((again, "a second reset"), (fresh, "a new environment")):
            if other != first:
                yield (
                    "error",
                    f"seed {seed} and the same replies give another episode after {what}: {difference(first, other)}. "
                    "Draw only from self.np_random, and set all state in start or reset",
                )
                return


def _uses_seed(make: EnvUnderTest) -> Iterator[Complaint]:
    episodes = {"\n".join(_transcript_of_new(make, seed, policy_seed=0)) for seed in SEEDS}
    env = make()
    env.close()
    if env.num_tasks == 1:
        yield "not claimed", "it has one task"
    elif len(episodes) == 1:
        yield "error", f"{len(SEEDS)} seeds give the same episode; draw the task from self.np_random"


def _observations(make: EnvUnderTest) -> Iterator[Complaint]:
    for observation, info in _play_observations(make):
        messages = info["messages"]
        text = "\n".join(message.content for message in messages if isinstance(message.content, str))
        if not messages:
            yield "error", f'info["messages"] is empty, so the model never sees {observation[:60]!r}'
        elif observation not in text and "".join(observation.split()) not in "".join(text.split()):
            yield "error", f'the observation {observation[:60]!r} is not in info["messages"]: the model never sees it'
        elif not text.strip():
            yield "warning", "an observation is empty; tell the model what happened"
        else:
            continue
        return


def _text_only(make: EnvUnderTest) -> Iterator[Complaint]:
    for observation, info in _play_observations(make):
        contents = [observation, *(message.content for message in info["messages"])]
        for content in contents:
            if not isinstance(content, str):
                yield "error", f"a message holds {type(content).__name__}; images and other media are not supported"
                return
            if "data:image/" in content or "\x89PNG" in content:
                yield "error", "an observation carries an image as text; images are not supported, use words"
                return


def _leaked_methods(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    env.reset(seed=0)
    names = [spec.name for spec in env.tool_specs]
    marked = {tool.name for _, tool in getattr(type(env.unwrapped), "_marked", ())}
    for name in names:
        method = getattr(type(env.unwrapped), name, None)
        if name.startswith("_") or (name not in marked and callable(method) and not hasattr(method, MARK)):
            yield (
                "error",
                f"the method {name!r} is among the tools but is not marked with @tool: the model can call it",
            )
    if len(set(names)) != len(names):
        yield "error", f"two tools bear one name: {', '.join(names)}"
    env.close()


def _serialisable(make: EnvUnderTest) -> Iterator[Complaint]:
    for _, info in _play_observations(make):
        for key, value in info.items():
            try:
                json.dumps(value, default=json_default)
            except (TypeError, ValueError) as error:
                yield "error", f"info[{key!r}] cannot be written to a file: {error}"
                return


def _has_turn_limit(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    env.reset(seed=0)
    limit = env.max_turns
    if not _plays_to_the_end(env, limit or LONGEST_EPISODE):
        if limit is None:
            yield "error", "no turn limit: a reply without sense goes on for ever; set max_turns"
        else:
            yield "error", f"max_turns is {limit}, and the episode goes on after it; end or truncate it in step"
    env.close()


def _answers(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    observation, _ = env.reset(seed=0)
    if not env.tool_specs:
        env.close()
        return
    policy = RandomPolicy()
    policy.reset(env, observation, 0)
    spec = env.tool_specs[0]
    calls: tuple[AnyCall, ...] = (
        MalformedCall("check_0", '{"name": ', "not JSON"),
        ToolCall("check_1", "no_such_tool", {}),
        ToolCall("check_2", spec.name, {"no_such_argument": [None]}),
        *(dataclasses.replace(call, id="check_3") for call in policy.act(observation).tool_calls),
    )
    *_, info = env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))
    answered = [message.tool_call_id for message in info["messages"] if message.role == "tool"]
    call_ids = [call.id for call in calls]
    if answered != call_ids:
        yield "error", f"a reply with the calls {call_ids} was answered as {answered}; answer every call id, in order"
    env.close()


def _after_the_end(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    if not _plays_to_the_end(env, max(MAX_STEPS, env.max_turns or 0)):
        env.close()
        return
    try:
        _, reward, terminated, truncated, _ = env.step("...")
    except (EpisodeOver, gymnasium.error.ResetNeeded):
        pass
    else:
        if reward or not (terminated or truncated):
            yield "error", "a step after the end goes on with the episode; raise EpisodeOver"
    env.close()


def _closes(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    env.close()
    env.reset(seed=0)
    env.close()
    env.close()
    yield from ()


def _async_agrees(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    sync = transcript(env, 0)
    env.close()
    other = asyncio.run(_async_transcript(make(), 0))
    if other != sync:
        yield "error", f"astep plays another episode than step: {difference(sync, other)}"


CHECKS: dict[str, Check] = {
    "makes": _makes,
    "Gymnasium": _gymnasium,
    "reproducible": _reproducible,
    "ignored seed": _uses_seed,
    "dropped observation": _observations,
    "images": _text_only,
    "leaked methods": _leaked_methods,
    "unserialisable info": _serialisable,
    "no turn limit": _has_turn_limit,
    "unanswered calls": _answers,
    "step after the end": _after_the_end,
    "close twice": _closes,
    "async": _async_agrees,
    **ISOLATION,
    **TOOL_CHECKS,
    **TASK_CHECKS,
    **CLAIMS,
}
"""The checks by name, in the order in which they run."""


def _play_observations(make: EnvUnderTest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the observations and infos of one random episode, including the answer to plain text."""
    env = make()
    observation, info = env.reset(seed=0)
    yield observation, info
    policy = RandomPolicy()
    policy.reset(env, observation, 0)
    for number in range(MAX_STEPS):
        message = Message("assistant", "hm") if number == 0 else policy.act(observation)
        observation, _, terminated, truncated, info = env.step(Action.from_message(message))
        yield observation, info
        if terminated or truncated:
            break
    env.close()


def _plays_to_the_end(env: TextEnv, steps: int) -> bool:
    env.reset(seed=0)
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(Action("...", (), Message("assistant", "...")))
        if terminated or truncated:
            return True
    return False


def _transcript_of_new(make: EnvUnderTest, seed: int, policy_seed: int | None = None) -> list[str]:
    env = make()
    try:
        return transcript(env, seed, policy_seed)
    finally:
        env.close()


async def _async_transcript(env: TextEnv, seed: int) -> list[str]:
    observation, info = await env.areset(seed=seed)
    lines = [line(observation, info)]
    policy = RandomPolicy()
    policy.reset(env, observation, seed)
    for _ in range(MAX_STEPS):
        result: StepResult = await env.astep(Action.from_message(policy.act(observation)))
        observation = result[0]
        lines.append(line(*result))
        if result[2] or result[3]:
            break
    await env.aclose()
    return lines


def _last_lines(error: Exception) -> str:
    """Returns an error with the last line of the environment's own code that led to it."""
    text = f"{type(error).__name__}: {str(error)[:500]}"
    cause: BaseException | None = error
    frames: list[traceback.FrameSummary] = []
    while cause is not None:
        frames += traceback.extract_tb(cause.__traceback__)
        cause = cause.__cause__
    own = [frame for frame in frames if not is_scaffolding(frame.filename)]
    of_user = [frame for frame in own if not frame.filename.startswith(LIBRARIES)]
    frame = next(iter(of_user[-1:] or own[-1:]), None)
    if frame is None or frame.filename in text:
        return text
    return f"{text} (line {frame.lineno} of {frame.filename})"
