"""Requests of clients, passed from the API through the database to the worker; the only place that validates them."""

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema

from app.shared.works import WORKS, WorkKind
from rocket_core.config import (
    BUILTIN_DATASET,
    HUB_TASKS,
    SYNTHETIC_DATASET,
    TARGETS_IN_BYTES,
    AcceptanceConfig,
    CompressionConfig,
    HealingTokens,
    Increase,
    MethodOptions,
    compression_config,
    with_evaluation,
)
from rocket_core.engines import ROCKET, ExportKind, LaterExport, NamedExport
from rocket_core.errors import InvalidConfigError
from rocket_core.inspection.files.dataset_names import is_hub_dataset
from rocket_core.schema import FrozenModel
from rocket_core.sizes.memory_fit import MemoryFit
from rocket_core.sizes.target import TARGET_NAMES, BitsPerWeight, ByError, LossMeasure, Target, target_of

LOCAL = "local/"
UPLOAD = "upload/"

Queue = Literal["cpu", "gpu"]
"""The queue, which decides which workers run a job."""
JobKind = Literal["compression", "profile", WorkKind]
"""The kind of a job."""
SOURCE_EXPORT: ExportKind = "rocket"
"""The export that later jobs can heal, and write in other formats."""
QUEUES: tuple[Queue, ...] = get_args(Queue)

# Format of names in the operator's folders, and of each half of a repository id: never a path.
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_MODEL_ID = re.compile(rf"{_NAME}/{_NAME}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")
# Upper bound for every object and list, in addition to its specific limit.
_MAX_MEMBERS = 1024
_MAX_METADATA = 16
_MAX_TASKS = 16
_JOB_ID = r"^job_[0-9a-z]{26}$"
_MAX_PROMPTS = 16
_MAX_PROMPT_CHARACTERS = 4000
_MAX_ANSWER_TOKENS = 512
_UPLOADED = re.compile(rf"{UPLOAD}[0-9a-f]{{32}}")


def _is_fraction(value: Any) -> Any:
    # The bounds alone do not say what to send.
    if isinstance(value, int | float) and value >= 1:
        raise ValueError("should be less than 1; to remove 30 %, write 0.3")
    return value


def _make_strict(schema: Any) -> None:
    if isinstance(schema, dict) and schema.get("type") in {"bool", "float", "int"}:
        schema["strict"] = True
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _make_strict(part)


