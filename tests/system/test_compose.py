"""The container stack, checked without a container engine: by Compose's own parser, by the settings that a
process would read, and by the commands that it would parse."""

import os
import re
import secrets
import shutil
import subprocess
import tomllib
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
import typer
import yaml

from app.shared.database import upgrade
from app.shared.settings import Settings, describe, load_settings
from requirements.pin_images import default_images
from rocket_cli.main import app
from tests.worker.waiting import eventually
from worker import health
from worker.main import Worker
from worker.processes.isolation import COMPUTE_USER

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")

OURS = {"api": "api", "migrate": "api", "worker": "worker", "worker-gpu": "worker"}
"""Our services, with the Dockerfile target of each."""
WORKERS = {"worker", "worker-gpu"}
LASTING = {"api", "worker", "worker-gpu", "postgres", "redis"}
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|ACCESS_KEY|DATABASE_URL")


@pytest.fixture(scope="module")
def compose(tmp_path_factory):
    """Run `docker-compose` on a copy of the file, with an `.env` of these variables."""
    program = shutil.which("docker-compose")
    assert program, "this test needs docker-compose: apt-get install docker-compose"

    def compose(env, *arguments):
        folder = tmp_path_factory.mktemp("stack")
        shutil.copy(ROOT / "docker-compose.yml", folder)
        lines = [f"{name}={value}" for name, value in env.items()]
        (folder / ".env").write_text("\n".join(lines), encoding="utf-8")
        # Nothing from this machine's environment is interpolated.
        return subprocess.run(
            [program, *arguments],
            cwd=folder,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)},
            check=False,
            capture_output=True,
            text=True,
            timeout=180,
        )

    return compose


@pytest.fixture(scope="module")
def canaries():
    return {
        "POSTGRES_PASSWORD": secrets.token_hex(12),
        "ROCKET_SECRET_KEY": urlsafe_b64encode(secrets.token_bytes(32)).decode(),
    }


@pytest.fixture(scope="module")
def stack(compose, canaries):
    """Return the file as Compose interprets it."""
    result = compose(canaries, "--profile", "gpu", "config")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return yaml.safe_load(result.stdout)


@pytest.fixture(scope="module")
def services(stack):
    return stack["services"]


def byte_count(text):
    """Return the bytes that Compose reads in a size such as 512m."""
    number, unit = re.fullmatch(r"(\d+)([kmg]?)b?", text).groups()
    return int(number) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[unit]


def seconds(text):
    units = {"s": 1, "m": 60, "h": 3600}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([smh])", text))


def test_compose_accepts_the_file_without_the_profile(compose, canaries):
    result = compose(canaries, "config", "--quiet")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("missing", ["POSTGRES_PASSWORD", "ROCKET_SECRET_KEY"])
def test_compose_names_the_missing_secret(compose, canaries, missing):
    result = compose({name: "" if name == missing else value for name, value in canaries.items()}, "config")
    assert result.returncode != 0
    assert "into .env, see .env.example" in result.stderr


def test_the_services_match_the_readme(services):
    assert set(services) == LASTING | {"migrate"}
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    assert all("profiles" not in service for name, service in services.items() if name != "worker-gpu")


def test_only_lasting_services_are_checked_and_restarted(services):
    for name in LASTING:
        check = services[name]["healthcheck"]
        assert check["test"][0] == "CMD", name
        assert seconds(check["timeout"]) <= seconds(check["interval"]), name
        assert services[name]["restart"] == "unless-stopped"
    assert services["migrate"]["restart"] == "no"
    assert "healthcheck" not in services["migrate"]


