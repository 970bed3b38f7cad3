"""Policies that play without a model: an oracle that knows the answer, a cheat that has none, chance, and a script."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import AgentGymError, ConfigError, EnvironmentFault, describe_error
from agentgym.registry import Registry
from agentgym.tools.calling.error_attribution import raised_at
from agentgym.types import JSON, Message, ToolCall, ToolSpec

__all__ = [
    "POLICIES",
    "Policy",
    "PolicyFactory",
    "RandomPolicy",
    "Script",
    "ScriptedPolicy",
    "game_of",
    "policy_for",
    "policy_reply",
]

WORD = re.compile(r"[^\W_][\w'-]*")
MAX_DEPTH = 6
Game = TypeVar("Game", bound=TextEnv)


@runtime_checkable
class Policy(Protocol):
    """Plays an episode: `reset` once at its start, then `act` for each observation."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        """Begins an episode on `env`, which has just been reset; `seed` is for the policy's own randomness."""

    def act(self, observation: str) -> Message:
        """The reply to an observation: an assistant message with tool calls or text."""


PolicyFactory: TypeAlias = Callable[[TextEnv], Policy]


Script: TypeAlias = Generator[tuple[str, Mapping[str, JSON]] | str | Message, str, None]
"""Yields a reply, the tool and the arguments of a call or a text, and is sent the observation that answers it, also
where another player moved in between (`ScriptedPolicy.watch`)."""


class ScriptedPolicy:
    """A policy from a function that gets the first observation and returns a `Script`:

    def make_oracle(self):
        return ScriptedPolicy(self.solve)

    def solve(self, observation):
        answer = yield "look_up", {"order": self.order}
        yield "refund", {"order": self.order, "amount": json.loads(answer)["paid"]}
    """

    def __init__(self, script: Callable[[str], Script]) -> None:
        function: object = script
        if not callable(function):
            problem = f"ScriptedPolicy takes the function that yields replies, got a {type(script).__name__}"
            raise ConfigError(f"{problem}: write ScriptedPolicy(self.solve), which is called for each episode")
        self._write = script

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        """Begins a script; raises ConfigError for a function that yields nothing."""
        self._script, self._count = self._write(observation), 0
        if not isinstance(self._script, Generator):
            raise ConfigError(f"{self._name} returned a {type(self._script).__name__}: a script yields its replies")
        self._pending: Message | None = None

    def act(self, observation: str) -> Message:
        """Returns the script's next reply; raises ConfigError if it has none, though the episode goes on."""
        reply, self._pending = self._pending or self._next(observation), None
        return reply

    def watch(self, observation: str) -> None:
        """Sees an observation that another player answers; the script's own reply to it comes afterwards."""
        self._pending = self._pending or self._next(observation)

    def _next(self, observation: str) -> Message:
        try:
            reply = self._script.send(observation) if self._count else next(self._script)
        except StopIteration as end:
            problem = f"{self._name} ended after reply {self._count}, and the episode goes on"
            hint = "it returned a value: yield it" if end.value is not None else "nothing has ended it (self.end)"
            raise ConfigError(f"{problem}: {hint}") from None
        self._count += 1
        match reply:
            case Message():
                return reply
            case str():
                return Message("assistant", reply)
            case (str(name), Mapping() as arguments):
                try:
                    json.dumps(dict(arguments))
                except (TypeError, ValueError) as error:
                    numpy = "; int(...) and float(...) make numbers of numpy's"
                    raise ConfigError(f"{self._name} yielded arguments that are no JSON: {error}{numpy}") from None
                return Message("assistant", "", tool_calls=(ToolCall(f"call_{self._count}", name, arguments),))
        raise ConfigError(f"{self._name} yielded {reply!r:.80}: a reply is (tool, arguments), a text or a Message")

    @property
    def _name(self) -> str:
        return getattr(self._write, "__qualname__", "the script")


