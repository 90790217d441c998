"""Compressed tiny models: random factors or codes instead of the linear layers of their blocks."""

from dataclasses import replace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from rocket_core.layers import LayerFactors, StoredLinear, compose_weight, round_values
from rocket_core.linalg.integer_codes import RoundedWeight, search_scales
from rocket_core.linalg.rounding import round_to_nearest
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.tiny_models import FAMILIES

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))
"""Last parts of the names of layers that read one input."""

INPUT_IDS = torch.randint(3, 259, (2, 24), generator=torch.Generator().manual_seed(1))


def block_linears(model):
    """Return the linear layers inside the blocks, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D, FalconLinear) and any(part.isdigit() for part in name.split("."))
    }


def random_factors(model, seed=0):
    """Return factors of every block linear: ranks 3-20, every third layer with all coefficients."""
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


def mixed_factors(model, seed=0):
    """Return factors of every kind: shared dictionaries for `GROUPS`; others sparse, full, factored or dense in turn.

    A full layer is a sparse one that stores every coefficient; so does one factored layer of each group.
    """
    generator = torch.Generator().manual_seed(seed)
    factors, owners, singles = {}, {}, 0
    for name, module in block_linears(model).items():
        d_in, d_out = module.weight.shape if type(module) is Conv1D else reversed(module.weight.shape)
        parent, leaf = name.rsplit(".", 1)
        group = next((group for group in GROUPS if leaf in group), ())
        first = owners.setdefault((parent, group), name) if group else name
        owner = None if first == name else first
        kind = "factored" if group else ("sparse", "full", "factored", "dense")[singles % 4]
        singles += not group
        if kind == "dense":
            continue
        dictionary = None
        if kind == "factored":
            rank = int(torch.randint(3, 21, (), generator=generator))
            dictionary = factors[owner].dictionary if owner else _normal(generator, d_in, rank) / d_in**0.5
        rows = d_in if dictionary is None else dictionary.shape[1]
        coefficients = _normal(generator, rows, d_out) * 0.3
        support = torch.rand(rows, d_out, generator=generator) < 0.5
        if kind == "full" or leaf in {members[1] for members in GROUPS}:
            support = None
        factors[name] = LayerFactors(
            dictionary=dictionary,
            coefficients=coefficients if support is None else coefficients * support,
            support=support,
            dictionary_owner=owner,
        )
    return factors


CODE_FORMATS = (
    CodeFormat(bits=4, group_size=16, scale_bits=6),
    CodeFormat(bits=8, group_size=80, scale_bits=16),
    CodeFormat(bits=3, group_size=5, scale_bits=8),
    CodeFormat(bits=2, group_size=8, scale_bits=16),
    CodeFormat(bits=5, group_size=128, scale_bits=6),
    CodeFormat(bits=6, group_size=3, scale_bits=6),
)


def quantized_factors(model, seed=0):
    """Return rounded weights in all of `CODE_FORMATS` in turn, those of 8 bits entropy coded.

    The second layer is sparse, the fourth dense.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for index, (name, module) in enumerate(block_linears(model).items()):
        d_in, d_out = module.weight.shape if type(module) is Conv1D else reversed(module.weight.shape)
        weight = _normal(generator, d_in, d_out) * 0.2
        code_format = CODE_FORMATS[index % len(CODE_FORMATS)]
        if index == 1:
            support = torch.rand(d_in, d_out, generator=generator) < 0.5
            factors[name] = LayerFactors(dictionary=None, coefficients=weight * support, support=support)
        elif index != 3:
            rounded = round_to_nearest(weight, search_scales(weight, torch.ones(d_in), code_format))
            codes = rounded.codes.clamp_min(-127) if code_format.bits == 8 else rounded.codes
            factors[name] = replace(rounded, codes=codes, entropy_coded=code_format.bits == 8)
    return factors


def coded_values(model, seed=0):
    """Return `mixed_factors` whose numbers are codes, of 4 and 8 bits in turn; layers of a group have the same bits."""
    factors = mixed_factors(model, seed)
    owners = [name for name, one in factors.items() if one.dictionary_owner is None]
    bits = {name: (4, 8)[index % 2] for index, name in enumerate(owners)}
    return {
        name: round_values(one, bits[one.dictionary_owner or name], (one.shape[1],)) for name, one in factors.items()
    }


def embedding_codes(model):
    """Return rounded weights of the token embedding, in 5 bits, and of an untied head, in 8 bits."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    formats = (CodeFormat(bits=5, group_size=16, scale_bits=6), CodeFormat(bits=8, group_size=32, scale_bits=16))
    codes = {}
    for table, code_format in zip(tables, formats, strict=False):
        # The first of several that share a weight is the one that holds it.
        name = next(name for name, one in model.named_modules() if getattr(one, "weight", None) is table.weight)
        weight = table.weight.detach().T
        scales = search_scales(weight, torch.ones(len(weight)), code_format)
        codes[name] = round_to_nearest(weight, scales)
    return codes


def dense_rows(factors, dtype):
    """Return the dense weight of factors or codes, in the orientation of `nn.Linear`."""
    if isinstance(factors, RoundedWeight):
        return factors.weight(dtype).T
    return compose_weight(factors.dictionary, factors.coefficients, dtype)


ARTIFACTS = {family: (build, random_factors) for family, build in FAMILIES.items()} | {
    f"{family}, all kinds": (FAMILIES[family], mixed_factors) for family in ("llama", "gpt2", "opt")
}
ARTIFACTS |= {
    f"{family}, quantized": (FAMILIES[family], quantized_factors) for family in ("llama", "gpt2", "opt", "gemma")
}
ARTIFACTS |= {f"{family}, values in codes": (FAMILIES[family], coded_values) for family in ("llama", "gpt2", "opt")}
"""What is compressed: how to build the model, and how to make its factors."""


def _normal(generator, *shape):
    return torch.randn(*shape, generator=generator)


@torch.no_grad()
def logits(model):
    """Return the logits of `INPUT_IDS`."""
    return model(INPUT_IDS).logits


def stored_layers(model):
    """Return stored layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StoredLinear)}


def file_bytes(folder):
    """Return contents of the weight files by name."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def assert_same_logits(loaded, model):
    """Compare two models: bitwise, or with float32's rounding where layers add up codes in another order."""
    tables = any(getattr(layer, "tabulated", False) for layer in stored_layers(loaded).values())
    tolerance = 1e-5 if tables and loaded.dtype == torch.float32 else 0
    torch.testing.assert_close(logits(loaded), logits(model), rtol=tolerance, atol=tolerance)


def load_unpacked(folder, **kwargs):
    """Load the model with all layers unpacked, which compute as dense ones do."""
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["keep_packed"] = False
    return load(folder, config=config, **kwargs)


def load(folder, **kwargs):
    """Load the causal language model saved in `folder`."""
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)
