"""What bfloat16 costs on a processor without products in it is said once."""

from __future__ import annotations

import pytest

from agentgym.embedded import embedded_folder
from agentgym.model.ops import cpu_products
from agentgym.model.policy import load_policy_on


@pytest.mark.parametrize(
    ("dtype", "is_fast", "num_warnings"), [("bfloat16", False, 1), ("bfloat16", True, 0), ("float32", False, 0)]
)
def test_bfloat16_is_warned_of_where_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: str, is_fast: bool, num_warnings: int
) -> None:
    monkeypatch.setattr(cpu_products, "has_bfloat16_products", lambda: is_fast)
    cpu_products.warn_of_slow_bfloat16.cache_clear()
    for _ in range(2):
        load_policy_on("cpu", embedded_folder(), dtype=dtype)
    assert len([record for record in caplog.records if "bfloat16" in record.message]) == num_warnings
    cpu_products.warn_of_slow_bfloat16.cache_clear()
