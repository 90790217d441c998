"""Whether a target can be reached, given how small the compressible layers can become."""

from dataclasses import dataclass
from typing import assert_never

from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError
from rocket_core.sizes.budget import BudgetUnit, bits_budget, parameter_budget
from rocket_core.sizes.memory_fit import FittedMemory
from rocket_core.sizes.target import ByBits, ByBytes, ByFormat, ByLoss, ByRatio, Target

# The nearest reachable ratio is reported in steps of this fraction, so that it is short enough to type.
RATIO_STEPS = 10_000
# Steps of a bit, in which the fewest bits per weight are reported.
_BIT_STEPS = 100
# Steps of a ratio computed from a size: precise to a byte of a petabyte.
_RATIO_PRECISION = 10**15
_UNITS = (("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
# Sizes in messages have four digits.
_MOST_DIGITS = 9999


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """How small a model can become, in what its budget counts.

    Attributes:
        unit: what `dense`, `smallest` and `certain` count.
        dense: the compressible layers when dense, >= 1.
        smallest: lower bound on what any choice of candidates keeps.
        certain: what the smallest choice that is known to exist keeps; for profiled layers the same.
        parameters: parameters of the compressible layers when dense, >= 1.
        unit_bytes: bytes of one unit when dense.
        other_bytes: bytes of the `rocket` artifact apart from these layers.
        unsure_bytes: what these may be more, where they are a lower bound.
        original: bytes of which a ratio is a fraction, where the checkpoint stores the layers in fewer than `dense`.
        remark: what a refusal says about layers that stay dense, and what to do about them.
    """

    unit: BudgetUnit
    dense: int
    smallest: int
    certain: int
    parameters: int
    unit_bytes: int = 1
    other_bytes: int = 0
    unsure_bytes: int = 0
    original: int | None = None
    remark: str = ""

    @property
    def ratio(self) -> float:
        """Largest ratio that is certain to be reachable, rounded down to 4 decimals; [0, 1)."""
        return self._ratio_of(self.certain)

    @property
    def model_bytes(self) -> int:
        """Bytes of the smallest artifact that is certain to be reachable, without the masks of unprofiled layers."""
        return self._bytes_of(self.certain) + self.unsure_bytes

    @property
    def bits(self) -> float:
        """Fewest bits per weight that are certain to be reachable, rounded up; without masks, as `model_bytes`."""
        return self._bits_of(self.certain)

    def allows(self, target: Target) -> bool:
        """Return whether the smallest choice meets a target."""
        return self._allows(self._ratio_for(target))

    def check(self, target: Target) -> float:
        """Raise an error if no choice of candidates meets a target; otherwise return the ratio that does.

        Returns:
            The fraction of the compressible layers to remove, [0, 1); 0 for a size or bits that the dense model meets.

        Raises:
            InfeasibleBudgetError: the target is out of reach; names the nearest one that is certain to be reachable.
        """
        ratio = self._ratio_for(target)
        if not self._allows(ratio):
            is_stuck = self.remark and self.smallest >= self.dense
            refusal = "no selected layer can be made smaller" if is_stuck else self._refusal(target)
            raise InfeasibleBudgetError(f"{refusal}{self.remark}", nearest_ratio=self.ratio)
        return ratio

    def check_needed(self, target: Target, *, stored_bytes: int | None = None) -> None:
        """Raise an error if the model meets a target as it is, so that a compression would change nothing.

        Args:
            target: the target.
            stored_bytes: bytes of a checkpoint in few bits, of which only a size is judged; None for plain weights.

        Raises:
            InvalidConfigError: it does.
        """
        size_now = self._bytes_of(self.dense) + self.unsure_bytes if stored_bytes is None else stored_bytes
        match target:
            case ByRatio(ratio=0) if stored_bytes is None:
                reason = "a ratio of 0 removes nothing; ask for more"
            case ByBytes(target_bytes=size, fit=None) if size >= size_now:
                raise nothing_to_do(size_now)
            case ByBytes(target_bytes=size, fit=FittedMemory() as fit) if size >= size_now:
                reason = (
                    f"the model takes {_size_up(size_now)} as it is, and {size_text(fit.memory_bytes)} of memory leave "
                    f"{size_text(size)} with {fit.tokens_text}; ask for a smaller memory or a longer context"
                )
            case ByBits(bits=bits) if stored_bytes is None and bits >= self._bits_of(self.dense):
                reason = (
                    f"the selected layers take {self._bits_of(self.dense):g} bits per weight as they are; ask for less"
                )
            case _:
                return
        raise InvalidConfigError(f"nothing is to be done: {reason}")

    def _ratio_for(self, target: Target) -> float:
        match target:
            case ByRatio(ratio=ratio):
                return ratio if self.original is None else self._ratio_within(parameter_budget(self.original, ratio))
            case ByBytes(target_bytes=size):
                return self._ratio_within(size - self.other_bytes)
            case ByBits(bits=bits):
                return self._ratio_within(bits_budget(self.parameters, bits))
            case ByLoss():
                # Only measuring tells.
                return 0.0
            case ByFormat():
                return self._ratio_within(self.smallest * self.unit_bytes)
            case _:
                assert_never(target)

    def _ratio_within(self, layers_bytes: int) -> float:
        # Rounded down, so that the budget of this ratio is what fits, to the byte.
        whole = self.dense * self.unit_bytes
        return max(0, whole - layers_bytes) * _RATIO_PRECISION // whole / _RATIO_PRECISION

    def _allows(self, ratio: float) -> bool:
        return ratio < 1 and self.smallest <= parameter_budget(self.dense, ratio)

    def _ratio_of(self, kept: int) -> float:
        whole = self.original or self.dense
        return max(0, min((whole - kept) * RATIO_STEPS // whole, RATIO_STEPS - 1)) / RATIO_STEPS

    def _bytes_of(self, kept: int) -> int:
        return self.other_bytes + kept * self.unit_bytes

    def _bits_of(self, kept: int) -> float:
        steps = 8 * kept * self.unit_bytes * _BIT_STEPS
        return -(-steps // self.parameters) / _BIT_STEPS

    def _refusal(self, target: Target) -> str:
        # Something has to remain.
        fewest = max(1, self.smallest)
        match target:
            case ByRatio(ratio=ratio):
                most = f"{self._ratio_of(fewest)}"
                return (
                    f"compression ratio {ratio} is out of reach: the selected layers can lose at most {most} of their "
                    f"{self.unit}; {_advice(f'{self.ratio}', most, 'less')}, or ignore fewer layers"
                )
            case ByBytes(target_bytes=size, fit=fit):
                certain, least = _size_up(self.model_bytes), _size_up(self._bytes_of(fewest))
                return (
                    f"{size_text(size)} is out of reach: what is not compressed takes {_size_up(self.other_bytes)}, "
                    f"and with the layers at least {least}; {_advice(certain, least, 'more')}, or "
                    f"ignore fewer layers{'' if fit is None else _remainder(fit)}"
                )
            case ByBits():
                certain, least = (f"{self._bits_of(kept):g}" for kept in (self.certain, fewest))
                return (
                    f"{target.text} are out of reach: the selected layers take at least {least}; "
                    f"{_advice(certain, least, 'more')}"
                )
            case ByFormat() | ByLoss():
                raise AssertionError("refused by nothing that is known of sizes")
            case _:
                assert_never(target)


def size_text(size: int) -> str:
    """Return a size in the form that options and forms take, to the byte: 1.980288MB."""
    unit, factor = _unit_of(size)
    return f"{size / factor:.15g}{unit}"


def _size_up(size: int) -> str:
    """Return a size in the form that options and forms take, rounded up to four digits: 1.981MB."""
    _, factor = _unit_of(size)
    step = max(1, factor // 1000)
    while size // step > _MOST_DIGITS:
        step *= 10
    rounded = -(-size // step) * step
    # Options and forms compute with floats, and round down.
    if int(rounded / factor * factor) < size:
        rounded += step
    return size_text(rounded)


def _remainder(fit: FittedMemory) -> str:
    """Return why a memory leaves so little, and what leaves more."""
    keys, engine = size_text(fit.cache_bytes), size_text(fit.engine_bytes)
    return (
        f". It is what {size_text(fit.memory_bytes)} of memory leave: keys and values of {fit.tokens_text} take {keys}"
        f", and the engine {engine}; a shorter context, a smaller batch or fewer kv_bits leave more"
    )


def _unit_of(size: int) -> tuple[str, int]:
    return next((unit, factor) for unit, factor in _UNITS if size >= factor or factor == 1)


def _advice(certain: str, nearest: str, direction: str) -> str:
    """Return what to ask for, given the nearest target that is certain to be reachable and the nearest conceivable."""
    if certain == nearest:
        return f"ask for that or {direction}"
    return f"ask for {certain} or {direction}, which is certain to be reachable (the job finds out whether less is)"


def nothing_to_do(size_now: int) -> InvalidConfigError:
    """Return the error for a size that is not below that of the model, in bytes."""
    return InvalidConfigError(f"nothing is to be done: the model takes {_size_up(size_now)} as it is; ask for less")
