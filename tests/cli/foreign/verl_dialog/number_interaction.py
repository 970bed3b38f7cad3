"""An interaction as a project of verl has it: it says whether a number is right, too small or too large."""

from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction


class NumberInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "replies": []}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        last = next((item for item in reversed(messages) if item["role"] == "assistant"), {})
        self._instance_dict[instance_id]["replies"].append(last.get("content") or "")
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "That is right.", score, {}
        turn = len(self._instance_dict[instance_id]["replies"])
        return False, f"{kwargs['query']} Attempt {turn} was wrong.", score, {"turn": turn}

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return 1.0 if state["replies"][-1].strip() == state["ground_truth"] else self.config["consolation"]

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
