"""Conversion of submitted forms to requests of the API."""

import hmac
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeVar, get_args

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from app.pages.form_bodies import FormDep
from app.services.access import Caller
from app.shared.errors import PermissionDeniedError
from app.shared.requests import CompressionRequest, EvaluationRequest, JobRequest, ProfileRequest
from rocket_core.engines import ENGINES, ROCKET, Engine
from rocket_core.sizes.target import LossMeasure, parse_size
from rocket_core.sizes.token_counts import parse_context, parse_tokens

# The form field of each bound of `accept` but the one for tasks, which the form does not offer.
_BOUNDS = {"max_kl": "accept_kl", "max_perplexity_increase": "accept_perplexity_increase"}
_CSRF_HEADER = "x-csrf-token"
# The form field of each member of a request.
_FIELDS = {
    **{f"calibration.{name}": name for name in ("dataset", "samples", "sequence_length", "seed", "column")},
    **{f"options.{name}": name for name in ("preset", "ignore", "export", "include", "engine", "storage")},
    "options.heal_tokens": "heal",
    "target_bytes": "size",
    "fit.memory_bytes": "fit",
    **{f"fit.{name}": name for name in ("context", "batch", "kv_bits")},
    **dict.fromkeys(get_args(LossMeasure), "loss"),
    "evaluate.dataset": "evaluate_dataset",
    "evaluate.prompts": "prompts",
    **{f"accept.{name}": field for name, field in _BOUNDS.items()},
}

Fields = Mapping[str, str]
Model = TypeVar("Model", bound=BaseModel)


def _fields(request: Request, fields: FormDep) -> dict[str, str]:
    """Return the fields of a form, after checking that it belongs to the caller's session."""
    _check_token(request, request.headers.get(_CSRF_HEADER) or fields.get("csrf", ""))
    return fields


def _check_header(request: Request) -> None:
    """Refuse a request of a page's script that does not belong to the caller's session."""
    if request.method not in {"GET", "HEAD"}:
        _check_token(request, request.headers.get(_CSRF_HEADER, ""))


def _check_token(request: Request, sent: str) -> None:
    caller = request.state.caller
    expected = caller.csrf if isinstance(caller, Caller) else None
    # A caller without a cookie has no session that another site could misuse.
    if expected is not None and not hmac.compare_digest(sent.encode(), expected.encode()):
        raise PermissionDeniedError("this form does not belong to your current session; reload the page")


FieldsDep = Annotated[dict[str, str], Depends(_fields)]
FORM = Depends(_fields)
"""The check of a form whose fields are not read."""
CSRF = Depends(_check_header)


