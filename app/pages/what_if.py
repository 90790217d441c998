"""What a profile's page predicts: for a size, for bits per weight, for a loss, or for a ratio."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, assert_never
from urllib.parse import urlencode

from fastapi import Depends, Query

from rocket_core.sizes.target import ByBits, ByBytes, ByLoss, ByRatio

if TYPE_CHECKING:
    from rocket_core.allocation.predictor import Predictor

Choice = Literal["size", "bits", "loss", "ratio"]

_FIRST_RATIO, _FIRST_LOSS = 0.3, 0.02
_MOST_BITS = 16
# Sizes are entered in the largest of these that the model has at least one of.
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
# Steps of a slider, roughly.
_STEPS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What the address asks for; None where it says nothing.

    Attributes:
        choice: which of the numbers counts.
        size: size in the profile's unit.
        bits: bits per weight.
        loss: KL divergence in nats per token.
        ratio: fraction to remove.
    """

    choice: Annotated[Choice | None, Query(alias="target")] = None
    size: Annotated[float | None, Query(gt=0, lt=1e15)] = None
    bits: Annotated[float | None, Query(gt=0, le=_MOST_BITS)] = None
    loss: Annotated[float | None, Query(gt=0, lt=1e6)] = None
    ratio: Annotated[float | None, Query(ge=0, lt=1)] = None


QuestionDep = Annotated[Question, Depends()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slider:
    """A number that can be chosen.

    Attributes:
        choice: what it is.
        least: the least value that is reachable, rounded up; the dense model has `most`, except for a ratio.
        most: the largest value.
        step: step of the slider.
        value: the current value.
    """

    choice: Choice
    least: float
    most: float
    step: float
    value: float

    @property
    def first(self) -> float:
        """Where the slider begins: the first multiple of its step within reach, as it counts its steps from there."""
        steps = math.ceil(self.least / self.step - 1e-9)
        return min(float(f"{steps * self.step:.10g}"), self.most)


class WhatIf:
    """The numbers that can be asked of a profiled model, and the one that is.

    A profile for ratios of parameters has no quantized candidates. It could answer sizes, but a job for a size chooses
    among more candidates, and would not use it.

    Args:
        predictor: the profiled model.
        question: what the address asks for.
        within_reach: replace values out of reach by the nearest ones within.
    """

    def __init__(self, predictor: "Predictor", question: Question, *, within_reach: bool) -> None:
        self._profile = predictor.profile
        self.counts_bytes = self._profile.budget_unit == "bytes"
        self.unit, self._unit_bytes = next(
            (unit for unit in _UNITS if unit[1] <= self._profile.dense_bytes), _UNITS[-1]
        )
        usual: Choice = "size" if self.counts_bytes and question.ratio is None else "ratio"
        sliders = [_slider("ratio", 0, predictor.reachable_ratio, question.ratio, _FIRST_RATIO, step=0.01)]
        if self.counts_bytes:
            whole = _rounded(self._profile.dense_bytes / self._unit_bytes, up=True)
            smallest = _rounded(predictor.smallest_bytes / self._unit_bytes, up=True)
            bits = min(_MOST_BITS, 8 * self._profile.itemsize)
            sliders = [
                _slider("size", smallest, whole, question.size, _rounded((smallest + whole) / 2)),
                _slider("bits", predictor.fewest_bits, bits, question.bits, min(4.5, bits), step=0.05),
                *self._losses(predictor, question.loss),
                *sliders,
            ]
        if within_reach:
            sliders = [replace(one, value=min(max(one.value, one.least), one.most)) for one in sliders]
        self.sliders = {slider.choice: slider for slider in sliders}
        self.choice = question.choice if question.choice in self.sliders else usual

    def _losses(self, predictor: "Predictor", asked: float | None) -> list[Slider]:
        """Return the slider of losses; none where they are not those of predicted tokens."""
        if self._profile.objective != "fisher" or self._profile.text is None:
            return []
        most = _rounded(max(predictor.at_ratio(predictor.reachable_ratio).total_error, 1e-9), up=True)
        step = 10.0 ** math.floor(math.log10(most / _STEPS))
        return [_slider("loss", step, most, asked, min(_FIRST_LOSS, most), step=step)]

    @property
    def target(self) -> ByBytes | ByBits | ByLoss | ByRatio:
        """The target that is asked for."""
        value = self.sliders[self.choice].value
        match self.choice:
            case "size":
                return ByBytes(target_bytes=max(1, round(value * self._unit_bytes)))
            case "bits":
                return ByBits(bits=value)
            case "loss":
                return ByLoss(measure="max_kl", bound=value)
            case "ratio":
                return ByRatio(ratio=value)
            case _:
                assert_never(self.choice)

    @property
    def query(self) -> str:
        """The address's query that asks for the same."""
        return urlencode({"target": self.choice, self.choice: self.sliders[self.choice].value})

    @property
    def description(self) -> str:
        """The target as people say it, after "Compress"."""
        value = f"{self.sliders[self.choice].value:.10g}"
        texts: dict[Choice, str] = {
            "size": f"to at most {value} {self.unit}",
            "bits": f"to {value} bits per weight",
            "loss": f"to lose at most {value} nats per token",
            "ratio": f"at {value}",
        }
        return texts[self.choice]

    def job_fields(self, model_bytes: int) -> dict[str, str]:
        """Return the fields of the form for a new job with this target.

        Args:
            model_bytes: predicted size, used in place of a ratio of bytes, as the form's ratio is one of parameters.
        """
        match self.target:
            case ByBits(bits=bits):
                return {"target": "bits", "bits": f"{bits:.10g}"}
            case ByLoss(bound=bound):
                return {"target": "loss", "loss": f"{bound:.10g}"}
            case ByRatio(ratio=ratio) if not self.counts_bytes:
                return {"target": "ratio", "ratio": f"{ratio:.10g}"}
            case ByBytes(target_bytes=size):
                return {"target": "size", "size": str(size)}
            case ByRatio():
                return {"target": "size", "size": str(model_bytes)}
            case unknown:
                assert_never(unknown)


def _slider(
    choice: Choice, least: float, most: float, asked: float | None, usual: float, *, step: float | None = None
) -> Slider:
    if step is None:
        step = 10.0 ** math.floor(math.log10(max(most - least, 1e-3) / _STEPS))
    value = usual if asked is None else asked
    return Slider(choice=choice, least=float(least), most=float(max(least, most)), step=step, value=float(value))


def _rounded(value: float, *, up: bool = False) -> float:
    """Return a number of few digits: four, so that it is not far from the exact one."""
    digits = 3 - math.floor(math.log10(value))
    scale = 10.0**digits
    return round((math.ceil(value * scale) if up else round(value * scale)) / scale, max(digits, 0))
