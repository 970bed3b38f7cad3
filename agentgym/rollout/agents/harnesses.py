"""The harnesses that a run can start: for each its tested version, its files, variables and switches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentgym.rollout.agents.agent_episode import MODEL, AgentEpisode, Launch
from agentgym.types import JSON

__all__ = ["HARNESSES", "Harness"]

MCP = "env"
"""The name under which a harness has the environment's tools."""
PI_EXTENSION = Path(__file__).parent / "pi_extension.js"
COMPACT_SHARE = 0.8
"""The share of the window at which Codex shortens its conversation: it ends at a full one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness:
    """One entry of the table."""

    program: str
    """The name of its program on PATH."""
    version: str
    """The version with which it was tested."""
    install: str
    """How the tested version is installed."""
    launch: Callable[[AgentEpisode], Launch]
    """How it is started for an episode."""
    needs_unsafe: str = ""
    """Why it runs what the model writes on this machine; empty if its own tools are switched off."""
    version_arguments: tuple[str, ...] = ("--version",)
    """The arguments with which it prints its version."""


def _npm(package: str, version: str) -> str:
    return f"npm install -g {package}@{version}"


def _launch_codex(episode: AgentEpisode) -> Launch:
    """Codex has its settings in one file; TOML strings are written as JSON strings, which they contain."""
    off = ("shell_tool", "unified_exec", "view_image", "apps", "plugins", "memories", "goals", "hooks")
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "agentgym"',
        f"model_context_window = {episode.window}",
        f"model_auto_compact_token_limit = {int(COMPACT_SHARE * episode.window)}",
        'approval_policy = "never"',
        'sandbox_mode = "read-only"',
        'web_search = "disabled"',
        "check_for_update_on_startup = false",
        "[analytics]",
        "enabled = false",
        "[features]",
        *(f"{name} = false" for name in off),
        "[model_providers.agentgym]",
        'name = "agentgym"',
        f"base_url = {json.dumps(episode.base_url)}",
        'env_key = "AGENTGYM_KEY"',
        'wire_api = "responses"',
    ]
    if episode.tools:
        lines += [
            f"[mcp_servers.{MCP}]",
            f"url = {json.dumps(episode.mcp_url)}",
            'bearer_token_env_var = "AGENTGYM_KEY"',
            'default_tools_approval_mode = "approve"',
            "required = true",  # else its tools are not in the first request
            "startup_timeout_sec = 30",
        ]
    return Launch(
        arguments=["exec", "--skip-git-repo-check", "--", episode.prompt],
        variables={"AGENTGYM_KEY": episode.api_key},
        files={".codex/config.toml": "\n".join(lines) + "\n"},
    )


def _launch_claude_code(episode: AgentEpisode) -> Launch:
    headers: dict[str, JSON] = {"Authorization": f"Bearer {episode.api_key}"}
    servers: dict[str, JSON] = (
        {MCP: {"type": "http", "url": episode.mcp_url, "headers": headers}} if episode.tools else {}
    )
    return Launch(
        arguments=[
            *("-p", "--model", MODEL, "--tools", "Agent", "--strict-mcp-config", "--no-session-persistence"),
            *(
                "--mcp-config",
                json.dumps({"mcpServers": servers}),
                "--allowedTools",
                f"mcp__{MCP}",
                "--",
                episode.prompt,
            ),
        ],
        variables={
            "ANTHROPIC_BASE_URL": episode.root_url,
            "ANTHROPIC_API_KEY": episode.api_key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(episode.window),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(episode.turn_tokens),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line of its prompt for billing
            "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",  # by which summaries are known
            "ENABLE_TOOL_SEARCH": "false",  # else the tools are hidden
            "DISABLE_AUTOUPDATER": "1",
        },
    )


def _launch_opencode(episode: AgentEpisode) -> Launch:
    limit: dict[str, JSON] = {"context": episode.window, "output": episode.turn_tokens}
    options: dict[str, JSON] = {"baseURL": episode.base_url, "apiKey": episode.api_key}
    provider: dict[str, JSON] = {
        "npm": "@ai-sdk/openai-compatible",
        "options": options,
        "models": {MODEL: {"limit": limit, "tool_call": True}},
    }
    mcp: dict[str, JSON] = {
        "type": "remote",
        "url": episode.mcp_url,
        "enabled": True,
        "oauth": False,
        "headers": {"Authorization": f"Bearer {episode.api_key}"},
    }
    config: dict[str, JSON] = {
        "provider": {"agentgym": provider},
        "mcp": {MCP: mcp} if episode.tools else {},
        "tools": {"*": False, "task": True, f"{MCP}_*": True},
        "permission": {
            "*": "deny",
            "task": "allow",
            "doom_loop": "allow",
            f"{MCP}_*": "allow",
        },  # it is a call's repeat
        "autoupdate": False,
        "share": "disabled",
    }
    return Launch(
        arguments=["run", "--model", f"agentgym/{MODEL}", "--title", "agentgym", "--", episode.prompt],
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "true", "OPENCODE_DISABLE_AUTOUPDATE": "true"},
        files={".config/opencode/opencode.json": json.dumps(config)},
    )


def _launch_pi(episode: AgentEpisode) -> Launch:
    model: dict[str, JSON] = {"id": MODEL, "contextWindow": episode.window, "maxTokens": episode.turn_tokens}
    provider: dict[str, JSON] = {
        "baseUrl": episode.base_url,
        "apiKey": "AGENTGYM_KEY",
        "api": "openai-completions",
        "models": [model],
    }
    extension = ("--extension", str(PI_EXTENSION)) if episode.tools else ()
    # It has no `--`: a prompt that begins like an option or a file is one.
    prompt = f"\n{episode.prompt}" if episode.prompt.startswith(("-", "@")) else episode.prompt
    return Launch(
        arguments=[
            *("-p", "--offline", "--no-session", "--no-builtin-tools", "--no-context-files", "--provider", "agentgym"),
            *("--model", MODEL, *extension, prompt),
        ],
        variables={"AGENTGYM_KEY": episode.api_key, "AGENTGYM_MCP_URL": episode.mcp_url, "PI_TELEMETRY": "0"},
        files={
            ".pi/agent/models.json": json.dumps({"providers": {"agentgym": provider}}),
            # It reserves 16,384 tokens and keeps 20,000, so in a small window it asks for a summary after each reply.
            ".pi/agent/settings.json": json.dumps(
                {"compaction": {"reserveTokens": episode.turn_tokens, "keepRecentTokens": episode.window // 4}}
            ),
            "tools.json": json.dumps([*episode.tools], default=dict),
        },
    )


def _launch_mini(episode: AgentEpisode) -> Launch:
    return Launch(
        arguments=[
            "--yolo",
            "--exit-immediately",
            "--cost-limit",
            "0",
            f"--model=openai/{MODEL}",
            f"--task={episode.prompt}",
        ],
        variables={
            "OPENAI_BASE_URL": episode.base_url,
            "OPENAI_API_KEY": episode.api_key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it waits for the network
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
    )


HARNESSES: Mapping[str, Harness] = {
    "codex": Harness(
        program="codex",
        version="0.171.0",
        install=_npm("@openai/codex", "0.171.0"),
        launch=_launch_codex,
    ),
    "claude-code": Harness(
        program="claude",
        version="2.1.332",
        install=_npm("@anthropic-ai/claude-code", "2.1.332"),
        launch=_launch_claude_code,
    ),
    "opencode": Harness(
        program="opencode",
        version="1.18.33",
        install=_npm("opencode-ai", "1.18.33"),
        launch=_launch_opencode,
    ),
    "pi": Harness(
        program="pi",
        version="0.73.1",
        install=_npm("@mariozechner/pi-coding-agent", "0.73.1"),
        launch=_launch_pi,
    ),
    "mini-swe-agent": Harness(
        program="mini",
        version="2.4.6",
        install="pip install mini-swe-agent==2.4.6",
        launch=_launch_mini,
        needs_unsafe="has no tool but a shell",
        version_arguments=("--help",),
    ),
}
"""All harnesses by the name that `--agent` takes."""
