import pytest
import torch
from torch import nn

from rocket_core.calibration import sensitivity
from rocket_core.calibration.scaled_gradient import ScaledGradient
from rocket_core.calibration.sensitivity import SquaredGradients, natural_loss, output_gradient
from rocket_core.calibration.token_loss import TextLoss
from rocket_core.errors import NonFiniteCalibrationError, UnsupportedArchitectureError
from rocket_core.models.block_calls import Activations
from rocket_core.models.recorded_call import BlockCall
from tests.reference.sensitivity import drawn_tokens
from tests.reference.tiny_models import FAMILIES, VOCAB_SIZE

CALL = BlockCall(args=(), kwargs={})


def tokens(windows=3, length=11):
    return torch.randint(3, VOCAB_SIZE, (windows, length), generator=torch.Generator().manual_seed(0))


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """Two layers, called by `run`."""

    def __init__(self, run):
        super().__init__()
        self.one, self.two = (nn.Linear(4, 4).double().requires_grad_(requires_grad=False) for _ in range(2))
        self.run = run

    def forward(self, hidden):
        return self.run(self, hidden)


def pull(block, hidden, gradient, *, exponent=0):
    layers = {"one": block.one, "two": block.two}
    squares = SquaredGradients(layers=layers, widths={"one": 4, "two": 4})
    with squares.watching():
        scaled = ScaledGradient(values=gradient, exponent=exponent)
        back, _ = squares.pull_back(block, CALL, hidden, scaled, batch=7)
    return squares, back


def final_activations(hidden, **beside):
    """Return the activations after the last block, in one batch."""
    return Activations(hidden=[hidden], calls=[], **beside)


def derivatives(function, at, gradient):
    """Return the gradient at a tensor by central differences, without automatic differentiation."""
    result = torch.zeros_like(at)
    for place in range(at.numel()):
        step = torch.zeros_like(at)
        step.view(-1)[place] = 1e-5
        result.view(-1)[place] = ((function(at + step) - function(at - step)) * gradient).sum() / 2e-5
    return result


def test_gradients_equal_finite_differences():
    block = Block(lambda self, hidden: hidden + self.two(torch.tanh(self.one(hidden))))
    hidden, gradient = random(2, 3, 4), random(2, 3, 4, seed=1)
    squares, back = pull(block, hidden, gradient)
    at_one = derivatives(lambda output: hidden + block.two(torch.tanh(output)), block.one(hidden), gradient)
    torch.testing.assert_close(squares.total("one"), at_one.flatten(0, 1).square().sum(0))
    torch.testing.assert_close(squares.total("two"), gradient.flatten(0, 1).square().sum(0))
    torch.testing.assert_close(back.values, derivatives(block, hidden, gradient))


def test_batches_and_calls_add_up():
    block = Block(lambda self, hidden: self.one(hidden) + 2 * self.one(hidden.flip(1)))
    gradient = random(1, 3, 4)
    squares, _ = pull(block, random(1, 3, 4, seed=1), gradient)
    torch.testing.assert_close(squares.total("one"), 5 * gradient[0].square().sum(0))
    with squares.watching():
        squares.pull_back(block, CALL, random(1, 3, 4), ScaledGradient(values=gradient, exponent=0), batch=1)
    torch.testing.assert_close(squares.total("one"), 10 * gradient[0].square().sum(0))


@pytest.mark.parametrize(
    "run",
    [
        lambda self, hidden: self.one(hidden),
        lambda self, hidden: (self.one(hidden) + 0 * self.two(hidden), None),
        lambda self, hidden: self.one(hidden + torch.no_grad()(self.two)(hidden)),
    ],
    ids=["never called", "without influence", "called without gradients"],
)
def test_a_layer_without_effect_on_the_loss_has_no_sensitivity(run):
    squares, _ = pull(Block(run), random(1, 3, 4), random(1, 3, 4, seed=1))
    assert torch.equal(squares.total("two"), torch.zeros(4, dtype=torch.float64))
    assert squares.total("one").min() > 0


def test_a_layer_with_another_input_than_hidden_states_counts():
    def run(self, hidden):
        gate = self.two(torch.ones(3, 4, dtype=torch.float64))
        gate += 1  # A leaf would not allow this.
        return hidden * gate

    hidden, gradient = random(1, 3, 4), random(1, 3, 4, seed=1)
    squares, _ = pull(Block(run), hidden, gradient)
    torch.testing.assert_close(squares.total("two"), (gradient * hidden)[0].square().sum(0))


