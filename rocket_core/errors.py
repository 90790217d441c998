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

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of all commands: 75 and 77 are from sysexits.h; 130 is what shells use for Ctrl-C."""

    OK = 0
    INTERNAL = 1
    INVALID = 2
    UNUSABLE_INPUT = 3
    OUT_OF_REACH = 4
    MACHINE_TOO_SMALL = 5
    SAVED_STATE = 6
    NOT_FOUND = 7
    CONFLICT = 8
    CANCELLED = 9
    NOT_ACCEPTED = 10
    TEMPORARY = 75
    NOT_ALLOWED = 77
    INTERRUPTED = 130


class CodedError(Exception):
    """Base of all errors that are raised on purpose, also those of the service and its client.

    A class names its code; what else it does not name it has from its base class.

    Attributes:
        code: stable name of the kind of error.
        exit_code: exit code of a command that ends with the error.
        retryable: whether the same may succeed later.
    """

    code: str
    exit_code: ExitCode = ExitCode.INTERNAL
    retryable: bool = False

    def __init_subclass__(
        cls, *, code: str | None = None, exit_code: ExitCode | None = None, retryable: bool = False
    ) -> None:
        super().__init_subclass__()
        cls.code = code or cls.code
        cls.exit_code = ExitCode.TEMPORARY if retryable else exit_code or cls.exit_code
        cls.retryable = retryable or cls.retryable


class RocketError(CodedError, code="rocket_error"):
    """Base of all errors of this library."""


class InvalidConfigError(RocketError, code="invalid_config", exit_code=ExitCode.INVALID):
    """A setting is out of range or contradicts another."""


class UnknownDatasetError(InvalidConfigError, code="unknown_dataset", exit_code=ExitCode.UNUSABLE_INPUT):
    """The calibration dataset is neither a known dataset nor a readable file."""


class UnmatchedIgnoreError(InvalidConfigError, code="unmatched_ignore"):
    """An ignore pattern matches no compressible layer.

    Attributes:
        position: index of the pattern, from 0.
    """

    def __init__(self, message: str, *, position: int) -> None:
        super().__init__(message)
        self.position = position


class ModelNotFoundError(RocketError, code="model_not_found", exit_code=ExitCode.UNUSABLE_INPUT):
    """The model is neither a local folder nor a repository on the Hub."""


class HubUnavailableError(RocketError, code="hub_unavailable", retryable=True):
    """The Hub does not answer; the same request may succeed later."""


class HubUploadError(RocketError, code="push_failed", exit_code=ExitCode.INVALID):
    """The Hub does not accept files."""


class UploadTokenError(HubUploadError, code="hub_token_invalid", exit_code=ExitCode.NOT_ALLOWED):
    """The Hub's token is missing, or the Hub does not know it."""


class UploadForbiddenError(HubUploadError, code="hub_forbidden", exit_code=ExitCode.NOT_ALLOWED):
    """The token may not write to the repository."""


class UploadVisibilityError(HubUploadError, code="repository_is_public", exit_code=ExitCode.CONFLICT):
    """The repository should be private, but is public."""


class UploadRefusedError(HubUploadError, code="hub_refuses"):
    """The Hub refuses for another reason."""


class UnsupportedArchitectureError(RocketError, code="unsupported_architecture", exit_code=ExitCode.UNUSABLE_INPUT):
    """The model has no layers that this method can compress."""


class AlreadyQuantizedError(UnsupportedArchitectureError, code="already_quantized"):
    """The checkpoint holds quantized or already compressed weights."""


class UnsupportedExportError(UnsupportedArchitectureError, code="unsupported_export"):
    """The model has something that the format of another engine cannot express."""


class CalibrationError(RocketError, code="calibration_failed", exit_code=ExitCode.UNUSABLE_INPUT):
    """The calibration data cannot be used."""


class EmptyCalibrationError(CalibrationError, code="calibration_empty"):
    """The calibration data has too few tokens."""


class NonFiniteCalibrationError(CalibrationError, code="calibration_non_finite"):
    """NaN or infinity appeared in the activations of a layer."""


class IllConditionedGramError(RocketError, code="ill_conditioned_gram", exit_code=ExitCode.UNUSABLE_INPUT):
    """A Gram matrix cannot be factorized, even after shrinkage."""


class InfeasibleBudgetError(RocketError, code="infeasible_budget", exit_code=ExitCode.OUT_OF_REACH):
    """No choice of candidates meets the budget.

    Attributes:
        nearest_ratio: the closest compression ratio that can be reached, in [0, 1).
    """

    def __init__(self, message: str, *, nearest_ratio: float) -> None:
        super().__init__(message)
        self.nearest_ratio = nearest_ratio


class ResourceError(RocketError, code="insufficient_resources", exit_code=ExitCode.MACHINE_TOO_SMALL):
    """This machine has too little of a resource that the run needs."""


class InsufficientMemoryError(ResourceError, code="insufficient_memory"):
    """The run would need more memory than is available."""


class InsufficientDiskError(ResourceError, code="insufficient_disk"):
    """The run would need more disk space than is available."""


class HubCacheBusyError(ResourceError, code="hub_cache_busy", retryable=True):
    """Models in use by other processes fill the quota of the shared Hub cache."""


class WorkFolderError(RocketError, code="stale_work_folder", exit_code=ExitCode.SAVED_STATE):
    """The work folder was written by a run with another model, calibration, settings or version."""


class WorkFolderBusyError(WorkFolderError, code="work_folder_busy", retryable=True):
    """Another process is using the work folder; the same request may succeed after it has ended."""


class CheckpointError(RocketError, code="checkpoint_error", exit_code=ExitCode.SAVED_STATE):
    """Weights on disk cannot be used."""


class CheckpointFormatError(CheckpointError, code="checkpoint_format"):
    """The checkpoint has a layout or format version that this library does not read."""


class CorruptCheckpointError(CheckpointError, code="corrupt_checkpoint"):
    """A checkpoint file is damaged or incomplete."""


class UnsafeFileError(CheckpointError, code="unsafe_file", exit_code=ExitCode.UNUSABLE_INPUT):
    """A file of a model folder is unsafe to read: it leads elsewhere, is not a regular file, or is far too large."""


class FaultyResultError(RocketError, code="faulty_result"):
    """A written result cannot be run, or computes something else than what compression made; no fault of the caller."""


class CompressionCancelledError(RocketError, code="cancelled", exit_code=ExitCode.INTERRUPTED):
    """The caller cancelled the run; finished layers are kept in the work folder."""
