"""Processes that read models, well-behaved and hostile; all are real."""

import logging
import os
import signal
import struct
import threading
import time

import psutil
import pytest

from app.services import admission
from app.services.judgement import check_model_size
from app.services.questions import _KINDS, Answer, Refusal
from app.shared.confinement import supported
from app.shared.errors import BusyError, OverQuotaError, RateLimitedError
from app.shared.fork_server import ForkServer
from app.shared.repositories.tenants import Quotas
from app.shared.requests import JobRequest
from rocket_core.errors import (
    HubUnavailableError,
    InfeasibleBudgetError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)
from rocket_core.inspection.headers.weight_summary import WeightSummary
from tests.reference.safetensors_files import save_llama

REQUEST = JobRequest(model_id="local/tiny", ratio=0.3)
ON_THE_HUB = JobRequest(model_id="org/model", ratio=0.3)
NO_LIMITS = Quotas()


@pytest.fixture
def judges(settings):
    return admission.Admission(settings)


@pytest.fixture
def hostile(monkeypatch):
    """Return a function that replaces the judging process by another one."""
    made = []

    def choose(name, **environment):
        server = ForkServer(
            f"tests.reference.hostile_judges:{name}",
            preload=("app.services.judge_process",),
            environment=admission._environment() | environment,
        )
        made.append(server)
        monkeypatch.setattr(admission, "_processes", server)

    yield choose
    for server in made:
        server.close()


def children_of(server):
    return psutil.Process(server.pid).children()


def test_a_request_is_judged_in_a_process_that_ends(judges):
    assert judges.admit("one", REQUEST, NO_LIMITS) == ()
    assert judges.estimate("one", REQUEST, NO_LIMITS).figures.parameters > 0
    end = time.monotonic() + 20
    while children_of(admission._processes) and time.monotonic() < end:
        time.sleep(0.02)
    assert children_of(admission._processes) == []


def test_a_model_is_read_later_if_no_process_can_be_forked(judges, monkeypatch):
    server = ForkServer(
        "tests.reference.hostile_judges:exits",
        preload=("tests.reference.forked_unprivileged",),
        environment=admission._environment(),
    )
    monkeypatch.setattr(admission, "_processes", server)
    try:
        with pytest.raises(UnsupportedArchitectureError):
            judges.admit("one", REQUEST, NO_LIMITS)
        template = server.pid
        os.kill(template, signal.SIGUSR1)
        with pytest.raises(BusyError):
            judges.admit("one", REQUEST, NO_LIMITS)
        os.kill(template, signal.SIGUSR2)
        with pytest.raises(UnsupportedArchitectureError):
            judges.admit("one", REQUEST, NO_LIMITS)
        assert server.pid == template
    finally:
        server.close()


def test_the_template_imports_only_what_it_needs(judges):
    judges.admit("one", REQUEST, NO_LIMITS)
    mapped = {line.path for line in psutil.Process(admission._processes.pid).memory_maps()}
    assert not [path for path in mapped if any(name in path for name in ("torch", "sqlalchemy", "numpy", "psycopg"))]
    assert psutil.Process(admission._processes.pid).num_threads() == 1


@pytest.mark.parametrize(
    "name",
    [
        "dies",
        "exits",
        "exits_at_once",
        "writes_endlessly",
        "speaks_no_json",
        "names_no_error",
        "names_a_base_error",
        "sends_more",
        "sends_a_long_message",
        "sends_a_figure_that_is_none",
        "sends_a_huge_number",
        "forges_a_log_line",
    ],
)
def test_a_compromised_process_can_only_refuse_its_own_model(judges, hostile, name, caplog):
    hostile(name)
    with caplog.at_level(logging.WARNING), pytest.raises(UnsupportedArchitectureError, match="takes too much memory"):
        judges.estimate("one", REQUEST, NO_LIMITS)
    assert "forged" not in caplog.text
    assert caplog.records


def test_what_a_process_prints_is_not_in_the_log(judges, hostile, capfd):
    hostile("prints_a_log_line")
    with pytest.raises(UnsupportedArchitectureError, match="cannot be understood"):
        judges.admit("one", REQUEST, NO_LIMITS)
    assert "forged" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["hangs", "never_reads", "drips"])
@pytest.mark.parametrize(
    ("request_", "kind"), [(REQUEST, UnsupportedArchitectureError), (ON_THE_HUB, HubUnavailableError)]
)
def test_a_process_that_takes_too_long_is_killed(judges, hostile, monkeypatch, name, request_, kind):
    monkeypatch.setattr(admission, "_READ_SECONDS", 0.2)
    monkeypatch.setattr(admission, "_HUB_SECONDS", 0.2)
    hostile(name)
    started = time.monotonic()
    with pytest.raises(kind):
        judges.admit("one", request_, NO_LIMITS)
    assert time.monotonic() - started < 30
    end = time.monotonic() + 20
    while children_of(admission._processes) and time.monotonic() < end:
        time.sleep(0.02)
    assert children_of(admission._processes) == []


