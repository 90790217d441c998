"""`evaluate_artifact`: comparison of a finished artifact with the model that it was made from."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rocket_core.checkpoint import ModelSource
from rocket_core.config import CompressionConfig, Stage
from rocket_core.errors import InvalidConfigError
from rocket_core.exports.artifact_folder import read_report
from rocket_core.hub.repository import HubAccess, offline
from rocket_core.pipeline.artifact import check_original
from rocket_core.pipeline.observer import Observer
from rocket_core.pipeline.open_work import open_work
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.requirements import check_evaluation
from rocket_core.pipeline.stages.download import obtain_model
from rocket_core.pipeline.stages.evaluate import measure_artifact, plan_evaluation
from rocket_core.report.quality import EvaluationReport

_STAGES: frozenset[Stage] = frozenset({"downloading", "preflight", "evaluating"})


def evaluate_artifact(
    model: str | ModelSource,
    artifact: Path,
    output: Path,
    config: CompressionConfig,
    *,
    revision: str | None = None,
    hub: HubAccess = HubAccess(),
    observer: Observer | None = None,
) -> EvaluationReport:
    """Evaluate an artifact of a finished compression against the original, as the compression itself could have done.

    Args:
        model: the original: path of a folder, repository id, or a model that was found already.
        artifact: folder of the export `config.evaluated_export`.
        output: folder for the dense model's logits while it runs; created if needed.
        config: the settings of the compression, with `evaluate`. If the calibration has the same dataset, the
            documents after those calibrated are read.
        revision: branch, tag or commit of a repository.
        hub: credentials and cache directory for Hub access.
        observer: notified of the progress; see `Observer`. None shows a bar if a person looks on.

    Raises:
        InvalidConfigError: no evaluation is configured, or the model is not the one that the artifact was made from.
        RocketError: see `rocket_core.errors` for the kinds.
    """
    with open_work(output, config.device, observer, partial(Monitor, stages=_STAGES)) as (_work, monitor):
        source = model if isinstance(model, ModelSource) else obtain_model(model, revision, hub, config, monitor)
        with monitor.stage("preflight"):
            with offline():
                run = prepare_run(source, config)
                check_original(read_report(artifact), source)
            plan = plan_evaluation(run, token=hub.token)
            if plan is None:
                raise InvalidConfigError("specify how to evaluate the artifact (evaluate)")
            output.mkdir(parents=True, exist_ok=True)
            monitor.observer.on_requirements(check_evaluation(run, plan, output))
        with offline():
            monitor.observer.on_offline()
            with monitor.stage("evaluating"), _scratch(output) as scratch:
                report = measure_artifact(run, plan, artifact, scratch, monitor)
        monitor.finish()
        return report


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    # A fixed name, so that what a killed evaluation leaves is replaced by the next.
    path = output / ".rocket-evaluation"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
