"""What a client asks for, as it travels from the API through the row to the worker; checked here and nowhere else."""

import hashlib
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from rocket_core.config import (
    BUILTIN_DATASET,
    HUB_DATASETS,
    HUB_TASKS,
    SYNTHETIC_DATASET,
    CompressionConfig,
    compression_config,
    with_preset,
)
from rocket_core.errors import InvalidConfigError
from rocket_core.schema import described

LOCAL = "local/"
UPLOAD = "upload/"

Queue = Literal["cpu", "gpu"]
"""Which workers run a job."""
JobKind = Literal["compression", "profile"]
"""What a job does."""
QUEUES: tuple[Queue, ...] = get_args(Queue)

# What a name in the operator's folders, and each half of a repository id, may look like: never a path.
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_MODEL_ID = re.compile(rf"{_NAME}/{_NAME}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")
# What the operator decides, or what has a place of its own in a request.
_NOT_OPTIONS = frozenset(
    {"ratio", "target_bytes", "calibration", "evaluate", "device", "max_shard_bytes", "statistics_quota_bytes"}
)
# The first words of the library's own description.
_WHAT_IT_DECIDES = "Everything that decides what a compression produces, and where it computes."
# Of an object or a list, whatever its own limit is.
_MAX_MEMBERS = 1024
_MAX_METADATA = 16
_MAX_TASKS = 16
_UPLOADED = re.compile(rf"{UPLOAD}[0-9a-f]{{32}}")


class _Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, json_schema_extra=described
    )

    @model_validator(mode="before")
    @classmethod
    def _has_few_members(cls, data: Any) -> Any:
        # Before anything is validated: each member that is wrong would become an error in the answer.
        parts = [data, *data.values()] if isinstance(data, dict) and len(data) <= _MAX_MEMBERS else [data]
        if any(isinstance(part, dict | list | tuple) and len(part) > _MAX_MEMBERS for part in parts):
            raise ValueError(f"an object or list has more than {_MAX_MEMBERS} members; send fewer")
        return data


def _model_id(text: str) -> str:
    # "--" and ".." are what the Hub refuses in a repository id; ".." is also a step out of a folder.
    if not _MODEL_ID.fullmatch(text) or "--" in text or ".." in text or text.endswith(".git"):
        raise ValueError("is not a valid model id; use `namespace/name` (Hub) or `local/NAME` (see GET /models)")
    return text


def _revision(text: str) -> str:
    if not _REVISION.fullmatch(text) or ".." in text:
        raise ValueError("is not a valid branch, tag or commit")
    return text


def _dataset(text: str) -> str:
    local = text.startswith(LOCAL) and ".." not in text and _MODEL_ID.fullmatch(text)
    if text not in (BUILTIN_DATASET, *HUB_DATASETS, SYNTHETIC_DATASET) and not local and not _UPLOADED.fullmatch(text):
        raise ValueError("is not a calibration dataset; GET /calibrations lists those of this server")
    return text


def _task(text: str) -> str:
    local = text.startswith(LOCAL) and ".." not in text and text.endswith(".jsonl") and _MODEL_ID.fullmatch(text)
    if text not in HUB_TASKS and not local:
        raise ValueError(
            f"is not a task; choose one of {', '.join(HUB_TASKS)}, or local/FILE.jsonl of GET /calibrations"
        )
    return text


class CalibrationRequest(_Frozen):
    """Which data the model is calibrated on.

    Attributes:
        dataset: of text `builtin`, a name of the Hub's datasets, `local/FILE` with its ending, or `upload/ID`; of
            images or audio `local/FOLDER`, or `synthetic`, a stand-in that costs quality.
        samples: windows of tokens, images, or windows of audio, 1 to 65,536; 256 by default.
        sequence_length: tokens per window of text, at least 2; null (the default) takes 1024 or what the model can
            attend to, whichever is less. Images have none.
        seed: which samples are drawn, 0 (the default) to 2⁶³ - 1.
    """

    dataset: Annotated[str, AfterValidator(_dataset)] = BUILTIN_DATASET
    samples: Annotated[int, Field(ge=1, le=65536)] = 256
    sequence_length: Annotated[int, Field(ge=2, le=2**20)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class _Options(_Frozen):
    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, data: Any) -> Any:
        # The job's record says what was chosen, whatever a later version's presets set.
        return with_preset(data)


