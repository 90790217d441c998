"""Health check of this machine's worker, by its own metrics, for container engines: `python -m worker.health`.

A worker is healthy if it swept the queue recently, which takes its threads and the database. The exit code is 0 or 1,
and the reason is printed. This module imports no other module of Rocket, because it is started often.
"""

import os
import re
import sys
import time
import urllib.request

MAX_AGE_SECONDS = 120.0
_TIMEOUT_SECONDS = 5.0
_LAST_SWEEP = re.compile(r"^rocket_last_sweep_timestamp_seconds (\S+)$", re.MULTILINE)
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # what to ask, not where to listen


def main() -> int:
    """Check the worker, and return the exit code."""
    port = os.environ.get("ROCKET_METRICS_PORT")
    if not port:
        return _say("set ROCKET_METRICS_PORT, for this command and for the worker", well=False)
    host = os.environ.get("ROCKET_METRICS_HOST") or "127.0.0.1"
    host = _LOOPBACKS.get(host, host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
    try:
        # Do not use a proxy named by the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=_TIMEOUT_SECONDS) as answer:
            body = answer.read().decode()
    except OSError as error:
        return _say(f"no answer at {address} ({type(error).__name__})", well=False)
    match = _LAST_SWEEP.search(body)
    if match is None:
        return _say(f"what answers at {address} is not a worker", well=False)
    age = time.time() - float(match[1])
    well = age <= MAX_AGE_SECONDS
    return _say(f"last sweep {age:.0f} seconds ago" if float(match[1]) else "no sweep yet", well=well)


def _say(what: str, *, well: bool) -> int:
    sys.stdout.write(f"{what}\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
