"""The mechanism that translates another library's settings: a table of their keys, each with ours and a conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from agentgym.errors import ConfigError, nearest
from agentgym.settings.config_class import flatten_settings
from agentgym.trainers.config import TrainConfig

__all__ = [
    *("Code", "Key", "Line", "MissingPart", "NoCounterpart", "SameMeaning", "Several", "Theirs", "Translation"),
    *("Converter", "Outcome", "find_key", "same", "skip", "translate"),
]

ABSENT: Any = object()
"""The default of a key whose own default needs no translation."""
OFF: Sequence[Any] = (False, "", [], {})
"""The values of a switch that is off."""
Outcome = Literal["translated", "by default", "same", "lost", "unknown"]


class NoCounterpart(Exception):
    """The value of a key that no setting of ours expresses; the message is the reason, or the replacement."""


class MissingPart(NoCounterpart):
    """A default of theirs that has to be named here; it is listed even if nothing is given."""


class SameMeaning(Exception):
    """The value of a key that our defaults express; the message says by which."""


class Code(str):
    """A value that is not a constant, as it is written in a script."""


class Several(dict[str, Any]):
    """The values of several settings that a key becomes, by their names."""


class Theirs:
    """Their settings: those that are given, and the defaults of the others."""

    def __init__(self, settings: Mapping[str, Any], keys: Sequence[Key]) -> None:
        self.given = settings
        self._defaults = {key.theirs: key.default for key in keys if key.default is not ABSENT}

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of the key `name`; null, and what is not a constant, count as not given."""
        value = self.given.get(name)
        return self._defaults.get(name, default) if value is None or _is_open(value) else value


Converter = Callable[[Any, Theirs], Any]
"""Returns our value for theirs, which may depend on their other settings."""


@dataclass(frozen=True)
class Key:
    """A key of theirs, and its translation."""

    theirs: str
    """The dotted name, which may end with `*`."""
    ours: str = ""
    """Our setting, or several by commas; empty for a key without one."""
    remark: str = ""
    """The difference, the reason why there is no counterpart, or what has the same meaning."""
    default: Any = ABSENT
    """Their default, if it is translated where the key is left out."""
    convert: Converter | None = None
    """Returns our value, or `Several`; raises NoCounterpart or SameMeaning. None takes the value as it is."""
    kind: Literal["translated", "same", "lost"] = "translated"


def same(theirs: str, remark: str, *values: Any, default: Any = ABSENT) -> Key:
    """Returns a key that our defaults express: whatever its value is, or if it is one of `values`."""

    def convert(value: Any, _: Theirs) -> Any:
        if values and value not in values:
            raise NoCounterpart(remark)
        raise SameMeaning(remark)

    return Key(theirs, remark=remark, default=default, convert=convert, kind="same")


def skip(theirs: str, remark: str) -> Key:
    """Returns a key without a counterpart."""

    def convert(value: Any, _: Theirs) -> Any:
        if value in OFF:
            raise SameMeaning("off, as here")
        raise NoCounterpart(remark)

    return Key(theirs, remark=remark, convert=convert, kind="lost")


@dataclass(frozen=True)
class Line:
    """The fate of a setting of theirs."""

    outcome: Outcome
    theirs: str
    value: Any
    ours: str
    """Our settings with their values, or the reason."""
    pattern: str = ""
    """The pattern of the table that the key fits; empty for a key of its own."""


@dataclass
class Translation:
    """Our settings, and the fate of each of theirs."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Our settings by their dotted names."""
    lines: list[Line] = field(default_factory=list)
    decided: set[str] = field(default_factory=set)
    """Our settings that given ones of theirs decide, also where that is our default."""

    def as_nested(self) -> dict[str, Any]:
        """Returns our settings as nested mappings, such as those of a YAML file."""
        nested: dict[str, Any] = {}
        for name, value in self.settings.items():
            *parts, last = name.split(".")
            block = nested
            for part in parts:
                block = block.setdefault(part, {})
            block[last] = value
        return nested

    def of(self, outcome: Outcome) -> list[Line]:
        """Returns the lines with an outcome."""
        return [line for line in self.lines if line.outcome == outcome]


def our_defaults() -> dict[str, Any]:
    """Returns our settings with their defaults, by their dotted names."""
    return flatten_settings(asdict(TrainConfig(env="TextGame-v0")))


