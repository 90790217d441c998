"""Schedule, loss and steps of healing, on models that are one matrix."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rocket_core.errors import NonFiniteCalibrationError
from rocket_core.healing import HealingText, Schedule, Trainer, divergence_sum
from rocket_core.healing import trainer as module
from tests.reference.language_models import divergence_of

VOCABULARY, LENGTH = 7, 4


class Bigrams(nn.Module):
    """A model that predicts a token from the one before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)))

    def forward(self, input_ids, use_cache):
        assert not use_cache
        return SimpleNamespace(logits=self.table[input_ids])


def make_trainer(steps=40):
    tokens = torch.randint(VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(3))
    student = Bigrams(1)
    return Trainer(
        student,
        Bigrams(2).requires_grad_(requires_grad=False),
        {"table": student.table},
        HealingText(training=tokens[:10], held_out=tokens[10:], rows=2),
        Schedule(windows=10, windows_per_step=3, steps=steps, seed=0),
    )


def finish(trainer):
    while not trainer.is_finished:
        trainer.advance()
    trainer.take_best()
    return trainer


def test_loss_is_the_divergence_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    dense, compressed = torch.randn(2, 5, VOCABULARY, generator=generator, dtype=torch.float64)
    expected = sum(divergence_of(p, q) for p, q in zip(dense.tolist(), compressed.tolist(), strict=True))
    assert float(divergence_sum(dense, compressed)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tokens", [1, 100, 10**6, 2 * 10**6, 10**9])
def test_a_schedule_reads_about_the_tokens_asked_for(tokens):
    schedule = Schedule.of(tokens, windows=50, length=64, seed=0)
    step = 64 * schedule.windows_per_step
    assert abs(schedule.steps * step - tokens) <= max(step, tokens // 1000)
    assert 1024 <= step <= 32768


def test_every_window_is_read_once_before_any_again():
    schedule = Schedule(windows=7, windows_per_step=3, steps=14, seed=5)
    read = [window for step in range(14) for window in schedule.batch(step)]
    turns = [read[start : start + 7] for start in range(0, len(read), 7)]
    assert all(sorted(turn) == list(range(7)) for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1


def test_the_rate_rises_and_falls_to_nearly_zero():
    schedule = Schedule(windows=1, windows_per_step=1, steps=200, seed=0)
    rates = [schedule.rate(step) for step in range(200)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert max(rates) == 1
    assert 0 < rates[-1] < 1e-3


@pytest.mark.parametrize(("steps", "warm_up"), [(1, 1), (10, 4), (100, 20), (400, 20), (1000, 50)])
def test_the_rate_rises_for_as_long_as_moments_need(steps, warm_up):
    schedule = Schedule(windows=1, windows_per_step=1, steps=steps, seed=0)
    rates = [schedule.rate(step) for step in range(steps)]
    assert rates.index(max(rates)) == warm_up - 1
    assert rates[0] == 1 / warm_up


@pytest.mark.parametrize("closeness", [1.0, 0.5, 0.01])
def test_the_rate_follows_the_divergence_at_the_beginning(closeness):
    trainer = make_trainer()
    with torch.no_grad():
        trainer.values["table"].lerp_(trainer._teacher.table, 1 - closeness)
    while not trainer.losses:
        trainer.advance()
    expected = min(0.01, 0.02 * trainer.held_out[0] ** 0.5)
    assert trainer.learning_rate == pytest.approx(expected)
    assert (expected < 0.01) == (closeness < 1)


@pytest.mark.parametrize("largest", [0.01, 0.64, 41.0])
def test_a_rate_is_halved_until_the_first_batch_gains_by_it(largest, monkeypatch):
    monkeypatch.setattr(module, "_LEARNING_RATE", largest)
    monkeypatch.setattr(module, "_RATE_PER_ROOT", 1e9)
    trainer = make_trainer()
    start = trainer.values["table"].detach().clone().requires_grad_()
    tokens = trainer._text.training[trainer._schedule.batch(0)]

    def divergence(table):
        return divergence_sum(trainer._teacher.table[tokens], table[tokens]) / tokens.numel()

    divergence(start).backward()

    def divergence_after(rate):
        return divergence((start - rate * start.square().mean().sqrt() * start.grad.sign()).detach()).item()

    trainer.advance()
    while not trainer.losses:
        assert torch.equal(trainer.values["table"], start)
        trainer.advance()

    found, rates = trainer.learning_rate, [largest / 2**halvings for halvings in range(13)]
    assert found == next(rate for rate in rates if divergence_after(rate) < divergence_after(0))


def test_training_lowers_the_divergence_and_keeps_the_best():
    trainer = finish(make_trainer())
    assert trainer.take_best() == min(trainer.held_out) < trainer.held_out[0]
    assert len(trainer.losses) == 40
    assert len(trainer.held_out) == 11


def test_the_done_part_rises_with_steps_and_measurements_to_all():
    trainer, parts = make_trainer(), []
    while not trainer.is_finished:
        parts.append(trainer.done)
        trainer.advance()
    assert parts[0] == 0
    assert trainer.done == 1
    # Trying rates does not count: how many are tried is not known before.
    gains = [after - before for before, after in itertools.pairwise([*parts, trainer.done]) if after != before]
    # Two windows are read by two models; three are read by one, and forward and backward by the other.
    step, measurement = max(gains), min(gains)
    assert step / measurement == pytest.approx((4 * 3) / (2 * 2))
    assert sum(gain < 2 * measurement for gain in gains) == len(trainer.held_out)


def test_training_that_only_makes_it_worse_keeps_the_start(monkeypatch):
    monkeypatch.setattr(Trainer, "learning_rate", 30.0)
    trainer = make_trainer()
    start = trainer.values["table"].detach().clone()
    finish(trainer)
    assert trainer.best_step == 0
    assert torch.equal(trainer.values["table"], start)


def test_the_best_is_measured_as_it_is_stored():
    trainer = make_trainer()
    table = trainer.values["table"]
    trainer._round_values = lambda: table.detach().copy_(table.detach().bfloat16())
    finish(trainer)
    assert torch.equal(table, table.bfloat16().float())
    kept = trainer.take_best()
    trainer._measure()
    assert trainer.held_out[-1] == kept


# The first advance measures the start, and at least one more tries a rate.
@pytest.mark.parametrize("advances", [0, 1, 2, 3, 4, 20, 52])
def test_a_restored_training_ends_with_the_same_bits(advances):
    undisturbed, before, after = finish(make_trainer()), make_trainer(), make_trainer()
    for _ in range(advances):
        before.advance()
    after.restore({name: tensor.clone() for name, tensor in before.state().items()})
    finish(after)
    assert torch.equal(after.values["table"], undisturbed.values["table"])
    assert after.losses == undisturbed.losses
    assert after.held_out == undisturbed.held_out


def test_zeros_without_a_gradient_stay_zero():
    trainer = make_trainer()
    with torch.no_grad():
        trainer.values["table"][0, 0] = 0
    kept = torch.ones(VOCABULARY, VOCABULARY)
    kept[0, 0] = 0
    trainer.values["table"].register_hook(lambda gradient: gradient * kept)
    finish(trainer)
    assert trainer.values["table"][0, 0] == 0


def test_a_divergence_that_is_not_finite_is_an_error():
    trainer = make_trainer()
    with torch.no_grad():
        trainer.values["table"].fill_(torch.nan)
    with pytest.raises(NonFiniteCalibrationError, match="nan after 0 steps"):
        trainer.advance()
