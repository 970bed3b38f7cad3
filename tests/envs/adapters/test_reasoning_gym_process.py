"""What the process that scores answers says of errors, with a library in place of reasoning-gym that raises them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.envs.adapters import reasoning_gym
from agentgym.envs.adapters.reasoning_gym import judge_answer, scored_beside
from agentgym.errors import EnvironmentFault
from agentgym.tools.line_process import LineProcess

LIBRARY = """
class Dataset:
    def score_answer(self, answer, entry):
        if answer == entry["answer"]:
            return 1.0
        raise eval(answer)

def create_dataset(dataset, **config):
    return Dataset()
"""


@pytest.fixture
def scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "reasoning_gym.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = LineProcess(Path(reasoning_gym.__file__).with_name("reasoning_gym_process.py"), "it did not start")
    monkeypatch.setattr(reasoning_gym, "_scorer", process)
    yield
    if process._running is not None:
        process._running.kill()


@pytest.mark.usefixtures("scorer")
def test_what_the_machine_raises_in_the_scorers_process_is_a_fault_and_no_zero() -> None:
    def score(answer: str) -> tuple[float, bool]:
        entry = {"answer": "right"}
        return judge_answer("sums", entry, answer, lambda text: scored_beside("sums", 0, {}, entry, text))

    assert score("right") == (1.0, False)
    for answer in ("ValueError('unreadable')", "MemoryError()", "OSError(12, 'Cannot allocate memory')"):
        assert score(answer) == (0.0, True)
    for answer in ("OSError(28, 'No space left on device')", "ConnectionRefusedError('gone')"):
        with pytest.raises(EnvironmentFault, match=r"the scorer of sums failed: \w+: .*(No space left|gone)"):
            score(answer)