class InvalidFieldsError(Exception):
    """The fields of a form are invalid.

    Args:
        problems: error messages by field; "" is the form as a whole.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(problems.values()))
        self.problems = dict(problems)


def read_compression(fields: Fields) -> CompressionRequest:
    """Return the compression that a form asks for.

    Raises:
        InvalidFieldsError: a field is missing or invalid.
    """
    body = _common(fields)
    match fields.get("target"):
        case "size":
            body["target_bytes"] = _parsed(parse_size, "size", fields)
        case "bits":
            body["bits"] = _number(fields.get("bits", ""))
        case "fit":
            numbers = {name: _number(fields[name]) for name in ("batch", "kv_bits") if fields.get(name)}
            memory, context = _parsed(parse_size, "fit", fields), _parsed(parse_context, "context", fields)
            body["fit"] = {"memory_bytes": memory, "context": context, **numbers}
        case "loss":
            measure = fields.get("loss_measure") or "max_kl"
            body[measure] = _loss(fields.get("loss", ""), measure)
        case _:
            body["ratio"] = _number(fields.get("ratio", ""))
    prompts = prompt_lines(fields)
    if fields.get("evaluate") or prompts:
        body["evaluate"] = {"dataset": fields.get("evaluate_dataset") or "builtin", "prompts": prompts}
    accept = {name: _number(fields[field]) for name, field in _BOUNDS.items() if fields.get(field)}
    if accept and "evaluate" not in body:
        raise InvalidFieldsError({"evaluate": "a bound on the quality needs it measured; choose this as well"})
    if accept:
        body["accept"] = accept
    if fields.get("benchmark"):
        body["benchmark"] = True
    if fields.get("heal"):
        body["options"]["heal_tokens"] = _parsed(parse_tokens, "heal", fields)
    return _validated(CompressionRequest, body)


def read_evaluation(fields: Fields) -> EvaluationRequest:
    """Return the evaluation of a finished job that a form asks for.

    Raises:
        InvalidFieldsError: a field is invalid.
    """
    body: dict[str, Any] = {"prompts": prompt_lines(fields)}
    if fields.get("dataset"):
        body["dataset"] = fields["dataset"]
    if fields.get("answer_tokens"):
        body["answer_tokens"] = _number(fields["answer_tokens"])
    return _validated(EvaluationRequest, body)


def prompt_lines(fields: Fields) -> list[str]:
    """Return the prompts of a form, which has one on each line."""
    lines = (line.strip() for line in fields.get("prompts", "").splitlines())
    return [line for line in lines if line]


def read_profile(fields: Fields) -> JobRequest:
    """Return the profile that a form asks for: of the same candidates as a job's, whose target is ignored.

    Raises:
        InvalidFieldsError: a field is invalid.
    """
    body = _common(fields)
    if _counts_bytes(fields):
        body["options"]["budget"] = "bytes"
    return _validated(ProfileRequest, body).job_request()


def idempotency_key(fields: Fields, request: JobRequest) -> str | None:
    """Return the idempotency key of a form: sent twice it creates one job, sent again with changes another one."""
    form = fields.get("form")
    return f"{form}-{request.fingerprint()[:16]}" if form else None


def lacks_size(fields: Fields) -> bool:
    """Return whether a form asks for a size or bits per weight that are not entered yet."""
    needed = ("fit", "context") if fields.get("target") == "fit" else (fields.get("target", ""),)
    return _counts_bytes(fields) and not all(map(fields.get, needed))


def _counts_bytes(fields: Fields) -> bool:
    return fields.get("target") in {"size", "bits", "fit", "loss"}


def _common(fields: Fields) -> dict[str, Any]:
    options: dict[str, Any] = {"preset": fields.get("preset") or "fast"}
    options |= {name: fields[name] for name in ("engine", "storage") if fields.get(name)}
    if fields.get("ignore"):
        options["ignore"] = fields["ignore"].replace(",", " ").split()
    if fields.get("include"):
        options["include"] = [] if fields["include"] == "none" else fields["include"].split(",")
    engine = next((known for name, known in ENGINES.items() if name == (fields.get("engine") or ROCKET.name)), None)
    if engine is not None:
        options["export"] = _exports(fields.get("export", ""), engine)
    numbers = ("samples", "sequence_length", "seed")
    calibration: dict[str, Any] = {name: _number(fields[name]) for name in numbers if fields.get(name)}
    dataset = fields.get("hub_dataset", "").strip() or fields.get("dataset")
    if dataset:
        calibration["dataset"] = dataset
    if fields.get("column"):
        calibration["column"] = fields["column"]
    if fields.get("skip_bad_rows"):
        calibration["skip_bad_rows"] = True
    if fields.get("unpacked"):
        calibration["pack"] = False
    body: dict[str, Any] = {"model_id": fields.get("model_id", ""), "calibration": calibration, "options": options}
    body |= {name: fields[name] for name in ("revision", "queue") if fields.get(name)}
    labels = {name: fields[name] for name in ("label", "improves") if fields.get(name)}
    if labels:
        body["metadata"] = labels
    return body


def _loss(text: str, measure: str) -> float | str | None:
    """Return the bound on the loss: nats per token, or percent of the perplexity as a fraction."""
    number = _number(text)
    return number / 100 if measure != "max_kl" and isinstance(number, int | float) else number


def _number(text: str) -> float | str | None:
    """Return a field as a number; as text, which is refused with a reason, if it is not one; None if it is empty."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text or None


def _exports(chosen: str, engine: Engine) -> list[str]:
    match chosen:
        case "":
            return [*engine.exports]
        case "both":
            return [*engine.exports, "dense"]
        case _:
            return [chosen]


def _parsed(parse: Callable[[str], int], field: str, fields: Fields) -> int:
    try:
        return parse(fields.get(field, ""))
    except ValueError as error:
        raise InvalidFieldsError({field: str(error)}) from None


def field_of(member: str) -> str:
    """Return the form field for a dotted member of a request; "" for the form as a whole."""
    return _FIELDS.get(".".join(member.split(".")[:2]), "")


def _validated(kind: type[Model], body: Mapping[str, Any]) -> Model:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        messages: dict[str, str] = {}
        for item in error.errors(include_input=False, include_url=False):
            member = ".".join(str(part) for part in item["loc"][:2])
            messages.setdefault(_FIELDS.get(member, member), item["msg"].removeprefix("Value error, "))
        raise InvalidFieldsError(messages) from None
