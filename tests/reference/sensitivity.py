"""Sensitivities from one backward pass of the whole model, and helpers for tests of the block-wise pass."""

import itertools
from pathlib import Path

import torch

from rocket_core.calibration.token_loss import uniform_draws
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stage_costs import Costs
from tests.reference.observers import COMPRESSING, Watch


def squared_gradients(model, names, batch, *, predicted=True, drawn=False):
    """Return means over tokens of squared gradients of the summed loss to each layer's output, in the model's dtype.

    The loss is that of the predicted tokens, which a mask chooses from the second token on; all by default. Instead of
    the text's, they may be drawn from the predictions.
    """
    batch = {"input_ids": batch} if isinstance(batch, torch.Tensor) else batch
    tokens = batch.get("decoder_input_ids", batch.get("input_ids"))
    outputs = {name: [] for name in names}

    def keep(name):
        def hook(_module, _args, output):
            output.retain_grad()
            outputs[name].append(output)

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    logits = model(**batch, use_cache=False).logits
    for handle in handles:
        handle.remove()
    labels = drawn_tokens(logits.detach(), tokens)[:, :-1] if drawn else tokens[:, 1:, None]
    log_likelihood = torch.gather(logits.log_softmax(-1)[:, :-1], 2, labels)
    (-(log_likelihood * predicted).sum()).backward()
    return {name: sum(_squares(output) for output in found) / tokens.numel() for name, found in outputs.items()}


def drawn_tokens(logits, tokens):
    """Return the first token of each distribution at which its sum of probabilities reaches the token's draw."""
    draws = uniform_draws(tokens).to(logits)[..., None]
    return (logits.softmax(-1).cumsum(-1) < draws).sum(-1, keepdim=True)


def _squares(output):
    if output.grad is None:
        return torch.zeros(output.shape[-1], dtype=torch.float64)
    return output.grad.double().flatten(0, -2).square().sum(0)


def jacobian_energy(model, names, batch):
    """Return the mean over positions of the squared derivatives of all final hidden states to each layer's output."""
    batch = {"input_ids": batch} if isinstance(batch, torch.Tensor) else batch
    outputs = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, _args, output, name=name: outputs.setdefault(name, output)
        )
        for name in names
    ]
    states = model.base_model(**batch).last_hidden_state
    for handle in handles:
        handle.remove()
    rows = [torch.autograd.grad(state, list(outputs.values()), retain_graph=True) for state in states.flatten()]
    energies = [sum(row.flatten(0, -2).square().sum(0) for row in column) for column in zip(*rows, strict=True)]
    positions = states.shape[0] * states.shape[1]
    found = dict(zip(outputs, energies, strict=True))
    return {name: found[name] / positions for name in names}


def assert_close(found, expected, *, within):
    """Compare sensitivities with those expected, by their relative distance."""
    assert list(found) == list(expected)
    for name, measured in found.items():
        assert measured.fisher_diagonal.dtype == torch.float64
        distance = (measured.fisher_diagonal - expected[name]).norm() / expected[name].norm()
        assert distance <= within, (name, distance)


def silent_monitor(run, **functions):
    """Return a monitor for a run, without listeners by default."""
    return Monitor(Watch(**functions), Costs(run.device, {}), stages=COMPRESSING)


def die_at(patch, number, *, late):
    """Make the process end at the given rename or removal of a file, before or after it."""
    operations = itertools.count()

    def killing(operation):
        def call(*arguments, **options):
            dies = next(operations) == number
            if dies and not late:
                raise KeyboardInterrupt
            result = operation(*arguments, **options)
            if dies:
                raise KeyboardInterrupt
            return result

        return call

    for name in ("replace", "unlink"):
        patch.setattr(Path, name, killing(getattr(Path, name)))
    return operations
