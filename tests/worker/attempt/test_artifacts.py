import pytest

from app.shared.errors import StorageError
from rocket_core.report.answers import AnswerToken, ComparedAnswer
from rocket_core.report.quality import Difference, EvaluationReport, ModelQuality
from tests.reference.reports import empty_report, layer_named, report_of_layers
from worker.attempt import artifacts
from worker.attempt.artifacts import read_report

TOKEN = AnswerToken(text="e" * 50, before=0.5, after=0.5, kl_divergence=0.1)


@pytest.fixture
def kept(tmp_path):
    """Return what is kept of a report."""

    def keep(report):
        (tmp_path / "report.json").write_text(report.model_dump_json())
        return read_report(tmp_path)

    return keep


def evaluation(prompts):
    answer = ComparedAnswer(prompt="p", is_chat=False, before=(TOKEN,) * 512, after=("e",), first_difference=0)
    return EvaluationReport(
        export="rocket",
        dataset="builtin",
        windows=1,
        sequence_length=2,
        stride=2,
        tokens=1,
        text_sha256="0" * 64,
        before=ModelQuality(),
        after=ModelQuality(),
        difference=Difference(),
        answers=(answer,) * prompts,
    )


def test_an_ordinary_report_is_kept_whole(kept):
    report = report_of_layers().model_copy(update={"evaluation": evaluation(16)})
    assert kept(report) == report


def test_the_layers_of_a_very_large_mixture_are_summarised(kept):
    names = [f"model.layers.{n // 500}.mlp.experts.{n % 500}.{'up' * 20}" for n in range(46_000)]
    layers = tuple(layer_named(name) for name in names)
    summary = kept(empty_report().model_copy(update={"layers": layers}))
    assert len(summary.layers) == 92
    assert summary.bits_per_weight == pytest.approx(8 * sum(layer.stored_bytes for layer in layers))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": (layer_named("x" * 513),)}, "a layer's name more than 512 characters"),
        ({"model_class": "x" * 13 * 2**20}, "has more than 12582912 bytes beyond its layers"),
        ({"evaluation": evaluation(200)}, "the evaluation has more than 4194304 bytes; give fewer prompts"),
    ],
)
def test_a_report_that_no_page_can_bear_is_refused(kept, changes, words):
    with pytest.raises(StorageError, match=words):
        kept(empty_report().model_copy(update=changes))


def test_a_file_that_is_too_large_is_not_read(kept, monkeypatch):
    monkeypatch.setattr(artifacts, "_MAX_REPORT_BYTES", 100)
    with pytest.raises(StorageError, match="more than 100 bytes"):
        kept(empty_report())
