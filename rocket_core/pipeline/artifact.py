"""A finished artifact of the format `rocket`, and the model that it was made from."""

from dataclasses import dataclass
from pathlib import Path

from rocket_core.checkpoint import Checkpoint, ModelSource, open_checkpoint
from rocket_core.errors import CheckpointFormatError, InvalidConfigError, ModelNotFoundError
from rocket_core.evaluation import ModelFolder, open_model
from rocket_core.exports.artifact_folder import artifact_folders, read_report
from rocket_core.inspection.files.model_files import CONFIG_NAME
from rocket_core.layers import QUANT_METHOD
from rocket_core.report.schema import CompressionReport

_EXPORT = "rocket"


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A `rocket` artifact.

    Attributes:
        model: its folder.
        checkpoint: its safetensors.
        report: report of the compression; None for an artifact that was saved without one.
    """

    model: ModelFolder
    checkpoint: Checkpoint
    report: CompressionReport | None

    @property
    def source(self) -> ModelSource:
        """The artifact as a model."""
        return ModelSource(name=self.model.path.name, folder=self.model.path, commit=None)


def open_artifact(path: Path) -> Artifact:
    """Open an artifact.

    Args:
        path: its folder, or the output folder of a compression that exported `rocket`.

    Raises:
        ModelNotFoundError: the folder holds no artifact.
        CheckpointFormatError: the folder holds a model in another format.
        CorruptCheckpointError: a file is damaged.
    """
    path = path.expanduser()
    folder = next((place for place in (path, *artifact_folders(path)) if (place / CONFIG_NAME).is_file()), path)
    if not (folder / CONFIG_NAME).is_file():
        raise ModelNotFoundError(
            f"{path} holds no artifact: there is neither a {CONFIG_NAME} nor a folder {_EXPORT}; name the output "
            f"folder of a compression with the export {_EXPORT}"
        )
    model = open_model(folder.resolve())
    quantization = getattr(model.config, "quantization_config", None) or {}
    if quantization.get("quant_method") != QUANT_METHOD:
        raise CheckpointFormatError(
            f"{folder} is not a `rocket` artifact of Rocket: its values are not stored as they are trained; heal the "
            f"export {_EXPORT} of the same compression"
        )
    return Artifact(model=model, checkpoint=open_checkpoint(model.path), report=read_report(model.path))


def original_name(artifact: Artifact, model: str | None, revision: str | None) -> tuple[str, str | None]:
    """Return path or repository, and revision, of the model that an artifact was made from.

    Args:
        artifact: the artifact.
        model: the user's choice; None takes the repository that its report names.
        revision: branch, tag or commit, with the user's choice.

    Raises:
        InvalidConfigError: no choice was made, and the report does not say where the model is.
    """
    if model is not None:
        return model, revision
    report = artifact.report
    if report is None or "/" not in report.model:
        named = "its report does not name a model" if report is None else f"it was made from a folder {report.model!r}"
        raise InvalidConfigError(f"{artifact.model.path}: {named}; name the original with --model")
    return report.model, revision or report.revision


def check_original(report: CompressionReport | None, original: ModelSource) -> None:
    """Raise an error if a model is not the one that an artifact was made from, as far as its report tells.

    Args:
        report: report in the artifact's folder; None for an artifact without one.
        original: the model.

    Raises:
        InvalidConfigError: the weights differ.
    """
    if report is None or report.revision is None:
        return
    # A commit says nothing about a folder, nor the hash of its weights about a commit.
    can_compare = report.revision.startswith("sha256:") == (original.commit is None)
    found = original.revision(open_checkpoint(original.folder)) if can_compare else report.revision
    if found != report.revision:
        raise InvalidConfigError(
            f"{original.name} (revision {found}) is not the model that the artifact was made from, {report.model} "
            f"(revision {report.revision}); name that one as the original (`rocket heal` takes --model)"
        )