class RandomPolicy:
    """Calls a random tool with random arguments that its schema accepts; writes random words if there are no tools.

    Strings without choices are words of the observation, so that it also meets names that the text mentions.
    """

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        """Takes the tools from `env`."""
        self._specs = env.tool_specs
        self._rng = np.random.default_rng(seed)
        self._count = 0

    def act(self, observation: str) -> Message:
        """One call of one tool."""
        if not self._specs:
            return Message("assistant", self._pick(_words(observation)))
        spec = self._specs[int(self._rng.integers(len(self._specs)))]
        return Message("assistant", "", tool_calls=(self.call(spec, observation),))

    def call(self, spec: ToolSpec, observation: str) -> ToolCall:
        """A call of a tool with random arguments."""
        arguments = self._object(spec.parameters, _Context(spec.parameters, _words(observation)), 0)
        self._count += 1
        return ToolCall(f"call_{self._count}", spec.name, arguments)

    def _pick(self, choices: Any) -> Any:
        return choices[int(self._rng.integers(len(choices)))]

    def _value(self, schema: Any, context: _Context, depth: int) -> Any:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return self._pick(context.words)
        if "$ref" in schema:
            return self._value(context.resolve_reference(schema["$ref"]), context, depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._pick(schema["enum"])
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self._value(self._pick(schema[union]), context, depth + 1)
        kind = schema.get("type", "string")
        kind = self._pick(kind) if isinstance(kind, list) else kind
        makers: dict[str, Callable[[Mapping[str, Any], _Context, int], Any]] = {
            "object": self._object,
            "array": self._array,
            "integer": self._integer,
            "number": self._number,
        }
        if kind in makers:
            return makers[kind](schema, context, depth)
        return {"boolean": bool(self._rng.integers(2)), "null": None}.get(kind, self._pick(context.words))

    def _object(self, schema: Mapping[str, Any], context: _Context, depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        members: dict[str, Any] = {}
        for name, part in schema.get("properties", {}).items():
            if name in required or (depth < 2 and self._rng.random() < 0.5):
                members[name] = self._value(part, context, depth + 1)
        return members

    def _array(self, schema: Mapping[str, Any], context: _Context, depth: int) -> list[Any]:
        low = int(schema.get("minItems", 0))
        high = int(schema.get("maxItems", max(low, 1 if depth > 2 else 3)))
        size = int(self._rng.integers(low, high + 1))
        first = [self._value(part, context, depth + 1) for part in schema.get("prefixItems", ())][:size]
        rest = [self._value(schema.get("items", {}), context, depth + 1) for _ in range(size - len(first))]
        values = first + rest
        if schema.get("uniqueItems"):
            return list({json.dumps(value, sort_keys=True): value for value in values}.values())
        return values

    def _integer(self, schema: Mapping[str, Any], context: _Context, depth: int) -> int:
        numbers = [int(word) for word in context.words if word.isdecimal() and len(word) < 10]
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is None and "exclusiveMinimum" in schema:
            low = schema["exclusiveMinimum"] + 1
        if high is None and "exclusiveMaximum" in schema:
            high = schema["exclusiveMaximum"] - 1
        low = min([0, *numbers]) if low is None else low
        high = max([9, int(low) + 9, *numbers]) if high is None else high
        return int(self._rng.integers(int(low), int(high) + 1))

    def _number(self, schema: Mapping[str, Any], context: _Context, depth: int) -> float:
        low, high = float(schema.get("minimum", 0.0)), float(schema.get("maximum", 1.0))
        return round(float(self._rng.uniform(low, max(low, high))), 3)


def _words(observation: str) -> list[str]:
    return WORD.findall(observation) or ["help"]


class _Context:
    """The sources of values: the schema's definitions, and the words in sight."""

    def __init__(self, root: Mapping[str, Any], words: list[str]) -> None:
        self._root = root
        self.words = words

    def resolve_reference(self, reference: str) -> object:
        node: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            node = node.get(part, {}) if isinstance(node, Mapping) else {}
        return node


def _made_by(method: str, kind: str) -> PolicyFactory:
    def make(env: TextEnv) -> Policy:
        maker = getattr(env.unwrapped, method, None)
        if maker is None:
            raise ConfigError(
                f"{type(env.unwrapped).__name__} has no {kind} policy; give it a method {method}(self), as in"
                " `agentgym docs write_your_own`"
            )
        policy = maker()
        if not isinstance(policy, Policy):
            raise ConfigError(f"{type(env.unwrapped).__name__}.{method} gave a {type(policy).__name__}, not a Policy")
        return policy

    return make


POLICIES: Registry[PolicyFactory] = Registry("policy")
"""Maps a kind of policy to the function that makes one for an environment."""
POLICIES.add("oracle", _made_by("make_oracle", "oracle"))
POLICIES.add("cheat", _made_by("make_cheat", "cheat"))
POLICIES.add("random", lambda env: getattr(env.unwrapped, "make_random", RandomPolicy)())


def policy_for(env: TextEnv, kind: str) -> Policy:
    """A new policy of `kind` ("oracle", "cheat", "random", or one added to POLICIES) for `env`."""
    return POLICIES[kind](env)


def policy_reply(policy: Policy, observation: str) -> Message:
    """Returns the reply of a policy to an observation.

    Raises EnvironmentFault if the policy raises, with its file, its line and the observation; ConfigError if the reply
    is no message.
    """
    author = policy._write if isinstance(policy, ScriptedPolicy) else policy.act
    try:
        reply: object = policy.act(observation)
    except Exception as error:  # noqa: BLE001  # the boundary: a policy is user code
        cause = error.__cause__ if isinstance(error.__cause__, StopIteration) else error  # as a generator raises it
        name = getattr(author, "__qualname__", type(policy).__name__)
        what = str(cause)
        if not isinstance(cause, AgentGymError):
            what = f"{name} raised {describe_error(cause)}{raised_at(cause, author)}"
        raise EnvironmentFault(f"{what}; the observation before it: {observation!r:.200}") from cause
    if isinstance(reply, Message):
        return reply
    raise ConfigError(f"{type(policy).__name__}.act returned {reply!r:.80}: a reply is a Message('assistant', ...)")


def game_of(env: TextEnv, kind: type[Game]) -> Game:
    """The game below an environment's wrappers; raises ConfigError if it is not the one that a policy plays."""
    game = env.unwrapped
    if not isinstance(game, kind):
        raise ConfigError(f"this policy plays {kind.__name__}, not {type(game).__name__}")
    return game
