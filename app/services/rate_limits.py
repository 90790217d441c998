"""Rate limits, counted in Redis if it is the broker, so that all replicas count together, else in this process.

A Redis that does not answer must not delay requests: after a short timeout, they are counted here for a while.
"""

import logging
import math
import time

import limits
import redis
from limits.storage import MemoryStorage, RedisStorage
from limits.strategies import FixedWindowRateLimiter
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.shared.errors import RateLimitedError
from app.shared.settings import Settings

_REDIS_SECONDS = 0.2
_PAUSE_SECONDS = 30.0
_PREFIX = "rocket:limits"
# Guessing a key is hopeless anyway; this limits the load it causes.
_FAILURES = limits.parse("30/minute")
_log = logging.getLogger(__name__)


class RateLimiter:
    """Rate limiter of requests.

    Args:
        settings: the rates, and the broker, which may be Redis.
    """

    def __init__(self, settings: Settings) -> None:
        self._requests = limits.parse(settings.rate_limit)
        self._submissions = limits.parse(settings.submit_rate_limit)
        self._here = FixedWindowRateLimiter(MemoryStorage())
        self._shared = _redis_limiter(settings.broker)
        self._shared_again_at = 0.0

    def count_request(self, who: str, *, is_submission: bool = False) -> None:
        """Count a request.

        Args:
            who: a tenant, or the address of an unauthenticated client.
            is_submission: whether it creates work for the service, which has a lower limit.

        Raises:
            RateLimitedError: the limit is exceeded.
        """
        self._count(self._requests, "requests", who)
        if is_submission:
            self._count(self._submissions, "submissions", who)

    def count_failure(self, address: str) -> None:
        """Count a request with an invalid key.

        Raises:
            RateLimitedError: there were too many from this address.
        """
        self._count(_FAILURES, "failures", address)

    def _count(self, rate: limits.RateLimitItem, kind: str, who: str) -> None:
        reset_at = self._hit(rate, kind, who)
        if reset_at is not None:
            wait = max(1, math.ceil(reset_at - time.time()))
            raise RateLimitedError(
                f"the rate limit of {rate} is exceeded; try again in {wait} seconds", retry_after=wait
            )

    def _hit(self, rate: limits.RateLimitItem, kind: str, who: str) -> float | None:
        """Count a request, and return when the next one is accepted; None if this one is."""
        if self._shared is not None and time.monotonic() >= self._shared_again_at:
            try:
                return _hit(self._shared, rate, kind, who)
            except redis.RedisError as error:
                self._shared_again_at = time.monotonic() + _PAUSE_SECONDS
                _log.warning("Redis is unavailable (%s); this process counts requests by itself", type(error).__name__)
        return _hit(self._here, rate, kind, who)


def _hit(limiter: FixedWindowRateLimiter, rate: limits.RateLimitItem, kind: str, who: str) -> float | None:
    return None if limiter.hit(rate, kind, who) else limiter.get_window_stats(rate, kind, who).reset_time


def _redis_limiter(broker: str) -> FixedWindowRateLimiter | None:
    if broker.startswith("memory://"):
        return None
    # The client's own retries would take seconds.
    pool = redis.ConnectionPool.from_url(
        broker, socket_timeout=_REDIS_SECONDS, socket_connect_timeout=_REDIS_SECONDS, retry=Retry(NoBackoff(), 0)
    )
    return FixedWindowRateLimiter(RedisStorage(broker, connection_pool=pool, key_prefix=_PREFIX))
