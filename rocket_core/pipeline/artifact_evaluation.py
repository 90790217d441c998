"""`evaluate_artifact`: comparison of a finished artifact with the model that it was made from."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rocket_core.checkpoint import ModelSource
from rocket_core.config import STAGES, CompressionConfig, Stage
from rocket_core.errors import InvalidConfigError
from rocket_core.exports.artifact_folder import read_report
from rocket_core.hub.repository import HubAccess, offline
from rocket_core.pipeline.artifact import check_original
from rocket_core.pipeline.open_work import open_work
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.progress import Callbacks, Monitor, Progress
from rocket_core.pipeline.requirements import check_evaluation
from rocket_core.pipeline.stage_costs import Costs
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
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    on_requirements: Callable[[int], None] = lambda _memory_bytes: None,
    on_offline: Callable[[], None] = lambda: None,
    should_cancel: Callable[[], bool] = lambda: False,
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
        on_progress: called at every step.
        on_requirements: called with the estimated bytes of memory, before the work that needs them.
        on_offline: called when everything that may come from the Hub has been read.
        should_cancel: called at every step; True ends the evaluation.

    Raises:
        InvalidConfigError: no evaluation is configured, or the model is not the one that the artifact was made from.
        RocketError: see `rocket_core.errors` for the kinds.
    """
    callbacks = Callbacks(on_progress=on_progress, on_requirements=on_requirements, should_cancel=should_cancel)
    left_out = [stage for stage in STAGES if stage not in _STAGES]

    def monitor_of(costs: Costs) -> Monitor:
        return Monitor(callbacks, costs, left_out=left_out)

    with open_work(output, config.device, None, monitor_of) as (_work, monitor):
        source = model if isinstance(model, ModelSource) else obtain_model(model, revision, hub, config, monitor)
        with monitor.stage("preflight"):
            with offline():
                run = prepare_run(source, config)
                check_original(read_report(artifact), source)
            plan = plan_evaluation(run, token=hub.token)
            if plan is None:
                raise InvalidConfigError("specify how to evaluate the artifact (evaluate)")
            output.mkdir(parents=True, exist_ok=True)
            monitor.requires(check_evaluation(run, plan, output))
        with offline():
            on_offline()
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