def translate(
    settings: Mapping[str, Any],
    keys: Sequence[Key],
    always: Mapping[str, tuple[Any, str]] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Translation:
    """Translates settings by their dotted names; a key that the table does not have is listed as unknown.

    `always` are our settings that each of their runs has, with the reason. `defaults` are ours, by default those of
    `agentgym train`.
    """
    theirs, translation = Theirs(settings, keys), Translation()
    defaults = our_defaults() if defaults is None else defaults
    for setting, (own, reason) in (always or {}).items():
        translation.settings[setting] = own
        translation.lines.append(Line("by default", "", None, f"{setting}: {_show(own)} ({reason})"))
    for name, value in settings.items():
        key = find_key(name, keys)
        if key is None:
            hint = nearest(name, [other_key.theirs for other_key in keys if "*" not in other_key.theirs])
            translation.lines.append(Line("unknown", name, value, "no key that is known" + (hint.rstrip("?.") or "")))
        elif _is_open(value):
            translation.lines.append(Line("lost", name, value, f"no constant: give it after the file, {name}=VALUE"))
        elif _is_number(key.default) and isinstance(value, str):
            raise ConfigError(f"{name} is a number, got {value!r}")
        elif value is not None:
            _translate_key(key, (name, value), theirs, (translation, defaults))
        elif key.default is ABSENT:
            translation.lines.append(Line("same", name, value, "null, as if it were left out"))
    for key in keys:
        if key.default is not ABSENT and settings.get(key.theirs) is None:
            _translate_key(key, (key.theirs, key.default), theirs, (translation, defaults), is_given=False)
    return translation


def find_key(name: str, keys: Sequence[Key]) -> Key | None:
    """Returns the key of the table that has this name or, if none has, whose pattern matches it."""
    exact = next((key for key in keys if key.theirs == name), None)
    return exact or next((key for key in keys if "*" in key.theirs and fnmatchcase(name, key.theirs)), None)


def _translate_key(
    key: Key,
    setting: tuple[str, Any],
    theirs: Theirs,
    target: tuple[Translation, Mapping[str, Any]],
    *,
    is_given: bool = True,
) -> None:
    """Adds the settings and the line of one key; a default that changes nothing has no line."""
    (name, value), (translation, defaults) = setting, target
    pattern = key.theirs if "*" in key.theirs else ""
    try:
        converted = value if key.convert is None else key.convert(value, theirs)
    except NoCounterpart as reason:
        if is_given or isinstance(reason, MissingPart):
            translation.lines.append(Line("lost", name, value, str(reason), pattern))
        return
    except SameMeaning as reason:
        if is_given:
            translation.lines.append(Line("same", name, value, str(reason), pattern))
        return
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ConfigError(f"{name}={value!r} cannot be translated ({error}): is it of the right type?") from error
    ours = converted if isinstance(converted, Several) else Several({_setting_name(key, name): converted})
    if not is_given:
        ours = Several({setting: own for setting, own in ours.items() if setting not in translation.decided})
    translation.decided |= ours.keys()
    changed = {setting: own for setting, own in ours.items() if not _equal(defaults.get(setting, ABSENT), own)}
    for ours_name, own in changed.items():
        before = translation.settings.get(ours_name)
        translation.settings[ours_name] = [*before, *own] if isinstance(before, list) and before != own else own
    text = ", ".join(f"{setting}: {_show(own)}" for setting, own in (changed or ours).items())
    if is_given and not changed:
        translation.lines.append(Line("same", name, value, text))
    elif changed:
        remark = f" ({key.remark})" if key.remark else ""
        translation.lines.append(Line("translated" if is_given else "by default", name, value, text + remark))


def _is_open(value: Any) -> bool:
    """Returns True for code, a text with a variable that is set nowhere, and OmegaConf's missing value."""
    if isinstance(value, list):
        return any(map(_is_open, value))
    return isinstance(value, Code) or (isinstance(value, str) and ("$" in value or value == "???"))


def _setting_name(key: Key, name: str) -> str:
    """Returns our name; what `*` stands for in theirs, it stands for in ours."""
    return key.ours.replace("*", name.removeprefix(key.theirs.rstrip("*")))


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, tuple) and isinstance(theirs, list):
        return list(ours) == theirs
    return bool(ours == theirs) and (type(ours) is type(theirs) or (_is_number(ours) and _is_number(theirs)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _show(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )
