"""An environment of verifiers: words with many vowels."""

import verifiers as vf
from datasets import Dataset

WORDS = ["alpha", "banana", "cherry", "delta", "eleven", "fennel", "ginger", "hazel"]


def load_environment(num_examples: int = 8) -> vf.Environment:
    rows = [{"question": f"Write a sentence with {word}.", "answer": word} for word in WORDS[:num_examples]]

    def vowels(completion, **kwargs) -> float:
        text = str(completion[-1])
        return sum(letter in "aeiou" for letter in text) / len(text)

    async def has_word(completion, answer) -> float:
        return float(answer in (completion[-1].content or ""))

    rubric = vf.Rubric(funcs=[vowels, has_word], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), system_prompt="You write.", rubric=rubric)