def test_in_place_changes_of_inputs_and_outputs_are_supported():
    def run(self, hidden):
        output = self.one(hidden)
        output.mul_(3)
        hidden += output
        return hidden

    hidden, gradient = random(1, 3, 4), random(1, 3, 4, seed=1)
    before = hidden.clone()
    squares, _ = pull(Block(run), hidden, gradient)
    torch.testing.assert_close(squares.total("one"), 9 * gradient[0].square().sum(0))
    assert torch.equal(hidden, before)


def test_a_block_that_ignores_its_input_returns_a_zero_gradient():
    squares, back = pull(
        Block(lambda self, hidden: self.one(torch.ones_like(hidden))), random(1, 3, 4), random(1, 3, 4)
    )
    assert torch.equal(back.values, torch.zeros(1, 3, 4, dtype=torch.float64))
    assert squares.total("one").min() > 0


def test_hooks_are_removed_even_when_the_block_fails():
    def fail(self, hidden):
        raise ZeroDivisionError

    block = Block(fail)
    with pytest.raises(ZeroDivisionError):
        pull(block, random(1, 3, 4), random(1, 3, 4))
    assert not block.one._forward_hooks


def test_non_finite_gradients_name_layer_and_batch():
    def run(self, hidden):
        output = self.two(self.one(hidden))
        return output + (0 * output).square().sum().sqrt()  # Finite, but not its derivative.

    with pytest.raises(NonFiniteCalibrationError, match=r"gradients of layer two .* batch 7.*float32"):
        pull(Block(run), random(1, 3, 4), random(1, 3, 4))


def test_a_non_finite_gradient_outside_the_layers_is_found():
    run = lambda self, hidden: self.one(hidden) + (0 * hidden).square().sum().sqrt()  # noqa: E731
    with pytest.raises(NonFiniteCalibrationError, match=r"input of the block of layer one .* batch 7"):
        pull(Block(run), random(1, 3, 4), random(1, 3, 4))


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden * 2


@pytest.mark.parametrize(
    "run",
    [lambda self, hidden: torch.no_grad()(self.one)(hidden), lambda self, hidden: Opaque.apply(self.one(hidden))],
    ids=["without gradients", "without a derivative"],
)
def test_a_block_without_backward_pass_is_refused(run):
    with pytest.raises(UnsupportedArchitectureError, match="no backward pass"):
        pull(Block(run), random(1, 3, 4), random(1, 3, 4))


@pytest.mark.parametrize("factor", [1e-7, 1.0, 6e4])
def test_half_precision_gradients_are_centred_without_loss(factor):
    values = (random(2, 3, 4).clamp(-1, 1) * factor).half()
    centred = ScaledGradient(values=values, exponent=3).centred()
    assert 8 <= centred.values.abs().max() <= 16
    torch.testing.assert_close(
        centred.values.double() * 2.0**-centred.exponent, values.double() * 2.0**-3, rtol=1e-3, atol=0
    )


def test_zero_tiny_and_infinite_gradients_are_not_rescaled():
    for values in (torch.zeros(1, 1, 2).half(), torch.full((1, 1, 2), 1e-7), torch.full((1, 1, 2), torch.inf).half()):
        gradient = ScaledGradient(values=values, exponent=3)
        centred = gradient.centred()
        assert centred.exponent == 3
        assert torch.equal(centred.values, values)


