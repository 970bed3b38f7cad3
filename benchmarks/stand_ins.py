"""Stand-ins for unavailable tokenizers: a similar one, with the marks that a model's chat template spells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from agentgym.chat_templates.tokenizer import ChatTokenizer

__all__ = ["STAND_INS", "StandIn", "stand_in_tokenizer", "with_marks"]

EOS, BOS = "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"
SPELLED = re.compile(
    r"<[|｜][^'\"{}\s<>\\]+?[|｜]>|<SPECIAL_\d+>|\[/?[A-Z_]{3,}\]|</?(?:start|end)_of_(?:turn|image)>|\[e~\[|\]~!?b[\[\]]"
    r"|<\|(?:turn|channel|tool|tool_call|tool_response)>|<(?:turn|channel|tool|tool_call|tool_response)\|>|<\|\"\|>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|minimax:tool_call)>|\[gMASK\]|<sop>"
)


@dataclass(frozen=True)
class StandIn:
    """The substitute of a model's own tokenizer: `StandIn("qwen3", "<s>", "</s>", ("</s>",), "hermes")`."""

    nearest: str
    """The most similar tokenizer: `qwen3`, `qwen2_5`, `gptoss` or `mistral_nemo`."""
    bos: str
    eos: str
    stops: tuple[str, ...]
    """The other end tokens, as the model's generation_config.json lists them."""
    family: str
    """The format that `renderer_for` has to recognize."""


QWEN = ("<|endoftext|>", "<|im_end|>", ("<|endoftext|>",))
LLAMA = ("<|begin_of_text|>", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>"))
STAND_INS = {
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": StandIn(
        "qwen3", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", (), "command_r7b"
    ),
    "GLM-4.6": StandIn("qwen3", "", "<|endoftext|>", ("<|user|>", "<|observation|>"), "glm45"),
    "LFM2-8B-A1B": StandIn("qwen3", "<|startoftext|>", "<|im_end|>", (), "lfm2"),
    "MiniMax-M2": StandIn("qwen3", "]~!b[", "[e~[", (), "minimax_m2"),
    "Mistral-Small-3.2-24B-Instruct-2506": StandIn("mistral_nemo", "<s>", "</s>", (), "mistral"),
    "NVIDIA-Nemotron-Nano-v2": StandIn("qwen3", "<s>", "<SPECIAL_12>", (), "nemotron"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": StandIn("qwen3", "<|begin_of_text|>", "<|im_end|>", (), "hermes"),
    "Qwen-QwQ-32B": StandIn("qwen2_5", *QWEN, "hermes"),
    "Qwen-Qwen2.5-7B-Instruct": StandIn("qwen2_5", *QWEN, "hermes"),
    "Qwen-Qwen3-0.6B": StandIn("qwen3", *QWEN, "hermes"),
    "Qwen3-Coder": StandIn("qwen3", *QWEN, "qwen3_coder"),
    "Qwen3.5-4B": StandIn("qwen3", *QWEN, "qwen3_coder"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": StandIn("qwen3", BOS, EOS, (), "deepseek_v3"),
    "deepseek-ai-DeepSeek-V3.1": StandIn("qwen3", BOS, EOS, (), "deepseek_v31"),
    "deepseek-ai-DeepSeek-V3.2": StandIn("qwen3", BOS, EOS, (), "deepseek_v32"),
    "deepseek-ai-DeepSeek-V3": StandIn("qwen3", BOS, EOS, (), "deepseek_v3"),
    "google-gemma-2-2b-it": StandIn("qwen3", "<bos>", "<eos>", ("<end_of_turn>",), "gemma2_generic"),
    "google-gemma-3": StandIn("qwen3", "<bos>", "<eos>", ("<end_of_turn>",), "gemma2_generic"),
    "google-gemma-4-31B-it": StandIn("qwen3", "<bos>", "<eos>", ("<turn|>", "<|tool_response>"), "gemma4"),
    "ibm-granite-granite-4.0": StandIn("qwen3", "<|end_of_text|>", "<|end_of_text|>", (), "granite4"),
    "meta-llama-Llama-3.1-8B-Instruct": StandIn("qwen3", *LLAMA, "llama3_json"),
    "meta-llama-Llama-3.3-70B-Instruct": StandIn("qwen3", *LLAMA, "llama3_json"),
    "microsoft-Phi-3.5-mini-instruct": StandIn("qwen3", "<s>", "<|endoftext|>", ("<|end|>",), "phi4_mini"),
    "microsoft-phi-4": StandIn("qwen3", "<|endoftext|>", "<|end|>", (), "phi4_mini"),
    "mistralai-Mistral-Nemo-Instruct-2407": StandIn("mistral_nemo", "<s>", "</s>", (), "mistral"),
    "moonshotai-Kimi-K2": StandIn("qwen3", "[BOS]", "<|im_end|>", (), "kimi_k2"),
    "openai-gpt-oss-120b": StandIn("gptoss", "<|startoftext|>", "<|return|>", ("<|call|>",), "gpt_oss"),
}
"""The stand-ins by the name of the chat template's file; the templates belong to their models and are not included."""


def with_marks(backend: Tokenizer, nearest: str, templates: Path) -> Tokenizer:
    """Returns a copy of a tokenizer that knows the marks of all templates in the folder for which it substitutes."""
    backend = Tokenizer.from_str(backend.to_str())
    marks: set[str] = set()
    for name, stand_in in STAND_INS.items():
        if stand_in.nearest == nearest:
            marks.update(SPELLED.findall((templates / f"{name}.jinja").read_text(encoding="utf-8")))
            marks.update((stand_in.bos, stand_in.eos, *stand_in.stops))
    backend.add_special_tokens(sorted(mark for mark in marks if mark and backend.token_to_id(mark) is None))
    return backend


def stand_in_tokenizer(name: str, backend: Tokenizer, template: str) -> ChatTokenizer:
    """Returns the tokenizer of a template, over a backend that `with_marks` gave."""
    stand_in = STAND_INS[name]
    special = {"bos_token": stand_in.bos, "eos_token": stand_in.eos}
    return ChatTokenizer(backend, template, "", special, (stand_in.eos, *stand_in.stops), name)
