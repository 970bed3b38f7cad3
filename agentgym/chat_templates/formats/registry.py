"""The formats by name."""

from __future__ import annotations

from agentgym.chat_templates.formats.bare_json import BARE_JSON
from agentgym.chat_templates.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from agentgym.chat_templates.formats.functionary import FUNCTIONARY
from agentgym.chat_templates.formats.gemma import FUNCTION_GEMMA, GEMMA4
from agentgym.chat_templates.formats.glm import GLM, HUNYUAN_V3, HY3
from agentgym.chat_templates.formats.gpt_oss import GPT_OSS
from agentgym.chat_templates.formats.hermes import HERMES
from agentgym.chat_templates.formats.invoke import DEEPSEEK_V32, DEEPSEEK_V41, DOTS, MINICPM5, MINIMAX_M2, STEP3
from agentgym.chat_templates.formats.k2_horizon import K2_HORIZON
from agentgym.chat_templates.formats.kimi_k2 import KIMI_K2
from agentgym.chat_templates.formats.kimi_k3 import KIMI_K3
from agentgym.chat_templates.formats.lfm2 import LFM2
from agentgym.chat_templates.formats.marked_json import MARKED_JSON
from agentgym.chat_templates.formats.minimax_m3 import MINIMAX_M3
from agentgym.chat_templates.formats.mistral import MISTRAL
from agentgym.chat_templates.formats.muse_glimmer import MUSE_GLIMMER
from agentgym.chat_templates.formats.olmo3_pythonic import OLMO3_PYTHONIC
from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.chat_templates.formats.pythonic import PYTHONIC
from agentgym.chat_templates.formats.qwen3_coder import QWEN3_CODER, SEED_OSS
from agentgym.chat_templates.formats.tagged_json import TAGGED_JSON
from agentgym.registry import Registry

__all__ = ["FORMATS"]

FORMATS: Registry[ReplyFormat] = Registry("reply format", "`agentgym tools families` shows all.")
"""The formats by name or alias."""

for _format in (
    HERMES,
    MISTRAL,
    FUNCTIONARY,
    *TAGGED_JSON,
    *MARKED_JSON,
    *BARE_JSON,
    PYTHONIC,
    OLMO3_PYTHONIC,
    LFM2,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    KIMI_K3,
    GPT_OSS,
    GEMMA4,
    FUNCTION_GEMMA,
    MUSE_GLIMMER,
    K2_HORIZON,
    QWEN3_CODER,
    SEED_OSS,
    GLM,
    HUNYUAN_V3,
    HY3,
    MINIMAX_M2,
    MINIMAX_M3,
    DOTS,
    STEP3,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    MINICPM5,
):
    for _name in (_format.name, *_format.aliases):
        FORMATS.add(_name, _format)
