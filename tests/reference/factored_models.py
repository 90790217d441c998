"""Compressed tiny models: random factors in the place of every linear layer of a block."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from rocket_core.modules import FactorizedLinear, LayerFactors

INPUT_IDS = torch.randint(3, 259, (2, 24), generator=torch.Generator().manual_seed(1))


def block_linears(model):
    """Exact-type linears inside the blocks, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and any(part.isdigit() for part in name.split("."))
    }


def random_factors(model, seed=0):
    """Factors of every block linear: ranks 3-20, every third layer with all coefficients, zeros in the support."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for index, (name, module) in enumerate(block_linears(model).items()):
        d_in, d_out = module.weight.shape if type(module) is Conv1D else reversed(module.weight.shape)
        rank = int(torch.randint(3, 21, (), generator=generator))
        support = torch.rand(rank, d_out, generator=generator) < 0.5
        coefficients = torch.randn(rank, d_out, generator=generator) * 0.3
        coefficients[torch.rand(rank, d_out, generator=generator) < 0.1] = 0
        dictionary = torch.randn(d_in, rank, generator=generator) / d_in**0.5
        if index % 3 == 2:
            factors[name] = LayerFactors(dictionary=dictionary, coefficients=coefficients)
        else:
            factors[name] = LayerFactors(dictionary=dictionary, coefficients=coefficients * support, support=support)
    return factors


@torch.no_grad()
def logits(model):
    """Logits of `INPUT_IDS`."""
    return model(INPUT_IDS).logits


def factored_layers(model):
    """Factored layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FactorizedLinear)}


def file_bytes(folder):
    """Contents of the weight files by name."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def load(folder, **kwargs):
    """The causal language model saved in `folder`."""
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)