@pytest.mark.skipif(not supported().files, reason="this kernel has no Landlock")
def test_a_compromised_process_finds_no_secret(settings, hostile, monkeypatch):
    monkeypatch.setenv("ROCKET_SECRET_KEY", "of-the-service")
    monkeypatch.setenv("HF_TOKEN", "of-the-operator")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-store")
    secret = settings.datasets_folder / "secret.txt"
    secret.write_text("of-the-folder")
    hostile("reports_secrets", LC_API_PID=str(os.getpid()))
    request = REQUEST.model_copy(
        update={"calibration": REQUEST.calibration.model_copy(update={"dataset": "local/secret.txt"})}
    )
    with pytest.raises(Exception, match="PermissionError") as told:
        admission.Admission(settings).admit("one", request, NO_LIMITS)
    assert str(told.value).count("PermissionError") == 3
    for name in ("ROCKET_", "AWS_", "of-the-", "HF_TOKEN "):
        assert name not in str(told.value)


def test_files_that_need_too_much_memory_are_refused(judges, hostile, settings):
    hostile("has_little_memory")
    folder = save_llama(settings.models_folder / "large")
    assert judges.admit("one", REQUEST.model_copy(update={"model_id": "local/large"}), NO_LIMITS) == ()
    header = b'{"__metadata__": [' + b",".join([b"[]"] * 7_000_000) + b"]}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UnsupportedArchitectureError, match="too much memory"):
        judges.admit("one", REQUEST.model_copy(update={"model_id": "local/large"}), NO_LIMITS)


def test_an_unexpected_error_is_not_an_error_of_the_service(judges, hostile, caplog):
    hostile("meets_a_bug")
    with pytest.raises(UnsupportedArchitectureError, match=r"cannot be understood \(KeyError\)"):
        judges.admit("one", REQUEST, NO_LIMITS)
    # For the operator, without the content of the files.
    assert "KeyError app.services.judge_process:" in caplog.text
    assert "a stranger's word" not in caplog.text


def test_a_template_that_cannot_start_makes_clients_retry(judges, monkeypatch, caplog):
    broken = ForkServer("tests.reference.hostile_judges:not_there", environment=admission._environment())
    monkeypatch.setattr(admission, "_processes", broken)
    with pytest.raises(BusyError):
        judges.admit("one", REQUEST, NO_LIMITS)
    assert "no process can be started" in caplog.text
    broken.close()


def test_a_tenant_cannot_take_every_place(judges, hostile, monkeypatch):
    monkeypatch.setattr(admission, "_READ_SECONDS", 6.0)
    monkeypatch.setattr(admission, "_SLOT_SECONDS", 0.05)
    kept = admission._processes
    hostile("hangs")
    ends = []

    def ask():
        with pytest.raises((UnsupportedArchitectureError, RateLimitedError)) as end:
            judges.admit("greedy", REQUEST, NO_LIMITS)
        ends.append(end.type)

    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 30
    while len(ends) < 27 and time.monotonic() < end:
        time.sleep(0.02)
    # While three processes hang, another tenant is served.
    monkeypatch.setattr(admission, "_processes", kept)
    assert judges.admit("other", REQUEST, NO_LIMITS) == ()
    for thread in threads:
        thread.join()
    assert sorted(kind.__name__ for kind in ends) == ["RateLimitedError"] * 27 + ["UnsupportedArchitectureError"] * 3
    # All places are free again.
    assert judges.admit("greedy", REQUEST, NO_LIMITS) == ()


@pytest.mark.parametrize("code", sorted(_KINDS))
def test_every_error_survives_the_process_boundary(code):
    kind = _KINDS[code]
    attributes = {
        UnmatchedIgnoreError: {"position": 3},
        InfeasibleBudgetError: {"nearest_ratio": 0.25},
        OverQuotaError: {"param": "model_id"},
    }.get(kind, {})
    sent = Answer(refusal=Refusal.of(kind("what, where, what to do", **attributes))).model_dump_json()
    error = Answer.model_validate_json(sent).refusal.error()
    assert type(error) is kind
    assert str(error) == "what, where, what to do"
    assert vars(error) == attributes


def test_an_endless_message_is_truncated():
    error = Refusal.of(UnsupportedArchitectureError("x" * 1_000_000)).error()
    assert len(str(error)) == 2000


def test_all_weights_count_towards_the_model_size():
    weights = WeightSummary(dtype_bytes={"F32": 8, "BF16": 2}, block_shapes={})
    check_model_size(10, weights)
    check_model_size(None, None)
    with pytest.raises(OverQuotaError):
        check_model_size(9, weights)
    with pytest.raises(OverQuotaError):
        check_model_size(10, None)
