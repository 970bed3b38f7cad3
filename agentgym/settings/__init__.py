"""Settings: classes of them, and those of the functions that a run names."""

from agentgym.settings.functions import (
    Contract,
    check_above_zero,
    check_at_least,
    check_named_numbers,
    check_pair,
    check_setting_names,
    convert_function_errors,
    is_bundled,
    settings_of,
    with_inputs,
    with_settings,
)

__all__ = [
    "Contract",
    "check_above_zero",
    "check_at_least",
    "check_named_numbers",
    "check_pair",
    "check_setting_names",
    "convert_function_errors",
    "is_bundled",
    "settings_of",
    "with_inputs",
    "with_settings",
]
