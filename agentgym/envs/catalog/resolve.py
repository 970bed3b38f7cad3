"""Finds an environment by its name: an id, `package.module:Class`, or `path/to/file.py:Class`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, registry

from agentgym.envs.adapters.namespaces import NAMESPACES, namespace_of, spec_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.wrapped_env import WrappedEnv, as_text_env
from agentgym.envs.catalog.packages import load_packages
from agentgym.envs.catalog.plugin import register_envs
from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.loading import Wanted, load_module, load_named
from agentgym.types import JSON

__all__ = ["command_name", "make_env", "resolve_env", "stem_of", "turn_limit"]

VERSION = re.compile(r"-v\d+$")
ENV_CLASS = Wanted(
    noun="environment",
    example="Class",
    hint="`agentgym env list` shows the installed environments.",
    new="`agentgym new env NAME` writes an environment to start from",
    fits=lambda value: isinstance(value, type) and issubclass(value, TextEnv),
)


def make_env(name: str, kwargs: Mapping[str, JSON] | None = None) -> TextEnv:
    """A new environment; `kwargs` are its class's keywords (such as `{"level": 2}`).

    Raises UnknownName with the nearest name, and ConfigError if the class does not take the keywords.
    """
    return resolve_env(name, kwargs)()


def resolve_env(name: str, kwargs: Mapping[str, JSON] | None = None) -> Callable[[], TextEnv]:
    """A function that makes the environment each time it is called; `name` is looked up now.

    A TextEnv is the bare one if its only wrappers are those of `gymnasium.make` itself: it checks its own use. Any
    other wrapper counts (`WrappedEnv`). Any other environment of Gymnasium's interface is shown as text.
    """
    register_envs()
    module, _, last = name.rpartition(":")
    adapted = spec_of(name)
    if adapted is not None:
        make = _maker_of(adapted)
    elif module and VERSION.search(last):  # Gymnasium's `module:Id-v0`: importing the module registers the id
        load_module(module, name, ENV_CLASS)
        make = _from_registry(last)
    else:
        make = _from_path(name) if module else _from_registry(name)
    settings = dict(kwargs or {})

    def make_one() -> TextEnv:
        try:
            env = make(**settings)
        except TypeError as error:
            raise ConfigError(f"environment {name!r} does not take the keywords {settings}: {error}") from error
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"{name!r} makes a {type(env).__name__}, which is no TextEnv and no gymnasium.Env")
        text_env = as_text_env(env)
        if isinstance(text_env, TextEnv | WrappedEnv):
            return cast(TextEnv, text_env)  # a WrappedEnv has its attributes
        return _as_text(env, name, make, settings)

    return make_one


def _as_text(
    env: gymnasium.Env[Any, Any], name: str, make: Callable[..., object], settings: Mapping[str, JSON]
) -> TextEnv:
    """Returns an environment of Gymnasium's interface as text; one that can draw as text is made again to do so."""
    from agentgym.envs.adapters.gymnasium_text import GymnasiumText

    is_drawn = "ansi" in env.metadata.get("render_modes", ()) and not isinstance(env.unwrapped, TextEnv)
    if env.render_mode is None and is_drawn:
        with suppress(TypeError):  # it says that it draws, and takes no render_mode
            drawn = cast(gymnasium.Env[Any, Any], make(**settings, render_mode="ansi"))
            env.close()
            env = drawn
    return GymnasiumText(env_id=name, env=env)


def turn_limit(name: str, kwargs: Mapping[str, JSON] | None = None) -> int | None:
    """Returns the environment's own limit of turns, or None if it has none; raises as `make_env` does."""
    env = make_env(name, kwargs)
    env.close()
    return env.max_turns


def stem_of(name: str) -> str:
    """The name for the folders of an environment.

    >>> stem_of("path/to/file.py:Lock"), stem_of("textarena/Wordle-v0")
    ('Lock', 'textarena-Wordle-v0')
    """
    if namespace_of(name) is not None:
        return re.sub(r"[^\w.-]+", "-", name)
    return name.rpartition(":")[2].rpartition("/")[2]


def command_name(name: str, kwargs: Mapping[str, JSON]) -> str:
    """Returns an environment and its keywords as they are written on a command line.

    >>> command_name("TextGame-v0", {"level": 2})
    'TextGame-v0 --env-kwargs level=2'
    """
    pairs = [f"{key}={json.dumps(value, default=dict)}" for key, value in kwargs.items()]
    return shlex.join([name, *(["--env-kwargs", *pairs] if pairs else [])])


def _from_registry(env_id: str) -> Callable[..., object]:
    if env_id not in registry:
        load_packages()
    if env_id not in registry and env_id.endswith(".py"):
        raise UnknownName(f"{env_id!r} is a file: name the class in it too, as in {f'{env_id}:Class'!r}")
    if env_id not in registry:
        env_ids = sorted(set(registry) - set(_FOREIGN))
        near = nearest(env_id, [*env_ids, *(namespace.example for namespace in NAMESPACES.values())]) or "."
        raise UnknownName(
            f"unknown env {env_id!r}{near} `agentgym env list` shows all; "
            "your own is written 'package.module:Class' or 'path/to/file.py:Class'"
        )

    return _maker_of(registry[env_id])


def _maker_of(spec: EnvSpec) -> Callable[..., object]:
    return partial(gymnasium.make, spec, disable_env_checker=True)


_FOREIGN = tuple(key for key, spec in registry.items() if str(spec.entry_point).startswith("gymnasium."))


def _from_path(name: str) -> Callable[..., object]:
    target = load_named(name, ENV_CLASS)
    if isinstance(target, type) and not issubclass(target, gymnasium.Env):
        raise ConfigError(f"the class {name!r} is no environment: it derives from no TextEnv, ToolEnv or gymnasium.Env")
    if not callable(target):
        raise ConfigError(f"{name!r} is a {type(target).__name__}, not an environment class")
    factory: Callable[..., object] = target
    return factory
