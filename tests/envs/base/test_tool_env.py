"""ToolEnv: an episode is played by calls, each is answered, and its state is released."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from agentgym.envs import Action, TextEnv, ToolEnv
from agentgym.envs.base.tool_env import HOOKS
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.rollout.hosting.answer import read_step
from agentgym.tools import Tool, as_tool, register_tool, tool
from agentgym.types import MalformedCall, Message, ToolCall


class Counter(ToolEnv):
    """Counts to a number."""

    max_turns = 5

    def start(self, options: dict[str, Any]) -> str:
        self.count = 0
        self.goal = int(options.get("goal", 3))
        self.threads = {threading.get_ident()}
        return f"Count to {self.goal}."

    @tool
    def add(self, amount: int = 1) -> str:
        """Adds to the count."""
        self.threads.add(threading.get_ident())
        self.count += amount
        self.reward += 0.25
        if self.count == self.goal:
            self.end(success=True, reward=1.0)
        return f"count {self.count}"

    @tool
    async def wait(self) -> str:
        """Waits."""
        await asyncio.sleep(0)
        return "waited"

    def helper(self) -> str:
        return "not for the model"


class InlineCounter(Counter):
    runs_inline = True


def reply(*calls: ToolCall | MalformedCall) -> Action:
    return Action.from_message(Message("assistant", "", tool_calls=calls))


@pytest.fixture(params=[Counter, InlineCounter])
def env(request: pytest.FixtureRequest) -> Any:
    tool_env = request.param()
    yield tool_env
    tool_env.close()


def test_only_marked_methods_are_in_the_menu(env: ToolEnv) -> None:
    assert [spec.name for spec in env.tool_specs] == ["add", "wait"]


class Greeter(Counter):
    """Opens with messages of its own."""

    opening: Any = (Message("system", "Be kind."), Message("user", "Count."), Message("assistant", "Yes?"))

    def start(self, options: dict[str, Any]) -> Any:
        return self.opening


def test_an_episode_may_open_with_messages() -> None:
    env = Greeter()
    observation, info = env.reset(seed=0)
    assert info["messages"] == Greeter.opening
    assert observation == "Be kind.\nCount.\nYes?"
    env.opening = ["Count."]
    with pytest.raises(EnvironmentFault, match="observation of type list"):
        env.reset(seed=0)
    env.close()


def test_an_episode_is_won_by_calls(env: ToolEnv) -> None:
    assert env.reset(seed=0)[0] == "Count to 3."
    result = env.step(reply(ToolCall("x", "add", {"amount": 2})))
    assert result[:4] == ("count 2", 0.25, False, False)
    assert result[4]["messages"] == (Message("tool", "count 2", tool_call_id="x", name="add"),)
    assert "success" not in result[4]["metrics"]
    observation, reward, terminated, truncated, info = env.step(reply(ToolCall("y", "add", {})))
    assert (observation, reward, terminated, truncated) == ("count 3", 1.25, True, False)
    assert info["metrics"] == {"turns": 2.0, "tool_calls": 2.0, "failed_calls": 0.0, "success": 1.0}


def test_the_reward_of_a_step_is_its_own(env: ToolEnv) -> None:
    env.reset(seed=0)
    assert env.step("add 1")[1] == 0.25
    assert env.step("hello")[1] == 0.0


def test_good_and_bad_calls_of_one_reply_are_all_answered(env: ToolEnv) -> None:
    env.reset(seed=0)
    calls = (
        MalformedCall("a", "{", "not JSON"),
        ToolCall("b", "ad", {}),
        ToolCall("c", "add", {"amount": "1"}),
        ToolCall("d", "add", {"amount": 1}),
        ToolCall("e", "wait", {}),
        ToolCall("f", "helper", {}),
        ToolCall("g", "close", {}),
    )
    observation, _, terminated, _, info = env.step(reply(*calls))
    assert [message.tool_call_id for message in info["messages"]] == list("abcdefg")
    errors = ["malformed", "unknown_tool", "invalid_arguments", None, None, "unknown_tool", "unknown_tool"]
    assert [result.error for result in info["tool_results"]] == errors
    assert observation == "\n".join(result.content for result in info["tool_results"])
    assert info["metrics"]["failed_calls"] == 5.0
    assert not terminated


def test_a_reply_without_calls_gets_a_request_to_call(env: ToolEnv) -> None:
    env.reset(seed=0)
    observation, *_, info = env.step(Action("add 1", (), Message("assistant", "add 1")))
    assert "must call a tool" in observation
    assert info["messages"] == (Message("user", observation),)


def test_a_person_types_commands(env: ToolEnv) -> None:
    env.reset(seed=0)
    assert env.step("add 2")[0] == "count 2"
    assert env.step('<tool_call>{"name": "add", "arguments": {}}</tool_call>')[0] == "count 3"


def test_calls_after_the_end_of_the_episode_are_answered_but_not_run(env: Any) -> None:
    env.reset(seed=0)
    calls = [ToolCall(str(number), "add", {"amount": 3}) for number in range(2)]
    *_, info = env.step(reply(*calls))
    assert [result.error for result in info["tool_results"]] == [None, "tool_error"]
    assert env.count == 3


def test_calls_beyond_the_limit_of_a_turn_are_answered_but_not_run(env: Any) -> None:
    env.reset(seed=0, options={"goal": 1000})
    *_, info = env.step(reply(*(ToolCall(str(number), "add", {}) for number in range(40))))
    assert env.count == 32
    assert [result.call_id for result in info["tool_results"]] == [str(number) for number in range(40)]


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_the_last_turn_may_end_the_episode_with_a_verdict(inline: bool, is_async: bool) -> None:
    class Judged(Counter):
        runs_inline = inline
        max_turns = 2
        if is_async:

            async def on_last_turn(self) -> None:  # type: ignore[override]
                self.end(success=True, reward=self.count)
        else:

            def on_last_turn(self) -> None:
                self.end(success=True, reward=self.count)

    env = Judged()
    for reply, reward in (("add amount=2", 2.25), ("hm", 0.0)):
        env.reset(seed=0, options={"goal": 9})
        assert not env.step("hm")[2]
        _, paid, terminated, truncated, info = env.step(reply)
        assert (paid, terminated, truncated, info["metrics"]["success"]) == (reward, True, False, 1.0)
    env.reset(seed=0, options={"goal": 1})
    assert env.step("add")[2]  # an episode that is over has no last turn
    env.close()


def test_the_turn_limit_truncates_with_the_metrics_of_the_end(env: ToolEnv) -> None:
    env.reset(seed=0)
    for _ in range(4):
        env.step("hm")
    *_, terminated, truncated, info = env.step("hm")
    assert (terminated, truncated, info["metrics"]["success"]) == (False, True, 0.0)


def test_plain_methods_stay_on_the_environments_own_thread() -> None:
    async def main() -> set[int]:
        env = Counter()
        await env.areset(seed=0)
        await env.astep(reply(ToolCall("a", "add", {}), ToolCall("b", "add", {"amount": 5})))
        await env.aclose()
        return env.threads

    threads = asyncio.run(main())
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_gymnasiums_own_check_is_silent(env: ToolEnv) -> None:
    gymnasium_check_env(env, skip_render_check=True)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_vector_environments_work_by_default() -> None:
    gymnasium.register("Counter-v0", Counter)
    try:
        for mode in ("sync", "async"):
            vector = gymnasium.make_vec("Counter-v0", num_envs=2, vectorization_mode=mode)
            assert vector.reset(seed=0)[0] == ("Count to 3.", "Count to 3.")
            assert vector.step(("add 1", "add 2"))[0] == ("count 1", "count 2")
            vector.close()
    finally:
        del gymnasium.registry["Counter-v0"]


def test_tools_come_from_the_constructor_too_and_names_are_unique() -> None:
    def double(number: int) -> int:
        """Doubles."""
        return 2 * number

    schema = {"name": "halve", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}}
    env = InlineCounter(tools=[double])
    env.add_tool(register_tool(schema, lambda number: number // 2))
    assert [spec.name for spec in env.tool_specs] == ["add", "wait", "double", "halve"]
    env.reset(seed=0)
    assert env.step("double 4")[0] == "8"
    assert env.step("halve 4")[0] == "2"
    with pytest.raises(ConfigError, match="two tools are called 'double'"):
        env.add_tool(double)
    env.close()


def test_an_overriding_method_keeps_the_tool_and_none_takes_it_away() -> None:
    class Twice(InlineCounter):
        wait = None  # type: ignore[assignment]

        def add(self, amount: int = 1) -> str:
            return super().add(2 * amount)

    env = Twice()
    env.reset(seed=0)
    assert [spec.name for spec in env.tool_specs] == ["add"]
    assert env.step("add 1")[0] == "count 2"
    env.close()


class Server:
    """A tool source that keeps account of what is open."""

    opened: int = 0

    def open(self) -> Sequence[Tool]:
        Server.opened += 1
        notes: list[str] = []

        def note(text: str) -> int:
            """Keeps a note."""
            notes.append(text)
            return len(notes)

        return [as_tool(note)]

    def close(self) -> None:
        Server.opened -= 1


@pytest.mark.parametrize("kind", [Counter, InlineCounter])
def test_tool_state_belongs_to_the_episode(kind: type[ToolEnv]) -> None:
    env = kind(tool_sources=[Server])
    assert Server.opened == 0
    for _ in range(2):
        env.reset(seed=0)
        assert Server.opened == 1
        assert [env.step("note hello")[0], env.step("note again")[0]] == ["1", "2"]
    env.close()
    env.close()
    assert Server.opened == 0


@pytest.mark.parametrize("inline", [True, False])
def test_state_is_released_when_start_fails_or_release_raises(inline: bool) -> None:
    class Failing(Counter):
        runs_inline = inline

        def start(self, options: dict[str, Any]) -> str:
            raise OSError("no disk")

        def release(self) -> None:
            raise OSError("no disk still")

    env = Failing(tool_sources=[Server])
    with pytest.raises(OSError, match="no disk"):
        env.reset(seed=0)
    assert Server.opened == 1
    with pytest.raises(OSError, match="no disk still"):
        env.close()
    assert Server.opened == 0
    env.close()


def test_async_hooks_are_awaited() -> None:
    class Remote(ToolEnv):
        runs_inline = True
        released = 0

        async def start(self, options: dict[str, Any]) -> str:  # type: ignore[override]
            await asyncio.sleep(0)
            return "ready"

        async def on_message(self, text: str) -> str:  # type: ignore[override]
            return text.upper()

        async def release(self) -> None:  # type: ignore[override]
            self.released += 1

    env = Remote()
    assert env.reset(seed=0)[0] == "ready"
    assert env.step("hello")[0] == "HELLO"
    env.close()
    env.close()
    assert env.released == 1


def test_a_fault_of_the_environment_leaves_the_step() -> None:
    class Broken(Counter):
        @tool
        def dig(self) -> str:
            """Digs."""
            raise EnvironmentFault("the sandbox is gone")

    env = Broken()
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match="sandbox"):
        env.step("dig")
    env.close()


def test_a_static_method_may_be_a_tool() -> None:
    class Static(InlineCounter):
        @staticmethod
        @tool
        def square(number: int) -> int:
            """Squares."""
            return number**2

    env = Static()
    env.reset(seed=0)
    assert env.step("square 4")[0] == "16"
    env.close()


def test_autoreset_goes_on_after_the_end() -> None:
    env = gymnasium.wrappers.Autoreset(InlineCounter())
    env.reset(seed=0)
    assert env.step("add 3")[2]
    assert env.step("anything")[0] == "Count to 3."
    env.close()


def test_a_hanging_release_is_left_behind() -> None:
    gate, steps = threading.Event(), []

    class Stuck(Counter):
        close_timeout_s = 0.05
        own_split = True

        def release(self) -> None:
            steps.append("begun")
            gate.wait()
            steps.append("done")

    env = Stuck()
    env.reset(seed=0)
    env.close()
    assert steps == ["begun"]
    gate.set()


def test_a_turn_may_be_cancelled_and_the_environment_closed() -> None:
    class Slow(Counter):
        released = False

        @tool(timeout_s=None)
        def sleep(self) -> str:
            """Sleeps."""
            gate.wait()
            return ""

        def release(self) -> None:
            self.released = True

    gate = threading.Event()

    async def main() -> Slow:
        env = Slow()
        await env.areset(seed=0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.astep(reply(ToolCall("a", "sleep", {}))), 0.05)
        await env.aclose()
        gate.set()
        return env

    assert asyncio.run(main()).released


class Odd(ToolEnv):
    """Ends as its options say."""

    runs_inline = True

    def start(self, options: dict[str, Any]) -> str:
        self.ending = options
        return "Go."

    @tool
    def go(self) -> str:
        """Goes."""
        self.end(**self.ending)
        return "done"


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ({"success": True, "reward": "1.0"}, "a finite number, at most 1e\\+100, as reward; got '1.0'"),
        ({"success": True, "reward": math.nan}, "as reward; got nan"),
        ({"success": True, "reward": 1e308}, "as reward; got 1e\\+308"),
        ({"success": True, "reward": 10**400}, "as reward; got 1000"),
        ({"success": "no", "reward": 1.0}, "success=True or False, got 'no'"),
        ({"success": None, "reward": 1.0}, "success=True or False, got None"),
    ],
    ids=str,
)
def test_an_ending_that_is_no_number_or_no_verdict_changes_nothing(ending: dict[str, Any], message: str) -> None:
    env = Odd()
    env.reset(seed=0, options=ending)
    with pytest.raises(EnvironmentFault, match=f"Odd.end takes .*{message}"):
        env.step("go")
    assert (env.reward, env._over, env._success) == (0.0, False, None)


@pytest.mark.parametrize(("paid", "value"), [(np.float32(0.5), 0.5), (np.bool_(True), 1.0), (np.bool_(False), 0.0)])
def test_an_ending_takes_numpy_s_numbers(paid: Any, value: float) -> None:
    env = Odd()
    env.reset(seed=0, options={"success": np.bool_(True), "reward": paid})
    _, reward, terminated, _, info = env.step("go")
    assert (reward, type(reward), terminated, info["metrics"]["success"]) == (value, float, True, 1.0)
    assert read_step(("done", paid, True, False, {"metrics": {"paid": paid}})).metrics() == {"paid": value}


@pytest.mark.parametrize("reward", ["1.0", None, [1.0]])
def test_a_step_whose_reward_is_no_number_is_a_fault(reward: Any) -> None:
    class Paid(TextEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            return "Go.", {}

        def step(self, action: str) -> Any:
            return "done", reward, True, False, {}

    env = Paid()
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match=r"Paid gave the reward .*, which is not a number"):
        env.step("go")


@pytest.mark.parametrize("name", HOOKS)
def test_a_method_with_other_parameters_is_refused_when_its_class_is_defined(name: str) -> None:
    def other(self: object, first: object, second: object) -> str:
        return ""

    with pytest.raises(ConfigError, match=rf"Odd\.{name} cannot be called: .*; write it as def {name}\(self"):
        type("Odd", (ToolEnv,), {name: other})
    with pytest.raises(ConfigError, match=r"write it as def start\(self, options\)"):
        type("Odd", (ToolEnv,), {"start": lambda self: ""})
    type("Fit", (ToolEnv,), {"start": staticmethod(lambda options: "")})
    type("Fit", (ToolEnv,), {"start": lambda self, options, extra=None: ""})


class Forgetful(ToolEnv):
    """Forgets to return."""

    silent: str | None = None

    def start(self, options: dict[str, Any]) -> str:
        return "Begin."

    def on_message(self, text: str) -> str:
        return self.silent  # type: ignore[return-value]


class ForgetfulStart(Forgetful):
    def start(self, options: dict[str, Any]) -> str:
        return self.silent  # type: ignore[return-value]


class ForgetfulText(TextEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return None if options else ("Begin.", {})

    def step(self, action: str) -> Any:
        return None


def test_a_method_that_returns_nothing_is_named() -> None:
    with pytest.raises(EnvironmentFault, match=r"ForgetfulStart\.start gave an observation of type NoneType"):
        ForgetfulStart().reset(seed=0)
    text_env = ForgetfulText()
    for env, what in (
        (Forgetful(), r"Forgetful\.on_message gave an"),
        (text_env, r"ForgetfulText\.step returned None"),
    ):
        env.reset(seed=0)
        with pytest.raises(EnvironmentFault, match=what):
            env.step("hm")
    with pytest.raises(EnvironmentFault, match=r"ForgetfulText\.reset returned None; it must be a tuple of 2 values"):
        text_env.reset(seed=0, options={"a": 1})


def test_a_message_in_place_of_an_action_is_refused_with_the_way_to_make_one() -> None:
    env = Counter()
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=r"got Message; Action\.from_message\(message\) makes one"):
        env.step(Message("assistant", "hm"))  # type: ignore[arg-type]


def test_a_class_that_hides_a_method_of_its_base_is_refused() -> None:
    def close(self: ToolEnv) -> str:
        """Closes the shop."""
        return "Closed."

    with pytest.raises(ConfigError, match=r"Shop: 'close' is a method of ToolEnv.*@tool\(name='close'\)"):
        type("Shop", (ToolEnv,), {"close": tool(close)})
    shop = type("Shop", (Counter,), {"close_shop": tool(name="close")(close)})()
    shop.reset(seed=0)
    assert "close" in shop.tools
    shop.close()
    with pytest.raises(ConfigError, match=r"Shop writes reset: a ToolEnv writes start\(self, options\)"):
        type("Shop", (ToolEnv,), {"reset": lambda self, *, seed=None, options=None: ("Go.", {})})
