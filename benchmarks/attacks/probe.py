"""Response times of `/healthz` while a service is under attack."""

import subprocess
import sys
import threading
from urllib.parse import urlsplit

# From a different address than the attacks, because the service may close idle connections of the attacker's address.
_PROBE = """
import http.client, sys, time
address, port = sys.argv[1].rsplit(":", 1)
while True:
    began = time.perf_counter()
    connection = http.client.HTTPConnection(address, int(port), timeout=30, source_address=("127.0.0.2", 0))
    try:
        connection.request("GET", "/healthz")
        failed = connection.getresponse().status != 200
    except (OSError, http.client.HTTPException) as error:
        print(f"/healthz: {error!r}", file=sys.stderr)
        failed = True
    finally:
        connection.close()
    took = float("inf") if failed else 1000 * (time.perf_counter() - began)
    print(f"{time.time()} {took}", flush=True)
    time.sleep(0.02)
"""


class Probe:
    """A separate process that requests `/healthz` continuously.

    Args:
        url: address of the service.
    """

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-c", _PROBE, urlsplit(url).netloc]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self._seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def longest(self, since: float) -> float:
        """Return the milliseconds of the slowest answer since a time."""
        return max((took for at, took in self._seen if at >= since), default=float("inf"))

    def close(self) -> None:
        """Stop the process."""
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                at, took = line.split()
                self._seen.append((float(at), float(took)))
