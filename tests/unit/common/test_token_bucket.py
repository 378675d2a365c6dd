"""A burst at once, then a rate; per key within bounded memory."""

from __future__ import annotations

import math

import pytest

from rankscope.common import token_bucket
from rankscope.common.token_bucket import KeyedTokenBuckets, TokenBucket


def test_after_a_burst_tokens_come_at_the_rate() -> None:
    bucket = TokenBucket(burst=3, per_second=2.0)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(100.4)
    assert bucket.take(100.5)
    assert bucket.available(1e6) == 3


def test_as_many_as_there_are_can_be_taken() -> None:
    bucket = TokenBucket(burst=5, per_second=1.0)
    assert bucket.take_up_to(0.0, 3) == 3
    assert bucket.take_up_to(0.0, 3) == 2
    bucket.spend(0.0)
    assert bucket.take_up_to(0.5, 3) == 0


def test_the_wait_for_a_token_is_known() -> None:
    bucket = TokenBucket(burst=1, per_second=0.5)
    assert bucket.wait_seconds(0.0) == 0.0
    bucket.spend(0.0)
    assert bucket.wait_seconds(0.0) == 2.0
    assert TokenBucket(burst=0, per_second=0.0).wait_seconds(0.0) == math.inf


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(burst=1, per_second=1.0)
    bucket.spend(10.0)
    assert not bucket.take(5.0)


def test_a_smaller_burst_applies_to_what_was_saved() -> None:
    bucket = TokenBucket(burst=100, per_second=1.0)
    bucket.burst = 2
    assert bucket.take_up_to(0.0, 50) == 2


def test_each_key_has_its_own_bucket() -> None:
    buckets = KeyedTokenBuckets(1, 0.0)
    assert buckets.take("one") and buckets.take("other") and not buckets.take("one")
    buckets.give_back("one")
    assert buckets.take("one")


def test_the_keys_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_bucket, "MAX_KEYS", 10)
    buckets = KeyedTokenBuckets(1, 0.0)
    for number in range(50):
        assert buckets.take(str(number))
    assert len(buckets._buckets) == 10
    assert not buckets.take("49")


def test_a_full_bucket_takes_no_memory() -> None:
    buckets = KeyedTokenBuckets(1, 1.0)
    buckets.take("one")
    buckets.give_back("one")
    assert not buckets._buckets