def test_no_process_is_root_or_can_become_root(services):
    for name, service in services.items():
        if name not in WORKERS:
            assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name
            assert "cap_add" not in service, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["cap_drop"] == ["ALL"], name
        assert not {"privileged", "devices", "pid", "ipc", "network_mode"} & set(service), name
    uid = re.search(r"--uid (\d+) --gid (\d+)", DOCKERFILE)
    assert f"USER {uid[1]}:{uid[2]}" in DOCKERFILE
    assert "--shell /usr/sbin/nologin rocket" in DOCKERFILE
    # The images lack programs that switch users or install something.
    assert "find / -xdev -type f -perm /6000 -exec chmod a-s" in DOCKERFILE
    assert "pip uninstall --yes --root-user-action=ignore pip" in DOCKERFILE
    for name in OURS.keys() - WORKERS:
        assert services[name]["user"] == f"{uid[1]}:{uid[2]}"
    # A new volume takes the owner of the image's folder at its mount point.
    [folders] = re.findall(
        rf"install --directory --owner={uid[1]} --group={uid[2]} (.*?)(?: \\)?$", DOCKERFILE, flags=re.M
    )
    assert set(folders.split()) == {volume.split(":")[1] for volume in services["api"]["volumes"]}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_workers_are_no_root_and_may_only_change_user(services):
    before = ["setpriv", "--bounding-set=-all,+setuid,+setgid,+kill", "--no-new-privs"]
    for name in WORKERS:
        assert services[name]["user"] == "0:0"
        assert services[name]["cap_add"] == ["SETUID", "SETGID", "KILL"]
        command = [*before, *services[name]["entrypoint"], "cat", "/proc/self/status"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        status = dict(line.split(":\t", 1) for line in result.stdout.splitlines())
        assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
        assert status["Groups"].split() == [str(COMPUTE_USER)]
        # KILL, SETGID and SETUID.
        assert {int(status[kind], 16) for kind in ("CapPrm", "CapEff", "CapAmb", "CapBnd")} == {0b11100000}
        assert services[name]["environment"]["ROCKET_ISOLATION"] == "container"
    assert services["api"]["group_add"] == [str(COMPUTE_USER)]
    assert f"--uid {COMPUTE_USER} --gid {COMPUTE_USER}" in DOCKERFILE


def test_containers_are_read_only_except_volumes_and_tmpfs(services):
    writable = {"api": "data:/data", "migrate": "data:/data", "worker": "data:/data", "worker-gpu": "data:/data"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        volumes = [volume for volume in service.get("volumes", ()) if not volume.endswith(":ro")]
        expected = writable.get(name, "postgres:/var/lib/postgresql/data" if name == "postgres" else None)
        assert volumes == ([f"{expected}:rw"] if expected else []), name
        for mount in service["tmpfs"]:
            [size] = re.findall(r"[:,]size=(\w+)", mount)
            assert byte_count(size) <= 512 * 2**20, (name, mount)
            # A folder that another user of the container could not otherwise use.
            assert re.search(r"mode=1777|uid=\d+,gid=\d+", mount), (name, mount)


def test_every_container_has_limits(services):
    for name, service in services.items():
        assert 0 < byte_count(service["mem_limit"]) <= 16 * 2**30, name
        # Otherwise the same amount of swap could be used in addition.
        assert service["memswap_limit"] == service["mem_limit"], name
        assert 0 < service["pids_limit"] <= 2048, name
        assert service["init"] is True, name
        temporary = sum(byte_count(re.findall(r"size=(\w+)", mount)[0]) for mount in service["tmpfs"])
        assert temporary + byte_count(service.get("shm_size", "64m")) < byte_count(service["mem_limit"]), name


def test_redis_refuses_writes_before_its_container_is_killed(services):
    command = services["redis"]["command"]
    most = byte_count(command[command.index("--maxmemory") + 1])
    assert most < 0.9 * byte_count(services["redis"]["mem_limit"])


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("WORKER_MEMORY", {"worker", "worker-gpu"}),
        ("API_MEMORY", {"api", "migrate"}),
        ("POSTGRES_MEMORY", {"postgres"}),
    ],
)
def test_memory_limits_can_be_set_in_the_environment_file(compose, canaries, variable, names):
    result = compose({**canaries, variable: "12345m"}, "--profile", "gpu", "config")
    for name, service in yaml.safe_load(result.stdout)["services"].items():
        assert (service["mem_limit"] == service["memswap_limit"] == "12345m") == (name in names), name


