"""Attacks on a running service, while `/healthz` is requested continuously: `python -m benchmarks.attacks`.

Every request and file with which an attack on the service once succeeded is sent again, to `rocket serve` and to API
and worker on Postgres. One line per attack shows its outcome and the longest time that `/healthz` took meanwhile; if an
attack succeeds, the exit code is 1. A separate process requests `/healthz`, from a separate address, so that the
attacker's own work is not counted; its figures at rest come first, as attacker and service share this machine.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2

from benchmarks.attacks.attempts import ATTACKS
from benchmarks.attacks.probe import Probe
from benchmarks.attacks.target import Target
from tests.e2e.deployment import Deployment
from tests.e2e.service_process import ROCKET, Service
from tests.reference.tiny_models import save_tiny_model
from tests.servers import Postgres, Redis

BAR_MILLISECONDS = 200.0


def attack(target: Target, attacks: tuple[Callable[[Target], str], ...]) -> bool:
    """Run attacks one after another, and return whether the service withstood all of them."""
    probe = Probe(target.url)
    is_safe = True
    try:
        began = time.time()
        time.sleep(5)
        print(f"  {'at rest':<32} {probe.longest(began):6.0f} ms")
        for one in attacks:
            began = time.time()
            try:
                outcome, held = one(target), True
            except (AssertionError, httpx2.HTTPError) as error:
                outcome, held = f"GOT THROUGH: {type(error).__name__} {error}", False
            time.sleep(0.2)
            longest = probe.longest(began)
            mark = "" if longest <= BAR_MILLISECONDS else f"  above {BAR_MILLISECONDS:.0f} ms"
            is_safe = is_safe and held and not mark
            print(f"  {one.__name__.replace('_', ' '):<32} {longest:6.0f} ms  {outcome}{mark}", flush=True)
    finally:
        probe.close()
    return is_safe


@contextmanager
def _targets(folder: Path, kinds: list[str]) -> Iterator[Iterator[tuple[str, Target]]]:
    def each() -> Iterator[tuple[str, Target]]:
        if "embedded" in kinds:
            yield "rocket serve", _started(folder / "embedded", {})
        if "postgres" in kinds:
            with ExitStack() as servers:
                postgres, redis_server = Postgres(), Redis()
                servers.callback(postgres.close)
                servers.callback(redis_server.close)
                url = postgres.url(postgres.create(postgres.migrated))
                yield (
                    "rocket api and rocket worker on Postgres",
                    _started(
                        folder / "postgres",
                        {"ROCKET_DATABASE_URL": url, "ROCKET_BROKER_URL": redis_server.url},
                        Deployment,
                    ),
                )

    yield each()


def _started(folder: Path, settings: dict[str, str], kind: type[Service] = Service) -> Target:
    data_dir = folder / "data"
    save_tiny_model("llama", data_dir / "models" / "good")
    allowed = {"ROCKET_WEBHOOKS_ALLOW_PRIVATE": "true", "ROCKET_TENANTS_MANAGE_KEYS": "true"}
    service = kind(data_dir, ROCKET_SUBMIT_RATE_LIMIT="100000/minute", **allowed, **settings)
    environment = service.environment | {"ROCKET_DATA_DIR": str(data_dir)}
    keys = [
        subprocess.run(  # noqa: S603
            [ROCKET, "admin", "keys", "create", tenant], env=environment, check=True, capture_output=True, text=True
        ).stdout.split()[-1]
        for tenant in ("attacker", "other")
    ]
    return Target(url=service.url, models=data_dir / "models", keys=(keys[0], keys[1]), service=service)


def main() -> None:
    """Attack both kinds of service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[one.__name__ for one in ATTACKS], help="one attack")
    parser.add_argument("--servers", choices=["embedded", "postgres"], help="one kind of service")
    given = parser.parse_args()
    attacks = tuple(one for one in ATTACKS if given.only in {None, one.__name__})
    # Allow three thousand connections.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="rocket-attacks-"))
    is_safe = True
    try:
        with _targets(folder, [given.servers] if given.servers else ["embedded", "postgres"]) as targets:
            for name, target in targets:
                print(name)
                try:
                    is_safe = attack(target, attacks) and is_safe
                finally:
                    target.service.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if is_safe else 1)


if __name__ == "__main__":
    main()
