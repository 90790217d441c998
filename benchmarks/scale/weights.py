"""Random weights with the properties of trained ones that the time and the errors of a compression depend on.

- Singular values fall: a weight is Gaussian with its inputs scaled, in a rotated basis, by (i + 8)^-0.35.
- A few inputs have larger weights than the rest: one of 256, by a factor of 4.
- Token embeddings are correlated, with eigenvalues that fall like (i + 8)^-1.2, and have four hidden units that are 20
  times as large as the others ("massive activations"), as have the gains of norms for them, by a factor of 1 / 5.
- What blocks add to the hidden states is scaled so that these keep their size.
"""

import math
import shutil
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.scale.shapes import ModelSize

_DECAY, _EMBEDDING_DECAY, _BEGIN = 0.35, 0.6, 8
_OUTLIERS, _OUTLIER_SIZE = 256, 4.0
_MASSIVE, _MASSIVE_SIZE, _MASSIVE_GAIN = 4, 20.0, 0.2
# Matrices whose product is added to the hidden states.
_ADDED = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


def make_model(size: ModelSize, tokenizer: Path, folder: Path, *, blocks: int, vocabulary: int, seed: int = 0) -> Path:
    """Write a model of a size, with the tokenizer of another one; an existing folder is left as it is.

    Args:
        size: its shapes.
        tokenizer: folder with a tokenizer of at most `vocabulary` tokens.
        folder: where to write it.
        blocks: number of blocks.
        vocabulary: number of tokens.
        seed: seed of the weights.
    """
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = size.config(blocks=blocks, vocabulary=vocabulary)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    massive = torch.randperm(config.hidden_size, generator=generator)[:_MASSIVE]
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = _tensor(name, tuple(parameter.shape), massive, blocks, generator).bfloat16().contiguous()
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / file, folder / file)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensor(name: str, shape: tuple[int, ...], massive: Tensor, blocks: int, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        gains = 0.2 * torch.randn(shape, generator=generator)
        if "layernorm" in name or name == "model.norm.weight":
            gains[massive] += math.log(_MASSIVE_GAIN)
        return torch.exp(gains)
    if "embed_tokens" in name or "lm_head" in name:
        rows = torch.randn(shape, generator=generator) * _falling(shape[1], _EMBEDDING_DECAY)
        rows = rotated(rows)
        rows[:, massive] *= _MASSIVE_SIZE
        return rows
    stack = torch.stack([_matrix(shape[-2:], generator) for _ in range(math.prod(shape[:-2]))]).view(shape)
    return stack / (2 * blocks) ** 0.5 if name.endswith(_ADDED) else stack


def _matrix(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    rows, columns = shape
    weight = rotated(torch.randn(rows, columns, generator=generator) * _falling(columns, _DECAY))
    weight[:, torch.randperm(columns, generator=generator)[: columns // _OUTLIERS]] *= _OUTLIER_SIZE
    found: Tensor = weight / columns**0.5
    return found


def _falling(n: int, power: float) -> Tensor:
    """Return scales that fall like a power of their place, with a mean square of 1."""
    scales = (torch.arange(n) + _BEGIN).float() ** -power
    found: Tensor = scales / scales.square().mean().sqrt()
    return found


def rotated(rows: Tensor) -> Tensor:
    """Return rows in another orthonormal basis, by a Hartley transform."""
    spectrum = torch.fft.fft(rows)
    found: Tensor = (spectrum.real - spectrum.imag) / rows.shape[-1] ** 0.5
    return found