class RequestModel(FrozenModel):
    """A part of a request."""

    model_config = ConfigDict(hide_input_in_errors=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let no string or Boolean value count as a number, nor a number as a Boolean value."""
        schema = handler(source)
        _make_strict(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _has_few_members(cls, data: Any) -> Any:
        # Before validation: each invalid member would become an error in the response.
        parts = [data, *data.values()] if isinstance(data, dict) and len(data) <= _MAX_MEMBERS else [data]
        if any(isinstance(part, dict | list | tuple) and len(part) > _MAX_MEMBERS for part in parts):
            raise ValueError(f"an object or list has more than {_MAX_MEMBERS} members; send fewer")
        return data


def check_model_id(text: str) -> str:
    """Return the id of a model, if it is valid; raises ValueError."""
    # The Hub refuses "--" and ".." in a repository id; ".." could also leave a folder.
    if not _MODEL_ID.fullmatch(text) or "--" in text or ".." in text or text.endswith(".git"):
        raise ValueError(
            "is not a valid model id; use `namespace/name` (Hub), or `local/NAME` or `upload/NAME` (see GET /models)"
        )
    return text


def _repository(text: str) -> str:
    if not _MODEL_ID.fullmatch(text) or "--" in text or ".." in text or text.endswith(".git"):
        raise ValueError("is not a name of a repository on the Hub; use `namespace/name`")
    return text


def _revision(text: str) -> str:
    if not _REVISION.fullmatch(text) or ".." in text:
        raise ValueError("is not a valid branch, tag or commit")
    return text


def _dataset(text: str) -> str:
    local = text.startswith(LOCAL) and ".." not in text and _MODEL_ID.fullmatch(text)
    on_hub = is_hub_dataset(text) and not text.startswith((LOCAL, UPLOAD))
    if text not in (BUILTIN_DATASET, SYNTHETIC_DATASET) and not on_hub and not local and not _UPLOADED.fullmatch(text):
        raise ValueError(
            "is not a calibration dataset; GET /calibrations lists those of this server, and namespace/name:split is "
            "one on the Hub"
        )
    return text


def _task(text: str) -> str:
    local = text.startswith(LOCAL) and ".." not in text and text.endswith(".jsonl") and _MODEL_ID.fullmatch(text)
    if text not in HUB_TASKS and not local:
        raise ValueError(
            f"is not a task; choose one of {', '.join(HUB_TASKS)}, or local/FILE.jsonl of GET /calibrations"
        )
    return text


class CalibrationRequest(RequestModel):
    """The data that the model is calibrated on."""

    dataset: Annotated[str, AfterValidator(_dataset)] = BUILTIN_DATASET
    """for text `builtin`, a name of `GET /calibrations`, `namespace/name:split` or `namespace/name/config:split` on the
    Hub, `local/FILE` with its suffix, `local/FOLDER` of `.txt` and `.md` files, or `upload/ID`; for images or audio
    `local/FOLDER`, or `synthetic`, a stand-in that costs quality.
    """
    samples: Annotated[int, Field(ge=1, le=65536)] = 256
    """number of token windows, images, or audio windows, 1 to 65,536; 256 by default."""
    sequence_length: Annotated[int, Field(ge=2, le=2**20)] | None = None
    """tokens per window of text, at least 2; null (the default) uses 256 or the model's maximum length, whichever is
    less. Not used for images.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed for drawing samples, 0 (the default) to 2⁶³ - 1."""
    column: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """column of the rows that holds the text, or a list of messages; null (the default) takes `text`, or a chat of
    `messages`, `conversations`, `instruction` and `output`, or `prompt` and `completion`, which the model's chat
    template renders.
    """
    skip_bad_rows: bool = False
    """whether rows without text, and chats that the chat template refuses, are skipped and counted in the report; by
    default they end the job.
    """
    pack: bool = True
    """whether texts are concatenated and cut into windows, as by default; otherwise each starts a new window
    length, for models that predict the next token.
    """


class StoredRequest(RequestModel):
    """A request that becomes part of a row."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_storable(cls, data: Any) -> Any:
        # Postgres can store neither NUL nor lone surrogates, and JSON can contain both.
        _require_storable(data)
        return data


class WorkRequest(StoredRequest):
    """A request for a job that works on the result of an earlier one."""

    kind: ClassVar[WorkKind]

    @property
    def members(self) -> dict[str, Any]:
        """Members of the job's request that this work adds, or changes in part."""
        return {}

    def job_request(
        self, job_id: str, original: "JobRequest", revision: str | None, *, queue: Queue | None = None
    ) -> "JobRequest":
        """Return the request of the job that does the work.

        Args:
            job_id: the earlier job.
            original: its request.
            revision: commit of the repository that it compressed; None for a local model.
            queue: the queue that it ran in, for work that cannot choose one.
        """
        changed = original.model_dump() | {
            "revision": revision,
            "evaluate": None,
            "accept": None,
            "benchmark": False,
            "metadata": getattr(self, "metadata", {}),
            "queue": getattr(self, "queue", queue) or original.queue,
            "source_job_id": job_id,
            "on_source": self.kind,
            "export_to": None,
            "push": None,
        }
        for name, own in self.members.items():
            changed[name] = own if changed[name] is None else changed[name] | own
        return JobRequest.model_validate(changed)


class EvaluationRequest(WorkRequest):
    """How the result is compared with the dense model, once its files are written.

    It does not change the artifacts. Unlike a compression, which holds one block, it needs memory for the whole model,
    and disk for the dense model's logits (predicted tokens times vocabulary) while it runs.
    """

    kind: ClassVar[WorkKind] = "evaluation"

    dataset: Annotated[str, AfterValidator(_dataset)] = BUILTIN_DATASET
    """text to predict, named like `calibration.dataset`; `builtin` (the default) is 36,000 characters that are never
    calibrated on. If it is the calibration's own dataset, the documents after the last calibrated one are read; other
    files are read from the beginning.
    """
    samples: Annotated[int, Field(ge=1, le=65536)] = 64
    """windows (sentences for an encoder), 1 to 65,536, 64 by default, fewer if the text is shorter; each costs two
    forward passes.
    """
    sequence_length: Annotated[int, Field(ge=2, le=2**20)] | None = None
    """tokens per window, at least 2; null (the default) uses 1024 or the model's maximum length, whichever is less."""
    stride: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """tokens between the starts of consecutive windows, 1 to `sequence_length`; every token is predicted once, from at
    least `sequence_length - stride` tokens before it. Null (the default) is `sequence_length`, the cheapest; half of it
    needs twice the windows for the same text.
    """
    tasks: Annotated[tuple[Annotated[str, AfterValidator(_task)], ...], Field(max_length=_MAX_TASKS)] = ()
    """zero-shot tasks of lm-evaluation-harness, none by default: `arc_easy`, `lambada_openai`, ... or
    `local/FILE.jsonl` in the operator's datasets folder; each costs a forward pass per choice of each item, for both
    models. The worker needs the extra `evaluation`.
    """
    task_items: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """items read of each task, at least 1; null (the default) reads all."""
    prompts: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=_MAX_PROMPT_CHARACTERS)], ...],
        Field(max_length=_MAX_PROMPTS),
    ] = ()
    """texts that both models answer with the most likely token each time, at most 16 of up to 4,000 characters, none by
    default. A model with a chat template reads them as a user's message, another one continues them.
    """
    answer_tokens: Annotated[int, Field(ge=1, le=_MAX_ANSWER_TOKENS)] = 64
    """tokens of the longest answer to a prompt, 1 to 512, 64 by default."""

    @property
    def members(self) -> dict[str, Any]:
        """How the result is compared."""
        return {"evaluate": self.model_dump()}


