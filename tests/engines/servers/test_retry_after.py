"""A refusal says in a header, a field or its words how long to wait."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from agentgym.engines.servers.retry_after import retry_after_s

NOW = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "17"}, 17.0),
        ({"Retry-After": " 0.5 "}, 0.5),
        ({"Retry-After": "-3"}, 0.0),
        ({"Retry-After": "5, 10"}, 10.0),
        ({"retry-after-ms": "250", "Retry-After": "1"}, 0.25),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:38 GMT", "Date": NOW}, 38.0),
        ({"Retry-After": "Wednesday, 21-Oct-15 07:29:00 GMT", "Date": NOW}, 60.0),
        ({"Retry-After": "Wed Oct 21 07:28:05 2015", "Date": NOW}, 5.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:20:00 GMT", "Date": NOW}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_a_number_or_a_date_by_the_clock_of_the_server(
    headers: dict[str, str], seconds: float | None
) -> None:
    from multidict import CIMultiDict

    assert retry_after_s(CIMultiDict(headers)) == seconds


def test_a_date_without_the_clock_of_the_server_counts_from_now() -> None:
    wait_s = retry_after_s({"Retry-After": formatdate(time.time() + 90, usegmt=True)})
    assert wait_s is not None and 88 <= wait_s <= 90


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ("Please retry in 38.5s.", 38.5),
        ('{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "38s"}', 38.0),
        ("Rate limit reached for gpt-4o ... Please try again in 6m0s. Visit", 360.0),
        ("Please try again in 1m26.4s", 86.4),
        ("Please try again in 120ms.", 0.12),
        ("Please retry after 38 seconds.", 38.0),
        ("Please wait 2 minutes and retry", 120.0),
        ("Try again in 1 hour", 3600.0),
        ("Try again later. 5 models are busy.", None),
        ("You have reached 3 requests in 60s.", None),
        ("", None),
    ],
)
def test_the_words_of_a_refusal_count_without_a_header(body: str, seconds: float | None) -> None:
    assert retry_after_s({}, body) == (None if seconds is None else pytest.approx(seconds))
    assert retry_after_s({"Retry-After": "4"}, body) == 4.0
