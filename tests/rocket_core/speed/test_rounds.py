import os
import signal
import time

import psutil
import pytest

from rocket_core.errors import InvalidConfigError, UnsupportedArchitectureError
from rocket_core.hf import attach_factors
from rocket_core.speed import SpeedSettings, find_subject, measure_speed
from tests.reference import gguf_models
from tests.reference.encoders import save_bert
from tests.reference.factored_models import quantized_factors
from tests.reference.tiny_models import byte_tokenizer, save_tiny_model
from tests.rocket_core.exports.test_gguf_engine import export

QUICK = SpeedSettings(prompt_tokens=8, new_tokens=4, rounds=2, threads=1, device="cpu")


@pytest.mark.parametrize(("name", "value"), [("prompt_tokens", 0), ("new_tokens", 1), ("rounds", 0), ("threads", 0)])
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(InvalidConfigError, match=f"{name} is {value}; it must be at least"):
        SpeedSettings(**({"threads": 1} | {name: value}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(folder):
    """Return a model, its artifact, and a GGUF file, whose process starts in a fifth of the time of the others."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is needed: pip install xllamacpp")
    model, _ = gguf_models.save("llama", folder / "original")
    attach_factors(model, quantized_factors(model))
    model.save_pretrained(folder / "artifact")
    byte_tokenizer().save_pretrained(folder / "artifact")
    export(folder / "original", folder / "model.gguf")
    return [find_subject(folder / name, name) for name in ("original", "artifact", "model.gguf")]


@pytest.mark.slow
class TestMeasurement:
    def test_each_kind_of_model_is_measured(self, models):
        steps = []

        report = measure_speed(models, QUICK, on_step=lambda share, what: steps.append((share, what)))

        assert [(model.name, model.form, model.runtime) for model in report.models] == [
            ("original", "dense", "transformers"),
            ("artifact", "rocket", "transformers"),
            ("model.gguf", "gguf", "llama.cpp"),
        ]
        assert report.unmeasured == ()
        assert (report.prompt_tokens, report.new_tokens, report.rounds, report.threads) == (8, 4, 2, 1)
        for model in report.models:
            assert model.stored_bytes <= model.memory_bytes < 2**30
        original, artifact, gguf = report.models
        assert original.stored_bytes * 0.9 < original.weights_bytes < original.stored_bytes * 1.1
        assert artifact.weights_bytes > 0
        assert gguf.weights_bytes is None
        shares = [share for share, _ in steps]
        assert shares == sorted(shares)
        # Every model is loaded, and measured in three rounds.
        assert [what for _, what in steps][3:6] == [f"{model.name}, round 0 of 2" for model in models]
        assert len(steps) == 3 * (1 + 3)

    def test_a_model_that_cannot_run_is_named(self, models, tmp_path):
        (tmp_path / "broken.gguf").write_bytes(b"GGUF, but nothing else")
        broken = find_subject(tmp_path / "broken.gguf", "broken")
        encoder = find_subject(save_bert(tmp_path / "bert"), "encoder")

        report = measure_speed([broken, models[2], encoder], QUICK)

        assert [model.name for model in report.models] == ["model.gguf"]
        assert [model.name for model in report.unmeasured] == ["broken", "encoder"]
        assert "generate text" in report.unmeasured[1].reason

    def test_nothing_to_measure_is_an_error(self, models, tmp_path):
        (tmp_path / "broken.gguf").write_bytes(b"GGUF, but nothing else")
        with pytest.raises(UnsupportedArchitectureError, match=r"no model can be measured: broken: "):
            measure_speed([find_subject(tmp_path / "broken.gguf", "broken")], QUICK)

    def test_defaults_fit_into_a_short_context(self, tmp_path):
        """The tiny model attends to 64 tokens."""
        subject = find_subject(save_tiny_model("gpt2", tmp_path / "short"), "short")

        report = measure_speed([subject], SpeedSettings(rounds=1, threads=1, device="cpu"))

        assert report.prompt_tokens + report.new_tokens <= 64
        with pytest.raises(InvalidConfigError, match="more than the 64 that short can attend to"):
            measure_speed([subject], SpeedSettings(prompt_tokens=65, rounds=1, threads=1, device="cpu"))

    def test_stopping_ends_the_processes(self, models):
        def stop(_share, what):
            if "round 1" in what:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            measure_speed(models[1:], QUICK, on_step=stop)

        assert measuring_processes() == []

    def test_a_killed_process_is_reported(self, models):
        def kill(_share, what):
            if what == "artifact, round 1 of 2":
                os.kill(measuring_processes()[0].pid, signal.SIGKILL)

        report = measure_speed(models[1:], QUICK, on_step=kill)

        assert [model.name for model in report.models] == ["model.gguf"]
        assert "ended with signal 9" in report.unmeasured[0].reason


def measuring_processes():
    """Return the processes that this one has started to measure, the oldest first."""
    deadline = time.monotonic() + 5
    while True:
        children = psutil.Process().children()
        found = [child for child in children if any("rocket_core.speed" in part for part in child.cmdline())]
        if found or time.monotonic() > deadline or not children:
            return sorted(found, key=lambda child: child.create_time())
