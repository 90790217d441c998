"""The meter, with codecarbon itself, compared with the energy of a processor of known power over time."""

import hashlib
import logging
import os
import socket
import sys
import threading
import time

import codecarbon
import pytest

from rocket_core.system.energy import EnergyMeter

WATTS = 1000.0
JOULES_PER_KWH = 3.6e6


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.lower().startswith("codecarbon_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def compute(seconds):
    """Keep one core busy for this CPU time, without the interpreter's lock, as compressions do."""
    until = time.process_time() + seconds
    block = bytes(2**23)
    while time.process_time() < until:
        hashlib.sha256(block)


def test_a_busy_processor_is_charged_its_share(monkeypatch):
    monkeypatch.setenv("CODECARBON_FORCE_CPU_POWER", str(WATTS))
    with EnergyMeter() as meter:
        # codecarbon notes the time of a sample before it reads processor times, which a busy interpreter would delay by
        # up to 0.4 s, and counts as much too much in the first sample after an idle one.
        meter.reading()
        compute(1)
        before, began = meter.reading(), time.process_time()
        compute(2)
        spent = time.process_time() - began
        after = meter.reading()
    expected = WATTS * spent / os.cpu_count()
    joules = (after.processor_kwh - before.processor_kwh) * JOULES_PER_KWH
    assert joules == pytest.approx(expected, rel=0.25)
    assert not after.processor_counted


def test_an_idle_processor_is_charged_almost_nothing(monkeypatch):
    monkeypatch.setenv("CODECARBON_FORCE_CPU_POWER", str(WATTS))
    with EnergyMeter() as meter:
        before = meter.reading()
        time.sleep(1.5)
        after = meter.reading()
    assert (after.processor_kwh - before.processor_kwh) * JOULES_PER_KWH < 0.1 * WATTS * 1.5
    # The memory's energy is estimated separately.
    assert after.memory_kwh > before.memory_kwh


def test_it_uses_no_network_and_writes_no_file(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(socket.socket, "connect", lambda _self, address: asked.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_rest, **_more: asked.append(host))
    # Settings that would make it send its measurements, or request data of the grid.
    monkeypatch.setenv("CODECARBON_EMISSIONS_ENDPOINT", "http://203.0.113.1/")
    monkeypatch.setenv("CODECARBON_ELECTRICITYMAPS_API_TOKEN", "token")
    monkeypatch.setenv("CODECARBON_OUTPUT_METHODS", "api,csv")
    with EnergyMeter() as meter:
        assert meter.reading() is not None
        compute(0.2)
        assert meter.reading() is not None
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_it_leaves_no_thread_and_prints_nothing(capfd):
    threads = set(threading.enumerate())
    with EnergyMeter() as meter:
        assert meter.reading() is not None
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=5)
    # Those of other tests may have ended in the meantime.
    assert set(threading.enumerate()) <= threads
    assert capfd.readouterr() == ("", "")


def test_without_codecarbon_the_log_says_how_to_install_it(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    with caplog.at_level(logging.WARNING), EnergyMeter() as meter:
        assert meter.reading() is None
        assert meter.reading() is None
    assert "pip install 'rocket-compress[torch]'" in caplog.text
    assert caplog.text.count("cannot be measured") == 1


def test_a_failing_measurement_gives_no_reading(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING), EnergyMeter() as meter:
        assert meter.reading() is not None
        monkeypatch.setattr(codecarbon.OfflineEmissionsTracker, "flush", lambda _self: None)
        assert meter.reading() is None
    assert "at level debug the log says why" in caplog.text
