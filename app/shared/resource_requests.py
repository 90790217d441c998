"""Requests for models to upload, for webhooks, and for links."""

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from app.shared.requests import UPLOAD, RequestModel, StoredRequest, check_model_id


def _model_name(text: str) -> str:
    try:
        check_model_id(UPLOAD + text)
    except ValueError:
        raise ValueError(
            "is not a valid name for a model; use up to 96 letters, digits, dots, dashes and underscores, without "
            "`--` and `..`, that begin and end with a letter, digit or underscore"
        ) from None
    return text


class AnnouncedFile(RequestModel):
    """A file of a model to upload."""

    path: Annotated[str, Field(min_length=1, max_length=200)]
    """its path in the model's folder, such as `model.safetensors`."""
    size: Annotated[int, Field(ge=0, lt=2**63)]
    """its size in bytes."""


class ModelUploadRequest(StoredRequest):
    """A model to upload: its name, and the files that make it up."""

    name: Annotated[str, AfterValidator(_model_name)]
    """the name that you choose; jobs then use `upload/NAME`."""
    files: Annotated[tuple[AnnouncedFile, ...], Field(min_length=1, max_length=1000)]
    """config.json, safetensors, the files of the tokenizer, licences."""

    @model_validator(mode="after")
    def _files_agree(self) -> "ModelUploadRequest":
        # Some file systems ignore case.
        if len({file.path.lower() for file in self.files}) < len(self.files):
            raise ValueError("two files have the same path; announce each file once")
        # A limit of the database.
        if sum(file.size for file in self.files) >= 2**63:
            raise ValueError("the files have 2^63 bytes or more in total; announce their sizes in bytes")
        return self


WebhookEvent = Literal["job.succeeded", "job.failed", "job.cancelled"]
"""What is reported to a webhook."""


class WebhookRequest(StoredRequest):
    """A webhook to create."""

    url: Annotated[str, Field(min_length=1, max_length=2000)]
    """where deliveries are sent, `https://HOST/PATH` on the public internet unless the operator allows others."""
    events: Annotated[tuple[WebhookEvent, ...], Field(min_length=1, max_length=3)] = get_args(WebhookEvent)
    """the events to report: `job.succeeded`, `job.failed`, `job.cancelled`; all by default."""


class LinkRequest(StoredRequest):
    """A link to create."""

    with_files: bool = False
    """whether the link also gives the files of the job; otherwise only its report."""
