"""Zero-shot tasks with EleutherAI's lm-evaluation-harness, installed by the extra `evaluation`.

A task is one of `HUB_TASKS`, whose items the harness downloads from the Hub, or a local JSON Lines file with items

    {"context": "...", "choices": ["...", ...], "gold": 0}      is the gold choice the most likely continuation?
    {"context": "...", "continuation": "..."}                   is each token of the continuation the most likely?

A continuation is appended to its context verbatim, so it must begin with a space where one is needed. Other keys are
ignored.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints, ValidationError, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rocket_core.config import HUB_TASKS
from rocket_core.errors import HubUnavailableError, InvalidConfigError
from rocket_core.models.pretrained import using
from rocket_core.report.quality import TaskScore
from rocket_core.schema import FrozenModel

TASK_SUFFIX = ".jsonl"

_SPLIT = "test"
_FOLDERS = {"arc_challenge": "arc", "arc_easy": "arc", "boolq": "super_glue/boolq", "lambada_openai": "lambada"}
_METRICS: tuple[str, ...] = ("acc", "acc_norm")
_Text = Annotated[str, StringConstraints(min_length=1)]


class TaskItem(FrozenModel):
    """One item of a local task, with either `choices` and `gold`, or `continuation`."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    context: str
    """text that the model reads."""
    choices: Annotated[tuple[_Text, ...], Field(min_length=2)] | None = None
    """at least two continuations."""
    gold: Annotated[int, Field(ge=0)] | None = None
    """index of the correct choice, from 0."""
    continuation: _Text | None = None
    """the single continuation."""

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> "TaskItem":
        if (self.choices is None) == (self.continuation is None):
            raise ValueError("either choices or continuation is needed")
        if self.choices is not None and (self.gold is None or self.gold >= len(self.choices)):
            raise ValueError("gold must be the number of a choice, from 0")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task with its items loaded.

    Attributes:
        name: name in reports: the harness's name, or the file name without suffix.
        implementation: the harness's task object.
    """

    name: str
    implementation: Any


def load_tasks(names: Sequence[str]) -> tuple[Task, ...]:
    """Load tasks and their items.

    Args:
        names: names in `HUB_TASKS`, and paths of local `.jsonl` files.

    Raises:
        InvalidConfigError: the harness is not installed, a task is unknown or malformed, or two have the same name.
        HubUnavailableError: a data set cannot be downloaded from the Hub.
    """
    if not names:
        return ()
    local = {name: _read_items(name) for name in names if name not in HUB_TASKS}
    titles = [Path(name).stem if name in local else name for name in names]
    twice = {title for title in titles if titles.count(title) > 1}
    if twice:
        raise InvalidConfigError(f"two tasks are called {min(twice)}; rename one of the files, or leave one out")
    if find_spec("lm_eval") is None:
        raise InvalidConfigError(
            "zero-shot tasks need lm-evaluation-harness, which is not installed here: "
            "pip install 'rocket-compress[evaluation]', or leave tasks out"
        )
    from lm_eval.tasks import TaskManager

    with _quiet():
        manager = TaskManager(include_defaults=False, include_path=_folders(names))
        return tuple(
            Task(name=title, implementation=_load(manager, title, local.get(name)))
            for name, title in zip(names, titles, strict=True)
        )


def score_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    *,
    items: int | None,
    batch_size: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[TaskScore, ...]:
    """Score a causal language model on zero-shot tasks, as defined by the harness.

    Args:
        model: on its device; in evaluation mode; not modified.
        tokenizer: its tokenizer.
        tasks: from `load_tasks`.
        items: number of items of each task, from the beginning; None takes all.
        batch_size: continuations per call of the model, >= 1.
        on_progress: called before each call of the model with the numbers of continuations read, and of all; may raise
            to stop the evaluation.

    Returns:
        Accuracies, in the order of the tasks.
    """
    if not tasks:
        return ()
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
        wrapped.tok_encode = functools.partial(_encode, tokenizer, wrapped.tok_encode)
        with _progress(model, wrapped, on_progress):
            answer: Any = evaluate(
                lm=wrapped,
                task_dict={"tasks": {task.name: task.implementation for task in tasks}, "groups": {}},
                limit=items,
                bootstrap_iters=0,
                log_samples=False,
            )
    return tuple(score for task in tasks for score in _scores(task.name, answer))


@contextmanager
def _progress(model: PreTrainedModel, wrapped: Any, on_progress: Callable[[int, int], None]) -> Iterator[None]:
    """Call a function before each call of a model by the harness, in place of the harness's progress bar."""
    done = total = 0
    compute = wrapped.loglikelihood

    def loglikelihood(requests: list[Any]) -> Any:
        nonlocal total
        total += len(requests)
        return compute(requests, disable_tqdm=True)

    def before_call(_model: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        nonlocal done
        on_progress(done, total)
        done += len(arguments[0])

    wrapped.loglikelihood = loglikelihood
    hook = model.register_forward_pre_hook(before_call)
    try:
        yield
    finally:
        hook.remove()


def _encode(
    tokenizer: PreTrainedTokenizerBase, encode: Callable[..., list[int]], text: str, **options: Any
) -> list[int]:
    with using(tokenizer, len(text)):
        return encode(text, **options)


def _scores(task: str, answer: Mapping[str, Any]) -> Iterator[TaskScore]:
    results, items = answer["results"][task], int(answer["n-samples"][task]["effective"])
    for metric in _METRICS:
        value = results.get(f"{metric},none")
        if value is not None:
            yield TaskScore(task=task, metric=metric, value=float(value), items=items)


def _read_items(name: str) -> list[TaskItem]:
    path = Path(name)
    if path.suffix.lower() != TASK_SUFFIX or not path.is_file():
        raise InvalidConfigError(
            f"unknown task {name!r}; choose one of {', '.join(HUB_TASKS)}, or the path of a {TASK_SUFFIX} file"
        )
    items: list[TaskItem] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            items.append(_item(line, f"{path}, line {number}"))
    kinds = {item.choices is None for item in items}
    if len(kinds) != 1:
        what = "holds both choices and continuations; split it" if items else "holds no item; give it at least one"
        raise InvalidConfigError(f"task file {path} {what}")
    return items


def _item(line: bytes, where: str) -> TaskItem:
    try:
        return TaskItem.model_validate(json.loads(line))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise InvalidConfigError(f"{where} is not an item of a task: {place} {problem['msg']}") from error
    except ValueError as error:
        raise InvalidConfigError(f'{where} is not a JSON object such as {{"context": ..., "choices": ...}}') from error


def _load(manager: Any, title: str, items: list[TaskItem] | None) -> Any:
    try:
        loaded = manager.load([title if items is None else _local_config(title, items)])
    except (OSError, ValueError, RuntimeError) as error:
        if items is not None:
            raise
        raise HubUnavailableError(
            f"the items of task {title} cannot be had from the Hub ({type(error).__name__}); try again later, or give "
            f"a local {TASK_SUFFIX} file"
        ) from error
    task = loaded["tasks"][title]
    task.set_config(key="num_fewshot", value=0)
    return task


def _folders(names: Sequence[str]) -> list[str]:
    """Return the folders of the harness's task descriptions; its index of all tasks takes a minute to read."""
    from lm_eval import tasks

    root = Path(tasks.__file__).parent
    return [str(root / folder) for folder in sorted({_FOLDERS.get(name, name) for name in names if name in HUB_TASKS})]


def _local_config(title: str, items: list[TaskItem]) -> dict[str, Any]:
    from datasets import Dataset

    rows = Dataset.from_list([item.model_dump(exclude_none=True) for item in items])
    if items[0].choices is None:
        metrics, kind = _METRICS[:1], {"output_type": "loglikelihood", "doc_to_target": "{{continuation}}"}
    else:
        metrics = _METRICS
        kind = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
    return kind | {
        "task": title,
        "custom_dataset": lambda **_: {_SPLIT: rows},
        "test_split": _SPLIT,
        "doc_to_text": "{{context}}",
        "target_delimiter": "",
        "num_fewshot": 0,
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's output to stderr, which contains nothing that the caller does not know."""
    from lm_eval.api import task as harness_task

    logger = logging.getLogger("lm_eval")
    level, bar = logger.level, harness_task.tqdm
    logger.setLevel(logging.ERROR)
    # This progress bar cannot be disabled by an option.
    harness_task.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        harness_task.tqdm = bar
        logger.setLevel(level)
