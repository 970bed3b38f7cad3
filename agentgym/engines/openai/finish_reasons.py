"""The meaning of the finish reasons of chat endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

__all__ = ["Finish", "classify_finish"]

Finish = Literal["reply", "cut", "filtered", "failed"]
"""The kind of an end: the model's own, perhaps with a mistake; a limit of tokens; a content filter, which withheld the
reply or a part of it; a failure of the endpoint, for which the request is sent again."""

# OpenAI, Azure, Anthropic, Gemini and its compatible API (`content_filter: SAFETY`), Zhipu, DeepSeek, Baidu, Mistral,
# Cohere, Bedrock, watsonx, vLLM, SGLang, llama.cpp, TGI, Together, TensorRT-LLM, Dynamo, MLC
SPELLINGS: Mapping[Finish, str] = {
    "reply": """stop tool_calls tool_call tool_use function_call end_turn stop_sequence pause_turn complete finish
        normal eos eos_token endoftext word stop_criteria_met repetition malformed_function_call malformed_response
        malformed_model_output malformed_tool_use unexpected_tool_call too_many_tool_calls missing_thought_signature
        function_call_filter eos_token_id stop_token completed""",
    "cut": """length max_tokens max_output_tokens model_length model_context_window_exceeded token_limit limit
        error_limit""",
    "filtered": """content_filter content_filtered sensitive refusal safety recitation language blocklist
        prohibited_content spii model_armor image_safety image_prohibited_content image_recitation error_toxic
        guardrail_intervened""",
    "failed": """error abort cancelled timeout time_limit network_error insufficient_system_resource other unspecified
        image_other no_image user_cancel rag_query_when_rag_disabled preempt unload""",
}
"""The known finish reasons; case, punctuation and what follows a colon do not matter."""
STEMS: Mapping[Finish, str] = {
    "filtered": "filter|safety|moderat|sensitiv|prohibit|block|policy|guardrail|toxic|refus",
    "failed": "err|fail|abort|cancel|timeout|network|unavail|overload|insufficient|interrupt|resource|preempt|deadline|"
    "capacity|queue|ratelimit|^oom",
    "cut": "length|limit|max|window|token|context|truncat|budget|incomplete",
    "reply": "",
}
"""The parts of a word that hint at the kind of an unknown finish reason."""


def _fold(reason: str) -> str:
    return re.sub(r"^(finish)?reason|[^a-z]", "", re.sub(r"[^a-z:]", "", reason.lower()).partition(":")[0])


_KINDS = {_fold(word): kind for kind, words in SPELLINGS.items() for word in words.split()}


def classify_finish(reason: object) -> tuple[Finish | None, bool]:
    """Returns the kind of a finish reason, and whether the table has it; None if the reply is not finished.

    An unknown reason is read by the parts of its words.
    """
    if reason is None or str(reason).strip().lower() in ("", "null", "none", "not_finished"):
        return None, True
    word = _fold(str(reason))
    guess = next(kind for kind, stems in STEMS.items() if re.search(stems, word))
    return _KINDS.get(word, guess), word in _KINDS