def test_third_party_images_can_be_pinned_by_digest(compose, canaries):
    digest = "@sha256:" + "ab" * 32
    pinned = {name: f"{image}{digest}" for name, image in default_images().items()}
    services = yaml.safe_load(compose({**canaries, **pinned}, "--profile", "gpu", "config").stdout)["services"]
    used = {
        service["image"] for service in services.values() if "build" not in service and service["image"] != "rocket-api"
    }
    assert used == {pinned["POSTGRES_IMAGE"], pinned["REDIS_IMAGE"]}
    built = [service["build"] for service in services.values() if "build" in service]
    assert {build["args"]["PYTHON_IMAGE"] for build in built} == {pinned["PYTHON_IMAGE"]}
    # No other image is named anywhere.
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)) == {
        "${PYTHON_IMAGE}", "packages", "runtime"
    }  # fmt: skip


def test_all_data_is_on_named_volumes(stack, services):
    named = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())}
    assert named == set(stack["volumes"]) == {"postgres", "data", "models", "datasets"}
    assert services["postgres"]["volumes"] == ["postgres:/var/lib/postgresql/data:rw"]


def test_services_start_after_what_they_need(services):
    for name in ("api", "worker", "worker-gpu"):
        assert services[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}
    for name in OURS:
        assert services[name]["depends_on"]["postgres"] == {"condition": "service_healthy"}
        # Without a broker jobs start a second later.
        assert "redis" not in services[name]["depends_on"]


def test_only_the_api_is_reachable_and_only_locally_by_default(services):
    assert services["api"]["ports"] == ["127.0.0.1:8000:8000/tcp"]
    assert all("ports" not in service for name, service in services.items() if name != "api")
    for name in ("postgres", "redis"):
        assert set(services[name]["networks"]) == {"backend"}


def test_the_backend_network_is_internal(stack):
    assert stack["networks"]["backend"] == {"internal": True}


def test_the_file_contains_no_secret(services, canaries):
    for name, service in services.items():
        for variable, value in service["environment"].items() if "environment" in service else ():
            assert not SECRET.search(variable) or any(canary in value for canary in canaries.values()), (name, variable)
        assert not SECRET.search(" ".join(service.get("command", ()))), name
    given = dict(line.split("=", 1) for line in EXAMPLE.splitlines() if line and not line.startswith("#"))
    assert given == dict.fromkeys(canaries, "")
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "/.env" in ignored


@pytest.mark.parametrize("name", OURS)
def test_each_rocket_process_accepts_its_settings(services, monkeypatch, name):
    environment = services[name]["environment"]
    known = {row.variable for row in describe()}
    assert {variable for variable in environment if variable.startswith("ROCKET_")} <= known
    for variable in known:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    settings = load_settings()
    assert (settings.database.get_backend_name(), settings.database.host) == ("postgresql", "postgres")
    assert settings.broker.startswith("redis://redis")
    assert settings.log_format == "json"
    mounted = {volume.split(":")[1] for volume in services[name]["volumes"]}
    assert {str(settings.data_dir), str(settings.models_folder), str(settings.datasets_folder)} == mounted
    assert (settings.metrics_port is not None) == name.startswith("worker")


def test_every_example_variable_is_a_setting_or_used_by_compose():
    offered = set(re.findall(r"^#?([A-Z][A-Z0-9_]*)=", EXAMPLE, flags=re.MULTILINE))
    used = set(re.findall(r"\$\{([A-Z0-9_]+)", COMPOSE))
    settings = {row.variable for row in describe()}
    assert {name for name in offered if not name.startswith("AWS_")} <= used | settings
    assert used - settings <= offered


def test_operator_settings_reach_every_rocket_process(compose, canaries):
    result = compose({**canaries, "ROCKET_MAX_ATTEMPTS": "7"}, "--profile", "gpu", "config")
    for name, service in yaml.safe_load(result.stdout)["services"].items():
        assert (service.get("environment", {}).get("ROCKET_MAX_ATTEMPTS") == "7") == (name in OURS), name