class AcceptanceRequest(AcceptanceConfig, RequestModel):
    """What the measured result must meet to be accepted: at least one bound. The result is kept in any case."""


# Members of several requests, with their descriptions.
_ModelId = Annotated[
    str,
    AfterValidator(check_model_id),
    Field(
        description="`namespace/name` on the Hub, `local/NAME` in the operator's models folder, or your own "
        "`upload/NAME`."
    ),
]
_Revision = Annotated[
    Annotated[str, AfterValidator(_revision)] | None,
    Field(description="branch, tag or commit of a repository on the Hub."),
]
_Repository = Annotated[
    str, AfterValidator(_repository), Field(description="`namespace/name` on the Hub; created if necessary.")
]
_Labels = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(
        max_length=_MAX_METADATA,
        description="the client's own labels: at most 16, keys up to 64 and values up to 512 characters.",
    ),
]
_QueueChoice = Annotated[
    Queue | None, Field(description="which workers run it, `cpu` or `gpu`; null uses the server's default.")
]


# A job's record has the values of its preset, whatever the presets of a later version contain.
class JobOptions(MethodOptions, RequestModel):
    """How to compress."""


class PushTarget(RequestModel):
    """Where a result is pushed to."""

    repository: _Repository
    private: bool = False
    """whether the repository must be private; an existing public one is refused then."""
    export: NamedExport
    """the export whose files are pushed."""


# Members of a job's request that are null by default, and that earlier versions lacked.
_NULLABLE = (
    *("queue", "evaluate", "accept", "target_bytes", "bits", "fit", "max_kl", "max_perplexity_increase"),
    *("source_job_id", "on_source", "export_to", "push"),
)


class FitRequest(MemoryFit, RequestModel):
    """The memory that weights, context and engine have to fit into."""


