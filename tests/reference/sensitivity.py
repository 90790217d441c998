"""Sensitivities from one backward pass of the whole model."""

import torch


def squared_gradients(model, names, tokens):
    """Mean over tokens of the squared gradients of the summed loss to each layer's output, in the model's dtype."""
    outputs = {name: [] for name in names}

    def keep(name):
        def hook(_module, _args, output):
            output.retain_grad()
            outputs[name].append(output)

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    logits = model(input_ids=tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    log_likelihood = torch.gather(logits.log_softmax(-1)[:, :-1], 2, tokens[:, 1:, None])
    (-log_likelihood.sum()).backward()
    return {name: sum(_squares(output) for output in found) / tokens.numel() for name, found in outputs.items()}


def _squares(output):
    return output.grad.double().flatten(0, -2).square().sum(0)


def jacobian_energy(model, names, tokens):
    """Mean over tokens of the squared derivatives of all final hidden states to each layer's output."""
    outputs = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, _args, output, name=name: outputs.setdefault(name, output)
        )
        for name in names
    ]
    states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    for handle in handles:
        handle.remove()
    rows = [torch.autograd.grad(state, list(outputs.values()), retain_graph=True) for state in states.flatten()]
    energies = [sum(row.flatten(0, -2).square().sum(0) for row in column) for column in zip(*rows, strict=True)]
    return {name: energy / tokens.numel() for name, energy in zip(outputs, energies, strict=True)}
