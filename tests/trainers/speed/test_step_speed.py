"""The speed of a step from its seconds and its work; the device's peak; the page that lists every number."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
import torch

from agentgym.engines.protocol import WeightSync
from agentgym.errors import ConfigError
from agentgym.trainers.learner.critic import CriticStats
from agentgym.trainers.learner.router_stats import RouterStats
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.monitoring.metrics import EvalScore, RolloutSummary, StepMetrics
from agentgym.trainers.settings.speed import SpeedConfig
from agentgym.trainers.speed import peak
from agentgym.trainers.speed.clock import StepTimes
from agentgym.trainers.speed.memory import peak_gpu_memory_mb, peak_memory_mb
from agentgym.trainers.speed.peak import peak_flops
from agentgym.trainers.speed.step_speed import StepSpeed
from agentgym.trainers.speed.work import UpdateWork

TIMES = StepTimes(step_s=10, generate_s=5, learn_s=4, sync_s=0.5, rest_s=0.5, sampling_s=5, idle_s=2)
WORK = UpdateWork(trained_tokens=800, padded_tokens=600, packed_tokens=300, computed_tokens=100, flops=2e9)


def test_rates_shares_and_gains_by_hand() -> None:
    speed = StepSpeed.of(TIMES, 1000, WORK, 1e9)
    assert (speed.sampled_tokens_per_s, speed.trained_tokens_per_s) == (200, 200)
    assert (speed.generate_share, speed.learn_share, speed.sync_share, speed.rest_share) == (0.5, 0.4, 0.05, 0.05)
    assert (speed.bubble, speed.mfu) == (0.2, 0.5)
    assert (speed.padding_gain, speed.sharing_gain) == (2, 3)


def test_a_step_without_an_update_or_a_known_peak_has_no_speed() -> None:
    speed = StepSpeed.of(TIMES, 1000, None, 1e9)
    assert speed.trained_tokens_per_s is speed.mfu is speed.padding_gain is speed.computed_tokens is None
    assert StepSpeed.of(TIMES, 1000, WORK, None).mfu is None


def test_the_peak_of_a_cpu_is_measured_and_grows_with_threads_of_work() -> None:
    flops = peak_flops(torch.device("cpu"), torch.float32, 1)
    assert flops is not None and 1e8 < flops < 1e13  # a slow core under load, and more than any has


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.float32, 91.6),
        ("NVIDIA L40", torch.bfloat16, None),
        ("NVIDIA GB200", torch.bfloat16, None),
    ],
)
def test_a_gpu_that_is_known_by_its_name_has_the_vendors_figure(
    name: str, dtype: torch.dtype, tflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak.torch.cuda, "get_device_name", lambda device: name)
    flops = peak_flops(torch.device("cuda"), dtype, 1)
    assert flops == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_peak_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"speed\.peak_tflops must be above 0"):
        SpeedConfig(peak_tflops=0.0)


def test_the_process_has_had_at_least_what_it_just_held() -> None:
    before = peak_memory_mb()
    below_peak = max(0, int(before * 2**20) - psutil.Process().memory_info().rss)
    tensor = torch.ones((256 * 2**20 + below_peak) // 4)
    assert peak_memory_mb() >= before + 32
    assert len(tensor) and (peak_gpu_memory_mb() is None or torch.cuda.is_available())


def test_the_page_of_metrics_lists_exactly_what_a_line_may_have() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text().partition("## What was played")[2]
    listed = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    router = RouterStats(**{field.name: 0 for field in fields(RouterStats)})
    metrics = StepMetrics(
        step=1,
        rollout=RolloutSummary(**{field.name: 0 for field in fields(RolloutSummary)}),
        update=StepStats(**{field.name: 0 for field in fields(StepStats)} | {"router": router}),
        critic=CriticStats(**{field.name: 0 for field in fields(CriticStats)}),
        sync=WeightSync(version=1),
        generate_s=0,
        update_s=0,
        elapsed_s=0,
        speed=StepSpeed.of(TIMES, 1000, WORK, 1e9),
        held_out=EvalScore(step=0, success=0.0, reward_mean=0.0, episodes=0, failed=0),
    )
    assert sorted(listed) == sorted([*metrics.to_json(), "chain"])  # the chain is made where a line is written