class JobRequest(StoredRequest):
    """The work of a job: with a target it compresses a model, without one it profiles the model's layers.

    With `source_job_id` it heals or evaluates the result of the job that has compressed the model in this way, writes
    it in another format, or pushes it to the Hub.
    """

    model_id: _ModelId
    revision: _Revision = None
    ratio: Annotated[float, Field(ge=0, lt=1), BeforeValidator(_is_fraction)] | None = None
    """fraction of the compressible parameters to remove, [0, 1)."""
    target_bytes: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """upper bound on the bytes of the artifact that the option `engine` reads, in place of a ratio: of all safetensors
    files, or of the GGUF file with everything in it. With it the option `budget` is `bytes`.
    """
    bits: BitsPerWeight | None = None
    """upper bound on the bits per weight of the compressible layers as stored, (0, 16], in place of a ratio; codes,
    scales, masks and factors are counted, biases and the rest of the model are not. With it the option `budget` is
    `bytes`. The methods `rtn` and `gptq` take the option `code_bits` instead.
    """
    fit: FitRequest | None = None
    """memory that the weights have to fit into together with keys and values of a context and an allowance for the
    option `engine`, in place of a ratio; what is left for the weights is a size like `target_bytes`, and `POST
    /estimates` shows the division. With it the option `budget` is `bytes`.
    """
    max_kl: Annotated[float, Field(gt=0)] | None = None
    """most KL divergence from the original, in nats per token, above 0, with files as small as possible, in place of a
    ratio. Sizes are compressed and measured as `evaluate` says, which is filled in if it is left out: with the
    calibration's own dataset, whose documents after the last calibrated one are read. With it the option `budget` is
    `bytes`. For models that predict tokens.
    """
    max_perplexity_increase: Increase | None = None
    """most increase of the perplexity, as a fraction of that of the original, above 0 and less than 1, in place of a
    ratio; otherwise like `max_kl`.
    """
    calibration: CalibrationRequest = CalibrationRequest()
    """the calibration data."""
    evaluate: EvaluationRequest | None = None
    """how the result is compared with the dense model; null (the default) for no evaluation."""
    accept: AcceptanceRequest | None = None
    """bounds on what `evaluate` measures, which decide the verdict in the job's `result`; null (the default) for no
    verdict. For models that predict tokens.
    """
    benchmark: bool = False
    """whether speed and memory of the original and of each artifact are measured in the end; false by default. Needs
    memory for all of them together, and the time of 7 prompts of 128 tokens and answers of 64 with each.
    """
    options: JobOptions = Field(default_factory=JobOptions)
    """settings of the method."""
    metadata: _Labels = Field(default_factory=dict)
    queue: _QueueChoice = None
    source_job_id: Annotated[Annotated[str, Field(pattern=_JOB_ID)] | None, SkipJsonSchema()] = None
    """the earlier job whose artifact it works on; set by the service, never by a client."""
    on_source: Annotated[WorkKind | None, SkipJsonSchema()] = None
    """what it does with that artifact; set by the service as well."""
    export_to: Annotated[LaterExport | None, SkipJsonSchema()] = None
    """the format that it writes that artifact in; set by the service as well."""
    push: Annotated[PushTarget | None, SkipJsonSchema()] = None
    """where it pushes that artifact; set by the service as well."""

    @model_validator(mode="before")
    @classmethod
    def _target_counts_bytes(cls, data: Any) -> Any:
        # In the options as well: a profile is found by those that are stored with it.
        options = data.get("options", {}) if isinstance(data, dict) else None
        if isinstance(options, dict) and any(data.get(name) is not None for name in TARGETS_IN_BYTES):
            return {**data, "options": {**options, "budget": "bytes"}}
        return data

    @model_validator(mode="before")
    @classmethod
    def _bounds_are_measured(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("evaluate") is not None or data.get("on_source") is not None:
            return data
        if all(data.get(name) is None for name in get_args(LossMeasure)):
            return data
        calibration = data.get("calibration")
        given = calibration.get("dataset") if isinstance(calibration, dict) else None
        return {**data, "evaluate": {"dataset": given or BUILTIN_DATASET}}

    @model_validator(mode="after")
    def _settings_agree(self) -> "JobRequest":
        if self.revision is not None and not self.is_on_hub:
            raise ValueError("only models on the Hub have a revision; leave it out")
        if (self.source_job_id is None) != (self.on_source is None):
            raise ValueError("source_job_id and on_source belong together")
        if (self.on_source == "export") != (self.export_to is not None):
            raise ValueError("export_to belongs to a job that writes another format")
        if (self.on_source == "push") != (self.push is not None):
            raise ValueError("push belongs to a job that pushes to the Hub")
        try:
            config = self.compression_config()
            if self.on_source is None:
                with_evaluation(config)
        except InvalidConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def compression_config(self, **operator: object) -> CompressionConfig:
        """Return the library's settings for this job.

        Args:
            operator: settings that the operator decides (`device`, ...), and where the worker knows paths, the
                `dataset`, and for `evaluate` the `dataset` and the `tasks`.

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
            bits=self.bits,
            fit=None if self.fit is None else self.fit.model_dump(),
            max_kl=self.max_kl,
            max_perplexity_increase=self.max_perplexity_increase,
            calibration=calibration,
            evaluate=evaluate,
            accept=None if self.accept is None else self.accept.model_dump(),
            benchmark=self.benchmark,
            **self.options.model_dump(),
            **operator,
        )

    @property
    def kind(self) -> JobKind:
        """The kind of the job."""
        if self.on_source is not None:
            return self.on_source
        return "profile" if self.target is None else "compression"

    @property
    def source_export(self) -> ExportKind:
        """The export of the earlier job that it works on."""
        if self.push is not None:
            return self.push.export
        return self.compression_config().evaluated_export if self.on_source == "evaluation" else SOURCE_EXPORT

    @property
    def reads_model(self) -> bool:
        """Whether it reads the model itself, and not only an artifact."""
        return self.on_source is None or WORKS[self.on_source].reads_model

    @property
    def reads_calibration(self) -> bool:
        """Whether it reads the calibration data."""
        return self.on_source is None or WORKS[self.on_source].reads_calibration

    @property
    def makes_result(self) -> bool:
        """Whether it publishes a report and files."""
        return self.kind != "profile" if self.on_source is None else WORKS[self.on_source].makes_result

    @property
    def pushes(self) -> bool:
        """Whether it pushes the files of an earlier job to the Hub."""
        return self.on_source is not None and WORKS[self.on_source].pushes

    @property
    def target(self) -> Target | None:
        """The target; None if layers are only to be profiled."""
        return self.compression_config().target

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of all datasets that the job reads, the calibration's first."""
        reads = self.reads_calibration and self.options.calibrates
        calibrated = (self.calibration.dataset,) if reads else ()
        return calibrated if self.evaluate is None else (*calibrated, self.evaluate.dataset)

    @property
    def local_tasks(self) -> tuple[str, ...]:
        """Names of the zero-shot tasks in the operator's folder."""
        tasks = () if self.evaluate is None else self.evaluate.tasks
        return tuple(task for task in tasks if task.startswith(LOCAL))

    @property
    def is_on_hub(self) -> bool:
        """Whether the model is on the Hub, and not on this server."""
        return not self.model_id.startswith((LOCAL, UPLOAD))

    @property
    def uploaded_model(self) -> str | None:
        """Name of the uploaded model; None if the model is from elsewhere."""
        return self.model_id.removeprefix(UPLOAD) if self.model_id.startswith(UPLOAD) else None

    @property
    def asks_the_hub(self) -> bool:
        """Whether the model, a text or a task that the job reads comes from the Hub, or the result goes there."""
        tasks = () if self.evaluate is None else self.evaluate.tasks
        from_hub = any(is_hub_dataset(name) for name in self.datasets) or any(task in HUB_TASKS for task in tasks)
        return self.pushes or (self.reads_model and self.is_on_hub) or from_hub

    def fingerprint(self) -> str:
        """Return the SHA-256 of the request; spelling out a default does not change it."""
        # Members that did not exist in earlier versions are left out: a replay may follow an upgrade.
        newer: dict[str, Any] = {name: True for name in _NULLABLE if getattr(self, name) is None}
        if self.evaluate is not None and not self.evaluate.prompts:
            newer["evaluate"] = {"prompts", "answer_tokens"}
        if not self.benchmark:
            newer["benchmark"] = True
        rows = {"column": None, "skip_bad_rows": False, "pack": True}
        newer["calibration"] = {name for name, usual in rows.items() if getattr(self.calibration, name) == usual}
        newer["options"] = {
            name
            for name in ("code_bits", "group_size", "include", "heal_tokens")
            if getattr(self.options, name) is None
        }
        later = {
            "storage": "file",
            "engine": "rocket",
            "value_bits": 16,
            "calibrate_all_experts": False,
            "refine": False,
            "token_weights": "gradient" if self.options.objective == "fisher" else "none",
        }
        for name, default in later.items():
            if getattr(self.options, name) == default:
                newer["options"].add(name)
        return hashlib.sha256(self.model_dump_json(exclude=newer).encode()).hexdigest()

    def earlier_fingerprint(self) -> str:
        """Return the fingerprint that version 0.1.0 stored for the same body, where one without exports asked for two.

        A replay that follows the upgrade is recognized by it.
        """
        if "export" in self.options.model_fields_set:
            return self.fingerprint()
        options = self.options.model_copy(update={"export": ROCKET.readable})
        return self.model_copy(update={"options": options}).fingerprint()


class CompressionRequest(JobRequest):
    """A compression to run: a `model_id`, and one target; everything else has a default.

    A target is one of `ratio`, `target_bytes`, `bits`, `fit`, `max_kl` and `max_perplexity_increase`.
    """

    @model_validator(mode="after")
    def _has_a_target(self) -> "CompressionRequest":
        if self.source_job_id is not None or self.on_source is not None:
            raise ValueError(
                "source_job_id and on_source are set by the service; use POST /jobs/{id}/healings, /evaluations, "
                "/exports or /pushes"
            )
        if self.kind == "profile":
            raise ValueError(f"specify one of {TARGET_NAMES}")
        return self


class ProfileRequest(StoredRequest):
    """A model whose layers are to be profiled; only `model_id` is required."""

    model_id: _ModelId
    revision: _Revision = None
    calibration: CalibrationRequest = CalibrationRequest()
    """the calibration data."""
    options: JobOptions = Field(default_factory=JobOptions)
    """settings of the method; a later job reuses the profile if the options that it depends on are the same."""
    metadata: _Labels = Field(default_factory=dict)
    queue: _QueueChoice = None

    @model_validator(mode="after")
    def _settings_agree(self) -> "ProfileRequest":
        try:
            request = self.job_request()
        except ValidationError as error:
            raise ValueError(error.errors(include_input=False)[0]["msg"].removeprefix("Value error, ")) from None
        if request.kind != "profile":
            raise ValueError(f"method {self.options.method} allocates nothing and needs no profile: compress the model")
        return self

    def job_request(self) -> JobRequest:
        """Return the request of the job that makes the profile."""
        return JobRequest.model_validate(self.model_dump())


class HealingRequest(WorkRequest):
    """How the result of a job is to be healed; only `tokens` is required."""

    kind: ClassVar[WorkKind] = "healing"

    tokens: HealingTokens
    """tokens to train on; text that has fewer is read again. Time is in proportion."""
    dataset: Annotated[str, AfterValidator(_dataset)] | None = None
    """text to train on, named like `calibration.dataset`; null (the default) takes that of the job's calibration."""
    sequence_length: Annotated[int, Field(ge=2, le=2**20)] | None = None
    """tokens per window; null (the default) takes that of the job's calibration."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """seed of the choice and the order of windows; null (the default) takes that of the job's calibration."""
    metadata: _Labels = Field(default_factory=dict)
    queue: _QueueChoice = None

    @property
    def members(self) -> dict[str, Any]:
        """How many tokens are trained on, and of which text."""
        text = {"dataset": self.dataset, "sequence_length": self.sequence_length, "seed": self.seed}
        given: dict[str, Any] = {name: value for name, value in text.items() if value is not None}
        if self.dataset is not None:
            # They describe the rows of the calibration's own text.
            given |= {"column": None, "skip_bad_rows": False}
        return {"calibration": given, "options": {"heal_tokens": self.tokens}}


class ExportRequest(WorkRequest):
    """The format that the result of a job is to be written in; only `to` is required."""

    kind: ClassVar[WorkKind] = "export"

    to: LaterExport
    """`dense` (stock names and shapes, as large as the original, for any tool that reads the original), `gguf`
    (llama.cpp, Ollama, LM Studio) or `compressed-tensors` (vLLM).
    """
    metadata: _Labels = Field(default_factory=dict)
    queue: _QueueChoice = None

    @property
    def members(self) -> dict[str, Any]:
        """The format."""
        return {"export_to": self.to}


class PushRequest(WorkRequest):
    """The repository that the result of a job is to be pushed to; only `repository` is required."""

    kind: ClassVar[WorkKind] = "push"

    repository: _Repository
    private: bool = False
    """whether the repository must be private; an existing public one is refused then. False by default."""
    export: NamedExport | None = None
    """the export whose files are pushed; null (the default) takes the first that the job has of `rocket`, `gguf`,
    `mlx`, `compressed-tensors`, `olive` and `dense`.
    """
    metadata: _Labels = Field(default_factory=dict)
    queue: _QueueChoice = None

    @property
    def members(self) -> dict[str, Any]:
        """Where which files are pushed to."""
        return {"push": {"repository": self.repository, "private": self.private, "export": self.export}}


WORK_REQUESTS: Mapping[WorkKind, type[WorkRequest]] = {
    request.kind: request for request in (HealingRequest, EvaluationRequest, ExportRequest, PushRequest)
}
"""The request of each kind of work."""


class AllocationRequest(RequestModel):
    """The target of a predicted allocation: exactly one of the four."""

    ratio: Annotated[float, Field(ge=0, lt=1), BeforeValidator(_is_fraction)] | None = None
    """fraction to remove, [0, 1), of the compressible parameters, or of bytes if that is the profile's budget unit."""
    model_bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """upper bound on the bytes of all weights of the model; the best model within it is predicted."""
    bits: BitsPerWeight | None = None
    """upper bound on the bits per weight of the compressible layers as stored, (0, 16]; the best model within it is
    predicted.
    """
    error: Annotated[float, Field(ge=0)] | None = None
    """upper bound on the predicted error, at least 0, in the unit of the profile's objective; the smallest model within
    it is predicted.
    """

    @model_validator(mode="after")
    def _one_is_given(self) -> "AllocationRequest":
        if sum(value is not None for value in (self.ratio, self.model_bytes, self.bits, self.error)) != 1:
            raise ValueError("give one of ratio, model_bytes, bits and error")
        return self

    @property
    def target(self) -> Target | ByError:
        """The target of the prediction."""
        if self.error is not None:
            return ByError(error=self.error)
        target = target_of({"ratio": self.ratio, "target_bytes": self.model_bytes, "bits": self.bits})
        assert target is not None, "one of the four is given"
        return target


def _require_storable(data: Any) -> None:
    # Iterative, as the data may be nested deeper than calls can be.
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += (*value.keys(), *value.values())
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str) and ("\x00" in value or any("\ud800" <= letter <= "\udfff" for letter in value)):
            raise ValueError("text holds a NUL or half a surrogate pair, which cannot be stored")