@pytest.mark.parametrize(("one", "other"), [(0, 0), (3, -9), (-20, 14)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_sums_of_differently_scaled_gradients_are_correct(one, other, dtype):
    if dtype != torch.float16:
        one = other = 0
    parts = [
        ScaledGradient(values=random(1, 2, 3, seed=seed).to(dtype), exponent=exponent)
        for seed, exponent in enumerate((one, other))
    ]
    plain = sum(part.values.double() * 2.0**-part.exponent for part in parts)
    found = parts[0].added(parts[1])
    assert found.values.dtype == dtype
    torch.testing.assert_close(found.values.double() * 2.0**-found.exponent, plain, rtol=2e-3, atol=1e-3)


def test_a_scaled_gradient_gives_the_sums_of_the_plain_one():
    block = Block(lambda self, hidden: self.two(self.one(hidden)))
    hidden, gradient = random(1, 3, 4), random(1, 3, 4, seed=1)
    plain, _ = pull(block, hidden, gradient)
    scaled, _ = pull(block, hidden, gradient * 32, exponent=5)
    torch.testing.assert_close(scaled.total("one"), plain.total("one"))


@pytest.mark.parametrize("drawn", [False, True], ids=["text", "drawn"])
@pytest.mark.parametrize("logits", [5, 11, 40], ids=["part of a window", "a window", "all"])
def test_the_gradient_after_the_blocks_is_independent_of_chunks(logits, drawn, monkeypatch):
    model = FAMILIES["gemma"]().double().requires_grad_(requires_grad=False)
    leaf = random(3, 11, 32).requires_grad_()
    read = model.lm_head(model.model.norm(leaf)).log_softmax(-1)
    labels = drawn_tokens(read.detach(), tokens())[:, :-1] if drawn else tokens()[:, 1:, None]
    (-torch.gather(read[:, :-1], 2, labels).sum()).backward()
    monkeypatch.setattr(sensitivity, "_LOGIT_BYTES", 4 * VOCAB_SIZE * logits)
    largest = []
    model.lm_head.register_forward_hook(lambda _module, _args, output: largest.append(output.shape[:-1].numel()))
    text = TextLoss(tokens=1, negative_log_likelihood=2.0, entropy=3.0)
    found = output_gradient(
        model,
        model.model.layers,
        "tokens",
        {"input_ids": tokens()},
        final_activations(leaf.detach()),
        text=text,
        drawn=drawn,
    )
    torch.testing.assert_close(found.values, leaf.grad)
    assert max(largest) <= logits
    predicted = read[:, :-1].detach()
    likelihoods = torch.gather(predicted, 2, tokens()[:, 1:, None])
    assert text.tokens == 1 + likelihoods.numel()
    assert text.negative_log_likelihood == pytest.approx(2 - float(likelihoods.sum()))
    assert text.entropy == pytest.approx(3 + float(torch.distributions.Categorical(logits=predicted).entropy().sum()))


def test_blocks_are_restored_and_weights_get_no_gradients():
    model = FAMILIES["llama"]().requires_grad_(requires_grad=False)
    before = list(model.model.layers)
    output_gradient(
        model, model.model.layers, "tokens", {"input_ids": tokens()}, final_activations(torch.randn(3, 11, 32))
    )
    assert list(model.model.layers) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_non_finite_gradients_after_the_blocks_are_found():
    model = FAMILIES["llama"]().requires_grad_(requires_grad=False)
    hidden = torch.randn(3, 11, 32)
    hidden[1, 4, 2] = torch.nan
    with pytest.raises(NonFiniteCalibrationError, match="after the last block"):
        output_gradient(model, model.model.layers, "tokens", {"input_ids": tokens()}, final_activations(hidden))


def test_a_model_without_head_uses_the_loss_of_hidden_states():
    model = FAMILIES["llama"]()
    assert natural_loss(model, reads_in_order=True) == "tokens"
    # With a head for masked tokens: it sees the tokens that a decoder would predict.
    assert natural_loss(model, reads_in_order=False) == "hidden_states"
    assert natural_loss(model.model, reads_in_order=True) == "hidden_states"


def test_gradients_of_tokens_are_those_of_each_position():
    block = Block(lambda block, hidden: block.two(torch.tanh(block.one(hidden))))
    hidden, gradient = random(2, 3, 4), random(2, 3, 4, seed=1)
    squares = SquaredGradients(layers={"one": block.one}, widths={"one": 4}, keeps_tokens=True)
    for batch in (1, 0):
        own = slice(batch, batch + 1)
        with squares.watching():
            squares.pull_back(block, CALL, hidden[own], ScaledGradient(values=gradient[own], exponent=0), batch=batch)
    leaf = hidden.clone().requires_grad_()
    output = block.one(leaf)
    output.retain_grad()
    block.two(torch.tanh(output)).backward(gradient)
    expected = output.grad.square().sum(-1).flatten()
    found = squares.token_gradients("one")
    torch.testing.assert_close(found.double(), expected / expected.mean(), rtol=0.01, atol=0)


def test_a_layer_called_twice_has_no_gradients_of_tokens():
    squares = SquaredGradients(layers={}, widths={"one": 4}, keeps_tokens=True)
    squares.begin(batch=0, exponent=0)
    squares._add("one", torch.ones(3, 4))
    assert squares.token_gradients("one").tolist() == [1, 1, 1]
    squares._add("one", torch.ones(3, 4))
    assert squares.token_gradients("one") is None