@pytest.mark.parametrize("name", OURS)
def test_each_command_and_its_options_exist(services, name):
    program, command, *options = services[name]["command"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts[program] == "rocket_cli.main:main"
    found = typer.main.get_command(app).commands[command]
    # Parses the command, and refuses unknown options, but does nothing.
    found.make_context(command, options)


def test_the_default_commands_of_the_images_exist():
    commands = typer.main.get_command(app).commands
    for line in re.findall(r"^CMD (.*)$", DOCKERFILE, flags=re.MULTILINE):
        program, command, *options = yaml.safe_load(line)
        assert program == "rocket"
        commands[command].make_context(command, options)


def test_a_worker_has_time_to_release_its_job(services):
    needed = Settings().cancel_grace_seconds + 10
    assert seconds(services["worker"]["stop_grace_period"]) > needed
    assert seconds(services["worker-gpu"]["stop_grace_period"]) > needed


def test_the_health_check_of_a_worker_works(services, monkeypatch, tmp_path):

    [_, python, flag, module] = services["worker"]["healthcheck"]["test"]
    assert (python, flag, module) == ("python", "-m", health.__name__)
    settings = Settings(data_dir=tmp_path / "data", metrics_port=0, poll_seconds=0.05)
    upgrade(settings.database)
    running = Worker(settings)
    running.start()
    try:
        monkeypatch.setenv("ROCKET_METRICS_PORT", str(running._metrics_server.port))
        monkeypatch.setenv("ROCKET_METRICS_HOST", services["worker"]["environment"]["ROCKET_METRICS_HOST"])
        eventually(lambda: health.main() == 0, within=20)
    finally:
        running.stop()
    assert health.main() == 1


def test_a_gpu_worker_has_exactly_one_gpu(services):
    [device] = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], len(device["device_ids"]), device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert "deploy" not in services["worker"]


def test_each_image_is_built_once_from_its_target(services):
    built = {service["image"]: service["build"]["target"] for service in services.values() if "build" in service}
    locks = {services[name]["build"]["args"]["TORCH_LOCK"] for name in ("worker", "worker-gpu")}
    assert locks == {"torch.txt"}
    assert built == {"rocket-api": "api", "rocket-worker": "worker", "rocket-worker-gpu": "worker"}
    for name, target in OURS.items():
        assert built[services[name]["image"]] == target
    assert len([service for service in services.values() if "build" in service]) == len(built)
    assert {services[name]["build"]["args"]["TORCH_INDEX"] for name in ("worker", "worker-gpu")} == {""}
    assert "ARG TORCH_INDEX=\n" in DOCKERFILE


def stage(target):
    """Return the lines of the Dockerfile stage that an image's packages come from."""
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, flags=re.MULTILINE | re.DOTALL))
    [source] = re.findall(r"COPY --from=(\S+) /opt/rocket", stages[target])
    return stages[source]


@pytest.mark.parametrize(
    ("target", "locks"),
    [
        ("api", ["requirements/api.txt"]),
        ("worker", ['"requirements/$TORCH_LOCK"', "requirements/build.txt", "requirements/worker.txt"]),
    ],
)
def test_the_images_install_only_locked_packages_with_hashes(target, locks):
    lines = re.findall(r"^RUN (pip .*)$", stage(target), flags=re.MULTILINE)
    *packages, project = lines
    assert [line.split(" -r ")[1] for line in packages] == locks
    for line in packages:
        assert "--require-hashes --no-deps" in line
        # Source packages are built with what is installed, so that the build downloads nothing.
        assert "--only-binary :all:" in line or "--no-build-isolation" in line
    assert project.endswith("install --no-deps --no-index /dist/*.whl")
    assert "ARG TORCH_LOCK=torch.txt\n" in DOCKERFILE
    # Outside these stages pip installs only what builds the project.
    others = set(re.findall(r"^RUN (pip .*)$", DOCKERFILE, flags=re.MULTILINE)) - {
        *lines,
        *re.findall(r"^RUN (pip .*)$", stage("api") + stage("worker"), flags=re.MULTILINE),
    }
    assert {line.split()[1] for line in others} == {"install", "wheel"}
    assert all("--require-hashes" in line or "--no-index --no-build-isolation" in line for line in others)


def test_the_images_have_exactly_the_distributed_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, flags=re.MULTILINE))
    assert copied == packages | {"requirements"}
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignore[1] == "*"
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    files = re.findall(r"^COPY (pyproject.*) \./$", DOCKERFILE, flags=re.MULTILINE)[0].split()
    assert let_in == packages | {"requirements"} | set(files)
    assert {"LICENSE", "NOTICE"} <= set(files)
    assert all((ROOT / name).exists() for name in let_in)
