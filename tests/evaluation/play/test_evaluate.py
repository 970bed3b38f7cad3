"""Evaluation: policies and models play held-out tasks, into a folder that depends on the settings alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.catalog.plugin import BUNDLED
from agentgym.errors import AgentGymError, ConfigError, RunFolderError, TrainingHalted, UnknownName
from agentgym.evaluation import EvalConfig, EvalResult, eval_episodes, eval_tasks, evaluate, run_evaluation, verify_run
from agentgym.rollout.episode.history import CompactionConfig
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.sampler import Sampler
from agentgym.trajectory import Status, Trajectory

FLAKY = '''
from pathlib import Path

from agentgym.envs import TextEnv


class Flaky(TextEnv):
    """Raises for every third seed, as long as a file is there."""

    max_turns = 3
    runs_inline = True

    def reset(self, *, seed=None, options=None):
        self.broken = seed % 3 == 0 and Path(__file__).with_name("broken").exists()
        return "Say something.", {}

    def step(self, action):
        if self.broken:
            raise ValueError("the machine fell apart")
        return "Done.", 1.0, True, False, {}
'''


class Arena:
    """Evaluates with a tokenizer that is there in every checkout."""

    def __init__(self, folder: Path, tokenizer: Path, renderer: Renderer) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.renderer = renderer

    def config(self, **settings: object) -> EvalConfig:
        merged = {"env": "TextGame-v0", "policy": "oracle", "num_tasks": 4, "tokenizer": str(self.tokenizer)} | settings
        return EvalConfig(**merged)  # type: ignore[arg-type]

    def play(self, name: str = "run", *, resume: bool = False, **settings: object) -> EvalResult:
        return evaluate(self.config(**settings), output=self.folder / name, resume=resume)


@pytest.fixture(scope="module")
def renderer(tokenizer_folder: Path) -> Renderer:
    return renderer_for(tokenizer_folder)


@pytest.fixture
def arena(tmp_path: Path, tokenizer_folder: Path, renderer: Renderer) -> Arena:
    return Arena(tmp_path, tokenizer_folder, renderer)


@pytest.fixture
def flaky(tmp_path: Path) -> str:
    (tmp_path / "flaky.py").write_text(FLAKY, encoding="utf-8")
    (tmp_path / "broken").touch()
    return f"{tmp_path / 'flaky.py'}:Flaky"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    from agentgym.model.decoder import Decoder, DecoderConfig
    from agentgym.model.model_folder import save_model_folder

    folder = tmp_path_factory.mktemp("model")
    shape = DecoderConfig(
        family="qwen3",
        vocab_size=renderer_for(tokenizer_folder).vocab_size,
        width=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_width=16,
        ffn_width=32,
        context_window=4096,
        qk_norm=True,
    )
    save_model_folder(Decoder(shape).initialize(0), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer_folder / name).read_bytes())
    return folder


@pytest.mark.parametrize("env", BUNDLED)
@pytest.mark.parametrize(("policy", "success"), [("oracle", 1.0), ("cheat", 0.0)])
def test_oracles_win_cheats_lose_and_both_records_are_sound(
    env: str, policy: str, success: float, arena: Arena
) -> None:
    result = arena.play(env=env, policy=policy)
    stumbles = env == "LongRoad-v0" and policy == "cheat"  # which costs
    assert result.summary.success == success
    assert result.summary.mean_reward < 0 if stumbles else result.summary.mean_reward == success
    assert result.summary.num_episodes == 4 and result.summary.num_failed == 0
    report = verify_run(result.output, arena.renderer)
    assert report.ok, "\n".join(report.lines())


def test_the_tasks_are_held_out_and_always_the_same(arena: Arena) -> None:
    for seed in (0, 5):
        result = arena.play(f"seed-{seed}", seed=seed, num_tasks=2)
        assert [trajectory.task.seed for trajectory in result.trajectories] == [EVAL_SEED_START, EVAL_SEED_START + 1]


def test_repeats_of_a_random_policy_differ_and_the_number_of_workers_plays_no_role(arena: Arena) -> None:
    settings = {"policy": "random", "num_tasks": 3, "num_repeats": 3}
    alone = arena.play("alone", concurrency=1, **settings)
    many = arena.play("many", concurrency=16, **settings)
    first = [trajectory.rows[0].ids.tolist() for trajectory in alone.trajectories[:3]]
    assert first[0] != first[1] != first[2]
    assert (alone.output / "episodes.jsonl").read_bytes() == (many.output / "episodes.jsonl").read_bytes()


def test_another_seed_samples_another_play(arena: Arena) -> None:
    plays = [arena.play(f"{seed}", policy="random", seed=seed, num_tasks=2).trajectories for seed in (0, 1)]
    assert plays[0] != plays[1]


def test_a_killed_evaluation_goes_on_where_it_was_and_ends_the_same(arena: Arena) -> None:
    settings = {"policy": "random", "num_tasks": 4, "num_repeats": 2}
    whole = arena.play("whole", **settings)
    expected = (whole.output / "episodes.jsonl").read_bytes()
    killed = arena.folder / "killed"
    arena.play("killed", **settings)
    lines = expected.splitlines(keepends=True)
    (killed / "episodes.jsonl").write_bytes(lines[5] + lines[0] + lines[3][: len(lines[3]) // 2])
    (killed / "result.json").unlink()

    replayed: list[Trajectory] = []
    evaluate(arena.config(**settings), output=killed, resume=True, on_episode=replayed.append)
    assert len(replayed) == 6
    assert (killed / "episodes.jsonl").read_bytes() == expected
    assert json.loads((killed / "result.json").read_text())["num_episodes"] == 8


def test_resuming_plays_failed_episodes_again_and_nothing_else(arena: Arena, flaky: str) -> None:
    settings = {"env": flaky, "num_tasks": 6, "policy": "random"}
    result = arena.play(**settings)
    assert result.summary.failed == {"env_error": 2} and result.summary.num_episodes == 4
    failed = [trajectory for trajectory in result.trajectories if trajectory.status is Status.ENV_ERROR]
    assert all(
        trajectory.reward is None and "the machine fell apart" in (trajectory.error or "") for trajectory in failed
    )
    assert "the machine fell apart" in str(failed[0].info["traceback"])

    (arena.folder / "broken").unlink()
    replayed: list[Trajectory] = []
    again = evaluate(arena.config(**settings), output=result.output, resume=True, on_episode=replayed.append)
    assert {trajectory.task.seed for trajectory in replayed} == {trajectory.task.seed for trajectory in failed}
    assert again.summary.num_failed == 0 and again.summary.success == 1.0
    assert len((result.output / "episodes.jsonl").read_bytes().splitlines()) == 6


def test_an_environment_that_mostly_fails_stops_the_evaluation(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY.replace("% 3 == 0", "% 3 < 3"), encoding="utf-8")
    (tmp_path / "broken").touch()
    with pytest.raises(TrainingHalted, match="the machine fell apart"):
        arena.play(env=f"{tmp_path / 'flaky.py'}:Flaky", policy="random", num_tasks=20)


@pytest.mark.parametrize(
    ("setting", "value"), [("seed", 1), ("num_tasks", 5), ("policy", "random"), ("env_kwargs", {"level": 1})]
)
def test_a_resumed_evaluation_has_the_same_settings(setting: str, value: object, arena: Arena) -> None:
    arena.play(num_tasks=1)
    with pytest.raises(ConfigError, match=f"{setting} was .* and is now"):
        arena.play(resume=True, **{"num_tasks": 1, setting: value})


def test_a_folder_in_use_is_left_alone(arena: Arena) -> None:
    arena.play(num_tasks=1)
    with pytest.raises(RunFolderError, match="--resume"):
        arena.play(num_tasks=1)
    (arena.folder / "mine").mkdir()
    (arena.folder / "mine" / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match="name a new folder"):
        arena.play("mine", resume=True)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"env": "TextGme-v0"}, UnknownName, "did you mean 'TextGame-v0'"),
        ({"policy": "orcle"}, UnknownName, "did you mean 'oracle'"),
        ({"policy": "./no-such-model"}, UnknownName, "no model folder"),
        ({"env_kwargs": {"level": 77}}, ConfigError, "no level 77"),
        ({"tokenizer": "./no-such-folder"}, RunFolderError, "no-such-folder"),
    ],
)
def test_what_cannot_be_played_writes_nothing(
    settings: dict[str, object], error: type[AgentGymError], words: str, arena: Arena
) -> None:
    with pytest.raises(error, match=words):
        arena.play(**settings)
    assert not (arena.folder / "run").exists()


def test_a_folder_without_an_episode_is_free(arena: Arena) -> None:
    arena.play(num_tasks=1)
    run = arena.folder / "run"
    (run / "result.json").unlink()
    (run / "episodes.jsonl").write_bytes(b"")
    assert arena.play(num_tasks=2).summary.num_episodes == 2


def test_a_run_folder_given_as_a_model_names_its_newest_checkpoint(arena: Arena) -> None:
    for step in (5, 10):
        (arena.folder / "trained" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    with pytest.raises(RunFolderError, match=r"such as '.*step-000010'"):
        arena.play(policy=str(arena.folder / "trained"))


def test_a_device_that_is_not_there_is_named(model_folder: Path, arena: Arena) -> None:
    with pytest.raises(ConfigError, match="device 'abacus' cannot be used"):
        arena.play(policy=str(model_folder), env="GuessNumber-v0", num_tasks=1, device="abacus")


@pytest.mark.parametrize("setting", ["num_tasks", "num_repeats", "concurrency", "max_turns", "turn_tokens"])
def test_counts_are_at_least_one(setting: str, arena: Arena) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be at least 1"):
        arena.config(**{setting: 0})


def test_a_policy_plays_without_torch_and_without_a_trainer(arena: Arena) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom agentgym.evaluation import EvalConfig, evaluate\n"
        f"config = EvalConfig(env='TextGame-v0', policy='oracle', num_tasks=1, tokenizer={str(arena.tokenizer)!r})\n"
        f"evaluate(config, output={str(arena.folder / 'run')!r})\n"
        "print(*(name for name in sys.modules if name == 'torch' or name.startswith('agentgym.trainers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_evaluation_and_training_sample_the_same_replies(model_folder: Path, arena: Arena) -> None:
    from agentgym.engines.local.engine import LocalEngine
    from agentgym.model.model_folder import load_decoder

    result = arena.play(policy=str(model_folder), env="GuessNumber-v0", num_tasks=2, turn_tokens=12, seed=3)
    assert result.summary.num_episodes == 2
    assert verify_run(result.output, renderer_for(model_folder)).ok

    async def as_in_training() -> list[Trajectory]:
        engine = LocalEngine(load_decoder(model_folder))
        sampler = Sampler(RolloutLoop(engine, renderer_for(model_folder), Limits(turn_tokens=12)))
        try:
            episodes = eval_episodes(eval_tasks("GuessNumber-v0", 2), run_seed=3, phase="eval_before")
            return await run_evaluation(sampler, episodes)
        finally:
            sampler.close()
            await engine.close()

    trained = asyncio.run(as_in_training())
    assert [trajectory.rows[0].spans for trajectory in trained] == [
        trajectory.rows[0].spans for trajectory in result.trajectories
    ]


def test_the_settings_of_an_evaluation_name_its_history_and_its_chat_format(arena: Arena) -> None:
    arena.play(num_tasks=1, history="rerender")
    settings = yaml.safe_load((arena.folder / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert (settings["family"], settings["history"], settings["compaction"]["at"]) == ("hermes", "rerender", None)
    report = verify_run(arena.folder / "run", arena.renderer)
    assert report.ok, report.lines()
    with pytest.raises(UnknownName, match="hermes"):
        arena.play("other", family="hermse")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compaction": CompactionConfig(at=0.5)}, "is asked for no summary"),
        ({"policy": "http://localhost:1/v1", "compaction": CompactionConfig(at=0.5)}, "is asked for no summary"),
        ({"policy": "http://localhost:1/v1", "history": "rerender"}, "renders the history itself"),
        ({"policy": "http://localhost:1/v1", "family": "hermes"}, "has its own chat format"),
    ],
)
def test_a_history_that_cannot_be_had_is_refused(arena: Arena, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arena.config(**settings)
