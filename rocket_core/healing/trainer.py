"""The steps of healing: AdamW on the numbers of a compressed model, with a state that can be stored and restored."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rocket_core.errors import NonFiniteCalibrationError
from rocket_core.estimates.healing import MEASURED_PASSES, STEP_PASSES, healing_measurements
from rocket_core.healing.divergence import divergence_sum
from rocket_core.healing.schedule import Schedule

# Largest learning rate as a part of the root mean square of a tensor's numbers, as factors have arbitrary scales: at
# most this much, and less for a model that is close to its original already. The divergence is about quadratic in what
# the numbers are wrong by, so that they have to change by about its square root.
_LEARNING_RATE = 1e-2
_RATE_PER_ROOT = 2e-2
# Wide and deep models take far smaller rates, as the changes of all their numbers add up (SmolLM2-135M a tenth of what
# suits stories260K): the rate is halved at most this often.
_MOST_HALVINGS = 12
_BETAS = (0.9, 0.95)
_EPSILON = 1e-12
_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HealingText:
    """Windows of tokens on the CPU.

    Attributes:
        training: windows that steps read.
        held_out: windows that no step reads, on which the best values are chosen.
        rows: windows in a call of a model.
    """

    training: Int64[Tensor, "windows length"]
    held_out: Int64[Tensor, "held_out_windows length"]
    rows: int


def recompute_blocks(blocks: Iterable[nn.Module]) -> None:
    """Make blocks compute their activations again in the backward pass, in place.

    Memory is then that of one block's activations and every block's input; a step takes about a third more time.
    Models are expected in evaluation mode, where blocks have no randomness.
    """
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


class Trainer:
    """Training of a compressed model towards the predictions of its original.

    Minimises the mean over tokens of the divergence of next-token distributions with AdamW without weight decay, whose
    learning rate for each tensor is in proportion to the root mean square of its numbers other than zero. The largest
    is in proportion to the square root of the divergence at the beginning, and halved until the divergence of the first
    batch is lower when all numbers move by it against the signs of their gradients, as in Adam's first step. A zero
    whose gradient is always zero stays zero. On a CPU, with the same number of threads, it is deterministic.

    Args:
        student: the compressed model in evaluation mode; called as `model(input_ids=..., use_cache=False).logits`.
        teacher: the dense model, called likewise, on the same device.
        values: the parameters to train, by name.
        text: what to read.
        schedule: batches and learning rates.
        round_values: rounds the parameters in place to what can be stored; the held-out windows are read with those.

    Attributes:
        values: the parameters that are trained, by name.
        step: steps taken.
        losses: mean divergence in each step taken, before it.
        tried: mean divergence of the first batch, and after a move by each of the rates tried so far, each half of the
            last; infinite if it is not finite.
        held_out: mean divergence on the held-out windows, at each of `measured_at` that was reached.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        values: Mapping[str, nn.Parameter],
        text: HealingText,
        schedule: Schedule,
        round_values: Callable[[], None] = lambda: None,
    ) -> None:
        self._student, self._teacher, self.values = student, teacher, dict(values)
        self._text, self._schedule, self._round_values = text, schedule, round_values
        self._device = next(iter(values.values())).device
        groups = [{"params": [value], "size": _typical_size(value)} for value in values.values()]
        self._optimizer = torch.optim.AdamW(groups, betas=_BETAS, eps=_EPSILON, weight_decay=0.0)
        self._best = {name: value.detach().clone() for name, value in values.items()}
        self.step = 0
        self.losses: list[float] = []
        self.tried: list[float] = []
        self.held_out: list[float] = []

    @property
    def measured_at(self) -> list[int]:
        """Numbers of steps after which the held-out windows are read."""
        times = healing_measurements(self._schedule.steps)
        return sorted({round(self._schedule.steps * part / times) for part in range(times + 1)})

    @property
    def learning_rate(self) -> float:
        """Largest learning rate, as a part of the root mean square of each tensor; known before the first step."""
        return self._rate_to_try(len(self.tried) - 2)

    @property
    def best_step(self) -> int:
        """Number of steps after which the divergence on the held-out windows was least; the first of equal ones."""
        return self.measured_at[self.held_out.index(min(self.held_out))]

    @property
    def is_finished(self) -> bool:
        """Whether all steps are taken and measured."""
        return len(self.held_out) == len(self.measured_at)

    @property
    def done(self) -> float:
        """Done part of what all steps and measurements take, [0, 1]."""
        step = STEP_PASSES * self._schedule.windows_per_step
        measured = MEASURED_PASSES * len(self._text.held_out)
        whole = step * self._schedule.steps + measured * len(self.measured_at)
        return (step * self.step + measured * len(self.held_out)) / whole

    def advance(self) -> None:
        """Measure if that is due, otherwise try a learning rate until one is found, and then take a step.

        Raises:
            NonFiniteCalibrationError: the divergence is NaN or infinite.
        """
        if self.measured_at[len(self.held_out)] == self.step:
            self._measure()
            return
        if not self._has_rate:
            self._try_rate()
            return
        batch = self._batch()
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate * group["size"] * self._schedule.rate(self.step)
        self.losses.append(self._accumulate(batch))
        nn.utils.clip_grad_norm_(self.values.values(), _LARGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1

    @property
    def _has_rate(self) -> bool:
        """Whether a rate has been found: the largest that lowers the divergence, or after many the least."""
        return len(self.tried) > _MOST_HALVINGS + 1 or (len(self.tried) > 1 and self.tried[-1] < self.tried[0])

    def _rate_to_try(self, halvings: int) -> float:
        return min(_LEARNING_RATE, _RATE_PER_ROOT * math.sqrt(max(0.0, self.held_out[0]))) / 2.0**halvings

    def _try_rate(self) -> None:
        """Measure the divergence of the first batch after a move by the next rate, and undo the move."""
        batch = self._batch()
        # Also after `restore`, as gradients are not stored.
        if all(value.grad is None for value in self.values.values()):
            self.tried[:1] = [self._accumulate(batch)]
        rate = self._rate_to_try(len(self.tried) - 1)
        start = [value.detach().clone() for value in self.values.values()]
        with torch.no_grad():
            for group in self._optimizer.param_groups:
                for value in group["params"]:
                    # An expert that no token has reached has no gradient.
                    if value.grad is not None:
                        value.sub_(value.grad.sign(), alpha=rate * group["size"])
            total = math.fsum(float(self._divergence(rows)) for rows in torch.split(batch, self._text.rows))
            for value, before in zip(self.values.values(), start, strict=True):
                value.copy_(before)
        self.tried.append(total / batch.numel() if math.isfinite(total) else math.inf)
        if self._has_rate:
            self._optimizer.zero_grad(set_to_none=True)

    def _batch(self) -> Int64[Tensor, "windows length"]:
        return self._text.training[self._schedule.batch(self.step)]

    @torch.no_grad()
    def take_best(self) -> float:
        """Set the values to those with the least divergence on the held-out windows, which is returned.

        They are rounded to what can be stored, and are those of the beginning if no step led to less.
        """
        for name, value in self.values.items():
            value.copy_(self._best[name])
        return min(self.held_out)

    def state(self) -> dict[str, Tensor]:
        """Return everything that training continues from, on any device."""
        tensors = {
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "tried": torch.tensor(self.tried, dtype=torch.float64),
            "held_out": torch.tensor(self.held_out, dtype=torch.float64),
        }
        for name, value in self.values.items():
            tensors |= {f"value.{name}": value.detach(), f"best.{name}": self._best[name]}
            tensors |= {f"{key}.{name}": tensor for key, tensor in self._optimizer.state.get(value, {}).items()}
        return tensors

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of an equal training."""
        self.losses = state["losses"].tolist()
        self.tried = state["tried"].tolist()
        self.held_out = state["held_out"].tolist()
        self.step = len(self.losses)
        for name, value in self.values.items():
            value.copy_(state[f"value.{name}"])
            self._best[name].copy_(state[f"best.{name}"])
            # Absent for the values of an expert that no token has reached.
            if f"step.{name}" in state:
                moments = {key: state[f"{key}.{name}"].to(value, copy=True) for key in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[value] = {"step": state[f"step.{name}"].clone(), **moments}

    def _accumulate(self, batch: Int64[Tensor, "windows length"]) -> float:
        """Add the gradients of a batch's mean divergence, which is returned."""
        total = 0.0
        for rows in torch.split(batch, self._text.rows):
            loss = self._divergence(rows) / batch.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return self._checked(total)

    @torch.no_grad()
    def _measure(self) -> None:
        windows = self._text.held_out
        current = {name: value.clone() for name, value in self.values.items()}
        self._round_values()
        total = math.fsum(float(self._divergence(rows)) for rows in torch.split(windows, self._text.rows))
        self.held_out.append(self._checked(total / windows.numel()))
        is_best = self.best_step == self.step
        for name, value in self.values.items():
            if is_best:
                self._best[name].copy_(value)
            value.copy_(current[name])

    def _divergence(self, rows: Int64[Tensor, "windows length"]) -> Float[Tensor, ""]:
        tokens = rows.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type != "cpu"):
            with torch.no_grad():
                dense = self._teacher(input_ids=tokens, use_cache=False).logits
            compressed = self._student(input_ids=tokens, use_cache=False).logits
        return divergence_sum(dense, compressed)

    def _checked(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise NonFiniteCalibrationError(
                f"the divergence from the original is {loss} after {self.step} steps of healing; check that the "
                "artifact and the original can be evaluated, and that they belong together"
            )
        return loss


def _typical_size(value: Tensor) -> float:
    """Return the root mean square of the numbers other than zero; 1 if all are zero."""
    numbers = value.detach()[value.detach() != 0]
    return float(numbers.square().mean().sqrt()) if len(numbers) else 1.0
