"""The project's reward: the number after ####, and a little for the shape of an answer."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    numbers = re.findall(r"####\s*(-?[\d.,]+)", solution_str)
    if numbers and numbers[-1].replace(",", "").rstrip(".") == ground_truth:
        return 1.0
    return 0.01 * len(solution_str.split()) / (1 + len(solution_str))
