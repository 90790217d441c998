"""Errors raised by `rocket_core`.

RocketError
├── InvalidConfigError              a setting out of range or contradictory
│   ├── UnknownDatasetError         no calibration data of that name
│   └── UnmatchedIgnoreError        an ignore pattern that matches no layer
├── ModelNotFoundError              no such folder, repository or revision
├── HubUnavailableError             the model hub cannot be reached (worth retrying)
├── HubUploadError                  the model hub does not accept files
│   ├── UploadTokenError            the token is missing or unknown
│   ├── UploadForbiddenError        the token may not write to the repository
│   ├── UploadVisibilityError       the repository should be private, but is public
│   └── UploadRefusedError          another reason
├── UnsupportedArchitectureError    nothing in this model can be compressed, or not by this method
│   ├── AlreadyQuantizedError       the weights are not plain floating-point numbers
│   └── UnsupportedExportError      the model cannot be written in the format of an engine
├── CalibrationError                the calibration data cannot be used
│   ├── EmptyCalibrationError       fewer tokens than one window
│   └── NonFiniteCalibrationError   NaN or infinity, with layer and batch
├── IllConditionedGramError         a Gram matrix that cannot be factorized
├── InfeasibleBudgetError           a ratio beyond what the layer profiles reach
├── ResourceError                   this machine has too little of something
│   ├── InsufficientMemoryError
│   ├── InsufficientDiskError
│   └── HubCacheBusyError           repositories in use fill the quota (worth retrying)
├── WorkFolderError                 the work folder belongs to another run
│   └── WorkFolderBusyError         another process is using it (worth retrying)
├── CheckpointError                 weights on disk
│   ├── CheckpointFormatError       a layout or version this library does not read
│   ├── CorruptCheckpointError      a file that is damaged or incomplete
│   └── UnsafeFileError             a link that leaves the model's folder, a device, or an absurdly large file
├── FaultyResultError               what was written does not compute what compression made
└── CompressionCancelledError       the caller asked to stop; what is done is kept

A message says what is wrong, where, and what to do. `code` is stable: it is stored with a job and returned by the API.
"""

from typing import ClassVar


class RocketError(Exception):
    """Base of all errors of this library."""

    code: ClassVar[str] = "rocket_error"
    retryable: ClassVar[bool] = False


class InvalidConfigError(RocketError):
    """A setting is out of range or contradicts another."""

    code = "invalid_config"


class UnknownDatasetError(InvalidConfigError):
    """The calibration dataset is neither a known dataset nor a readable file."""

    code = "unknown_dataset"


class UnmatchedIgnoreError(InvalidConfigError):
    """An ignore pattern matches no compressible layer.

    Attributes:
        position: index of the pattern, from 0.
    """

    code = "unmatched_ignore"

    def __init__(self, message: str, *, position: int) -> None:
        super().__init__(message)
        self.position = position


class ModelNotFoundError(RocketError):
    """The model is neither a local folder nor a repository on the Hub."""

    code = "model_not_found"


class HubUnavailableError(RocketError):
    """The Hub does not answer; the same request may succeed later."""

    code = "hub_unavailable"
    retryable = True


class HubUploadError(RocketError):
    """The Hub does not accept files."""

    code = "push_failed"


class UploadTokenError(HubUploadError):
    """The Hub's token is missing, or the Hub does not know it."""

    code = "hub_token_invalid"


class UploadForbiddenError(HubUploadError):
    """The token may not write to the repository."""

    code = "hub_forbidden"


class UploadVisibilityError(HubUploadError):
    """The repository should be private, but is public."""

    code = "repository_is_public"


class UploadRefusedError(HubUploadError):
    """The Hub refuses for another reason."""

    code = "hub_refuses"


class UnsupportedArchitectureError(RocketError):
    """The model has no layers that this method can compress."""

    code = "unsupported_architecture"


class AlreadyQuantizedError(UnsupportedArchitectureError):
    """The checkpoint holds quantized or already compressed weights."""

    code = "already_quantized"


class UnsupportedExportError(UnsupportedArchitectureError):
    """The model has something that the format of another engine cannot express."""

    code = "unsupported_export"


class CalibrationError(RocketError):
    """The calibration data cannot be used."""

    code = "calibration_failed"


class EmptyCalibrationError(CalibrationError):
    """The calibration data has too few tokens."""

    code = "calibration_empty"


class NonFiniteCalibrationError(CalibrationError):
    """NaN or infinity appeared in the activations of a layer."""

    code = "calibration_non_finite"


class IllConditionedGramError(RocketError):
    """A Gram matrix cannot be factorized, even after shrinkage."""

    code = "ill_conditioned_gram"


class InfeasibleBudgetError(RocketError):
    """No choice of candidates meets the budget.

    Attributes:
        nearest_ratio: the closest compression ratio that can be reached, in [0, 1).
    """

    code = "infeasible_budget"

    def __init__(self, message: str, *, nearest_ratio: float) -> None:
        super().__init__(message)
        self.nearest_ratio = nearest_ratio


class ResourceError(RocketError):
    """This machine has too little of a resource that the run needs."""

    code = "insufficient_resources"


class InsufficientMemoryError(ResourceError):
    """The run would need more memory than is available."""

    code = "insufficient_memory"


class InsufficientDiskError(ResourceError):
    """The run would need more disk space than is available."""

    code = "insufficient_disk"


class HubCacheBusyError(ResourceError):
    """Models in use by other processes fill the quota of the shared Hub cache."""

    code = "hub_cache_busy"
    retryable = True


class WorkFolderError(RocketError):
    """The work folder was written by a run with another model, calibration, settings or version."""

    code = "stale_work_folder"


class WorkFolderBusyError(WorkFolderError):
    """Another process is using the work folder; the same request may succeed after it has ended."""

    code = "work_folder_busy"
    retryable = True


class CheckpointError(RocketError):
    """Weights on disk cannot be used."""

    code = "checkpoint_error"


class CheckpointFormatError(CheckpointError):
    """The checkpoint has a layout or format version that this library does not read."""

    code = "checkpoint_format"


class CorruptCheckpointError(CheckpointError):
    """A checkpoint file is damaged or incomplete."""

    code = "corrupt_checkpoint"


class UnsafeFileError(CheckpointError):
    """A file of a model folder is unsafe to read: it leads elsewhere, is not a regular file, or is far too large."""

    code = "unsafe_file"


class FaultyResultError(RocketError):
    """A written result cannot be run, or computes something else than what compression made; no fault of the caller."""

    code = "faulty_result"


class CompressionCancelledError(RocketError):
    """The caller cancelled the run; finished layers are kept in the work folder."""

    code = "cancelled"
