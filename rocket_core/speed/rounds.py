"""Measurement of several models in turns."""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median

from rocket_core.errors import InsufficientMemoryError, InvalidConfigError, UnsupportedArchitectureError
from rocket_core.report.speed import ModelSpeed, RoundTimes, SpeedReport, UnmeasuredModel, median_ratio
from rocket_core.schema import FrozenModel
from rocket_core.speed.child import Child, Expected
from rocket_core.speed.messages import Load, Loaded, Measure, Measured
from rocket_core.speed.subjects import Subject
from rocket_core.system.child_process import ChildError
from rocket_core.system.machine import free_machine_memory, gibibytes, processor_name

DEFAULT_PROMPT_TOKENS = 128
DEFAULT_NEW_TOKENS = 64
DEFAULT_ROUNDS = 5
_SEED = 0
_RATE_DIGITS = 6

Step = Callable[[float, str], None]
"""Called with the fraction done, from 0 to 1, and a description of the step; may raise to stop the measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedSettings:
    """How models are measured.

    Attributes:
        prompt_tokens: tokens of the prompt, at least 1; None takes 128, or less if a model's context is shorter.
        new_tokens: tokens to generate, at least 2; None takes 64, or less.
        rounds: rounds that count, at least 1.
        threads: threads on the processor, at least 1.
        device: torch device for transformers; llama.cpp decides by itself.
    """

    prompt_tokens: int | None = None
    new_tokens: int | None = None
    rounds: int = DEFAULT_ROUNDS
    threads: int
    device: str = "auto"

    def __post_init__(self) -> None:
        least = {"prompt_tokens": 1, "new_tokens": 2, "rounds": 1, "threads": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InvalidConfigError(f"{name} is {value}; it must be at least {lowest}")


def measure_speed(
    subjects: Sequence[Subject],
    settings: SpeedSettings,
    *,
    on_step: Step = lambda _share, _what: None,
    check: Callable[[], None] = lambda: None,
) -> SpeedReport:
    """Measure models in turns, each in its own process.

    All are in memory at the same time. In each round every model reads the same random tokens and generates greedily,
    one sequence at a time, without ending early; a first round, in which caches are filled, does not count. Ratios are
    taken within a round, so that whatever else the machine does slows all models alike.

    Args:
        subjects: the models; ratios are to the first that can be measured.
        settings: how to measure.
        on_step: called before every load and every measurement.
        check: called several times a second; may raise to stop the measurement.

    Raises:
        InvalidConfigError: prompt and answer are longer than a model's context.
        InsufficientMemoryError: the models do not fit into memory together.
        UnsupportedArchitectureError: no model can be measured; the message says why.
    """
    _check_memory(subjects)
    with ExitStack() as stack:
        return _Measurement(settings, stack, check).run(subjects, on_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Runner:
    """A loaded model.

    Attributes:
        subject: the model.
        child: its process.
        loaded: what the process says about it.
        answers: measurements of the rounds that count.
    """

    subject: Subject
    child: Child
    loaded: Loaded
    answers: list[Measured]


class _Measurement:
    """One run of `measure_speed`, whose processes end with the stack."""

    def __init__(self, settings: SpeedSettings, stack: ExitStack, check: Callable[[], None]) -> None:
        self._settings = settings
        self._stack = stack
        self._check = check
        self._unmeasured: list[UnmeasuredModel] = []

    def run(self, subjects: Sequence[Subject], on_step: Step) -> SpeedReport:
        """Load all models, measure all rounds, and return the report."""
        # The round that does not count is one more.
        steps = len(subjects) * (2 + self._settings.rounds)
        done = iter(range(steps))

        def step(what: str) -> None:
            on_step(next(done) / steps, what)

        runners: list[_Runner] = []
        for subject in subjects:
            step(f"{subject.name}, loading")
            self._load(subject, runners)
        request = self._request(runners)
        for number in range(1 + self._settings.rounds):
            for runner in tuple(runners):
                step(f"{runner.subject.name}, round {number} of {self._settings.rounds}")
                answer = self._ask(runner.subject, runner.child, request, Measured)
                if answer is None:
                    runners.remove(runner)
                elif number > 0:
                    runner.answers.append(answer)
        return self._report(runners, request)

    def _load(self, subject: Subject, runners: list[_Runner]) -> None:
        settings = self._settings
        child = self._stack.enter_context(closing(Child(_environment(settings), self._check)))
        load = Load(
            subject=subject,
            device=settings.device,
            threads=settings.threads,
            context=(settings.prompt_tokens or DEFAULT_PROMPT_TOKENS) + (settings.new_tokens or DEFAULT_NEW_TOKENS),
        )
        loaded = self._ask(subject, child, load, Loaded)
        if loaded is not None:
            runners.append(_Runner(subject=subject, child=child, loaded=loaded, answers=[]))

    def _ask(self, subject: Subject, child: Child, request: FrozenModel, expected: type[Expected]) -> Expected | None:
        """Return the answer of a model's process; None if the model cannot be measured, which ends the process."""
        try:
            return child.ask(request, expected)
        except ChildError as error:
            child.close()
            self._unmeasured.append(UnmeasuredModel(name=subject.name, form=subject.form, reason=str(error)))
            return None

    def _request(self, runners: Sequence[_Runner]) -> Measure:
        """Return what all models are asked in every round."""
        self._check_any(runners)
        prompt_tokens, new_tokens = self._settings.prompt_tokens, self._settings.new_tokens
        limits = [(runner.subject.name, runner.loaded.positions) for runner in runners]
        shortest = min((limit for _, limit in limits if limit is not None), default=sys.maxsize)
        # Defaults yield to a short context, and leave room for what was asked for.
        if new_tokens is None:
            new_tokens = min(DEFAULT_NEW_TOKENS, max(2, shortest - (prompt_tokens or shortest // 2)))
        if prompt_tokens is None:
            prompt_tokens = min(DEFAULT_PROMPT_TOKENS, max(1, shortest - new_tokens))
        for name, limit in limits:
            if limit is not None and prompt_tokens + new_tokens > limit:
                raise InvalidConfigError(
                    f"{prompt_tokens} tokens of prompt and {new_tokens} new ones are more than the {limit} that "
                    f"{name} can attend to; ask for fewer"
                )
        vocabulary = min(runner.loaded.vocabulary for runner in runners)
        draw = random.Random(_SEED)  # noqa: S311 - repeatable, not secret
        return Measure(prompt=tuple(draw.randrange(vocabulary) for _ in range(prompt_tokens)), new_tokens=new_tokens)

    def _check_any(self, runners: Sequence[_Runner]) -> None:
        if not runners:
            reasons = "; ".join(f"{model.name}: {model.reason}" for model in self._unmeasured)
            raise UnsupportedArchitectureError(f"no model can be measured: {reasons}")

    def _report(self, runners: Sequence[_Runner], request: Measure) -> SpeedReport:
        self._check_any(runners)
        reference = [answer.times for answer in runners[0].answers]
        return SpeedReport(
            prompt_tokens=len(request.prompt),
            new_tokens=request.new_tokens,
            rounds=self._settings.rounds,
            threads=self._settings.threads,
            processor=processor_name(),
            models=tuple(_speed(runner, reference, request) for runner in runners),
            unmeasured=tuple(self._unmeasured),
        )


def _speed(runner: _Runner, reference: Sequence[RoundTimes], request: Measure) -> ModelSpeed:
    times = [answer.times for answer in runner.answers]
    prompt, generation = ([one.prompt_seconds for one in times], [one.generation_seconds for one in times])
    return ModelSpeed(
        name=runner.subject.name,
        form=runner.subject.form,
        runtime=runner.subject.runtime,
        packing=runner.subject.packing,
        device=runner.loaded.device,
        dtype=runner.loaded.dtype,
        stored_bytes=runner.subject.stored_bytes,
        memory_bytes=runner.answers[-1].memory_bytes,
        weights_bytes=runner.answers[-1].weights_bytes,
        load_seconds=round(runner.loaded.seconds, 3),
        prompt_rate=_rate(len(request.prompt), prompt),
        # The first token belongs to the prompt.
        generation_rate=_rate(request.new_tokens - 1, generation),
        prompt_ratio=median_ratio([one.prompt_seconds for one in reference], prompt),
        generation_ratio=median_ratio([one.generation_seconds for one in reference], generation),
    )


def _rate(tokens: int, seconds: Sequence[float]) -> float:
    return float(f"{median(tokens / one for one in seconds):.{_RATE_DIGITS}g}")


def _environment(settings: SpeedSettings) -> Mapping[str, str]:
    threads = {name: str(settings.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return threads | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _check_memory(subjects: Sequence[Subject]) -> None:
    needed, free = sum(subject.stored_bytes for subject in subjects), free_machine_memory()
    if free is not None and needed > free:
        raise InsufficientMemoryError(
            f"the models take at least {gibibytes(needed)} of memory together, {gibibytes(free)} are free; measure "
            "fewer at a time"
        )
