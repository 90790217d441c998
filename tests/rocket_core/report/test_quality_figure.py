from rocket_core.report.quality import Difference, EvaluationReport, ModelQuality
from rocket_core.report.quality_figure import MeasuredModel, quality_over_size


def measured(size, *, before=None, after=None, **difference):
    evaluation = EvaluationReport(
        export="factored",
        dataset="builtin",
        windows=1,
        sequence_length=8,
        stride=8,
        tokens=1007,
        text_sha256="ab" * 32,
        before=ModelQuality(perplexity=before),
        after=ModelQuality(perplexity=after),
        difference=Difference(**difference),
    )
    return MeasuredModel(name=f"{size}", address=f"/{size}", stored_bytes=size, evaluation=evaluation)


def test_points_have_size_and_quality_next_to_the_original():
    figure = quality_over_size("m", [measured(9, before=4, after=5, kl_divergence=0.2), measured(7, kl_divergence=0.3)])
    assert [(row["model_bytes"], row["perplexity_ratio"], row["kl_divergence"]) for row in figure.rows] == [
        (7, None, 0.3),
        (9, 1.25, 0.2),
    ]
    assert figure.measures == ("kl_divergence", "perplexity_ratio")
    assert figure.rows[0]["text"] == "builtin, 1,007 tokens, ababab"


def test_of_an_encoder_the_drift_is_shown():
    figure = quality_over_size("m", [measured(7, cosine_drift=0.1)])
    assert figure.measures == ("cosine_drift",)
    assert [column.name for column in figure.columns] == ["name", "model_bytes", "cosine_drift", "text"]