class EvaluationRequest(_Frozen):
    """How the result is compared with the dense model, once its files are written.

    It changes no artifact. Unlike a compression, which holds one block, it takes memory for the whole model, and disk
    for the dense model's logits (predicted tokens times vocabulary) while it runs.

    Attributes:
        dataset: text to predict, named as `calibration.dataset` is; `builtin` (the default) is 36,000 characters on
            which nothing is ever calibrated. Where it is the calibration's own dataset, the documents behind the last
            calibrated one are read; else a file from its beginning.
        samples: windows (of an encoder: sentences), 1 to 65,536, 64 by default, fewer if the text ends before; each
            costs two forward passes.
        sequence_length: tokens per window, at least 2; null (the default) takes 1024 or what the model can attend to,
            whichever is less.
        stride: tokens from one window's begin to the next, 1 to `sequence_length`; every token is predicted once,
            from at least `sequence_length - stride` tokens before it. Null (the default) is `sequence_length`, the
            cheapest; half of it costs twice the windows for the same text.
        tasks: zero-shot tasks of lm-evaluation-harness, none by default: `arc_easy`, `lambada_openai`, ... or
            `local/FILE.jsonl` in the operator's datasets folder; each costs a forward pass per choice of each item, for
            both models. The worker must have the extra `evaluation`.
        task_items: items read of each task, at least 1; null (the default) reads all.
    """

    dataset: Annotated[str, AfterValidator(_dataset)] = BUILTIN_DATASET
    samples: Annotated[int, Field(ge=1, le=65536)] = 64
    sequence_length: Annotated[int, Field(ge=2, le=2**20)] | None = None
    stride: Annotated[int, Field(ge=1, le=2**20)] | None = None
    tasks: Annotated[tuple[Annotated[str, AfterValidator(_task)], ...], Field(max_length=_MAX_TASKS)] = ()
    task_items: Annotated[int, Field(ge=1, le=2**20)] | None = None


_Labels = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=_MAX_METADATA),
]


def _options_model() -> Any:
    # Taken from the library's settings, so that a range or a default is written once.
    fields: dict[str, Any] = {
        name: (field.rebuild_annotation(), field.default)
        for name, field in CompressionConfig.model_fields.items()
        if name not in _NOT_OPTIONS
    }
    return create_model(
        "JobOptions",
        __base__=_Options,
        __doc__=(CompressionConfig.__doc__ or "").replace(_WHAT_IT_DECIDES, "How to compress.", 1),
        **fields,
    )


JobOptions: Any = _options_model()


class _Stored(_Frozen):
    """What becomes part of a row."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_storable(cls, data: Any) -> Any:
        # Postgres stores neither NUL nor lone surrogates, and both come through JSON.
        _require_storable(data)
        return data


class JobRequest(_Stored):
    """What a job does: with a target it compresses a model, without one it profiles the model's layers.

    Attributes:
        model_id: `namespace/name` on the Hub, or `local/NAME` in the operator's models folder.
        revision: branch, tag or commit of a repository on the Hub.
        ratio: fraction of the compressible parameters to remove, [0, 1).
        target_bytes: most bytes that all safetensors of the factored artifact may take, in place of a ratio.
        calibration: the calibration data.
        evaluate: how the result is compared with the dense model; null (the default) does not, and costs nothing.
        options: settings of the method.
        metadata: the client's own labels: at most 16, keys up to 64 and values up to 512 characters.
        queue: which workers run it, `cpu` or `gpu`; null takes the server's default.
    """

    model_id: Annotated[str, AfterValidator(_model_id)]
    revision: Annotated[str, AfterValidator(_revision)] | None = None
    ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    target_bytes: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    calibration: CalibrationRequest = CalibrationRequest()
    evaluate: EvaluationRequest | None = None
    options: JobOptions = Field(default_factory=JobOptions)
    metadata: _Labels = Field(default_factory=dict)
    queue: Queue | None = None

    @model_validator(mode="after")
    def _settings_agree(self) -> "JobRequest":
        if self.revision is not None and self.model_id.startswith(LOCAL):
            raise ValueError("a local model has no revision; leave it out")
        try:
            self.compression_config()
        except InvalidConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def compression_config(self, **operator: object) -> CompressionConfig:
        """The library's settings for this job.

        Args:
            operator: what the operator decides (`device`, ...), and where the worker knows paths, the `dataset`, and
                of `evaluate` the `dataset` and the `tasks`.

        Raises:
            InvalidConfigError: settings contradict each other.
        """
        calibration = self.calibration.model_dump()
        calibration["dataset"] = operator.pop("dataset", self.calibration.dataset)
        paths = operator.pop("evaluate", {})
        assert isinstance(paths, dict)
        evaluate = None if self.evaluate is None else self.evaluate.model_dump() | paths
        return compression_config(
            ratio=self.ratio,
            target_bytes=self.target_bytes,
            calibration=calibration,
            evaluate=evaluate,
            **self.options.model_dump(),
            **operator,
        )

    @property
    def kind(self) -> JobKind:
        """What the job does."""
        return "profile" if self.ratio is None and self.target_bytes is None else "compression"

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of all texts that the job reads."""
        return (self.calibration.dataset, *(() if self.evaluate is None else (self.evaluate.dataset,)))

    @property
    def local_tasks(self) -> tuple[str, ...]:
        """Names of the zero-shot tasks in the operator's folder."""
        tasks = () if self.evaluate is None else self.evaluate.tasks
        return tuple(task for task in tasks if task.startswith(LOCAL))

    @property
    def asks_the_hub(self) -> bool:
        """Whether the model, a text or a task comes from the Hub."""
        tasks = () if self.evaluate is None else self.evaluate.tasks
        from_hub = any(name in HUB_DATASETS for name in self.datasets) or any(task in HUB_TASKS for task in tasks)
        return not self.model_id.startswith(LOCAL) or from_hub

    def fingerprint(self) -> str:
        """SHA-256 of what is asked for; spelling out a default changes nothing."""
        # Without them as before there were any: a replay may come after an upgrade.
        newer = {name for name in ("queue", "evaluate", "target_bytes") if getattr(self, name) is None}
        return hashlib.sha256(self.model_dump_json(exclude=newer).encode()).hexdigest()


class CompressionRequest(JobRequest):
    """A compression to run: a `model_id`, and either a `ratio` or `target_bytes`; all else has a default."""

    @model_validator(mode="after")
    def _has_a_target(self) -> "CompressionRequest":
        if self.kind == "profile":
            raise ValueError("specify either ratio or target_bytes")
        return self


class ProfileRequest(_Stored):
    """A model whose layers are to be profiled; only `model_id` has no default.

    Attributes:
        model_id: `namespace/name` on the Hub, or `local/NAME` in the operator's models folder.
        revision: branch, tag or commit of a repository on the Hub.
        calibration: the calibration data.
        options: settings of the method; a later job takes the profile over if those that a profile depends on are the
            same.
        metadata: the client's own labels: at most 16, keys up to 64 and values up to 512 characters.
        queue: which workers run it, `cpu` or `gpu`; null takes the server's default.
    """

    model_id: Annotated[str, AfterValidator(_model_id)]
    revision: Annotated[str, AfterValidator(_revision)] | None = None
    calibration: CalibrationRequest = CalibrationRequest()
    options: JobOptions = Field(default_factory=JobOptions)
    metadata: _Labels = Field(default_factory=dict)
    queue: Queue | None = None

    @model_validator(mode="after")
    def _settings_agree(self) -> "ProfileRequest":
        try:
            self.job_request()
        except ValidationError as error:
            raise ValueError(error.errors(include_input=False)[0]["msg"].removeprefix("Value error, ")) from None
        return self

    def job_request(self) -> JobRequest:
        """The job that does it."""
        return JobRequest.model_validate(self.model_dump())


class AllocationRequest(_Frozen):
    """How small a profiled model shall be; one of the three.

    Attributes:
        ratio: fraction of the compressible parameters, or bytes as the profile's budget counts, to remove, [0, 1).
        model_bytes: most bytes that all weights of the model may take; the best model within it is predicted.
        error: most that the predicted error may be, at least 0, in the measure of the profile's objective; the
            smallest model within it is predicted.
    """

    ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    model_bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    error: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one_is_given(self) -> "AllocationRequest":
        if sum(value is not None for value in (self.ratio, self.model_bytes, self.error)) != 1:
            raise ValueError("give one of ratio, model_bytes and error")
        return self


def _require_storable(data: Any) -> None:
    # No recursion: what was sent may be nested deeper than calls can be.
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += (*value.keys(), *value.values())
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str) and ("\x00" in value or any("\ud800" <= letter <= "\udfff" for letter in value)):
            raise ValueError("text holds a NUL or half a surrogate pair, which cannot be stored")
