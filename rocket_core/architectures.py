"""What a Hugging Face decoder looks like inside: repeated blocks and the linear layers that can be compressed.

Everything is discovered; nothing is copied from modeling files. A layer counts if it is exactly `nn.Linear` or `Conv1D`
inside a repeated block, is not tied, is not the head, and is later seen by a forward hook.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rocket_core import inspection
from rocket_core.errors import (
    AlreadyQuantizedError,
    ModelNotFoundError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A model without weights, and where its blocks are.

    Attributes:
        model: parameters on the meta device, buffers real.
        blocks_name: module name of the list of repeated blocks.
        layers: names of the compressible layers of each block, in model order.
    """

    model: PreTrainedModel
    blocks_name: str
    layers: tuple[tuple[str, ...], ...]

    @property
    def blocks(self) -> nn.ModuleList:
        """The repeated blocks."""
        blocks = self.model.get_submodule(self.blocks_name)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def shape(self, layer: str) -> tuple[int, int]:
        """`(d_in, d_out)` of a layer."""
        d_in, d_out = oriented_weight(self.model.get_submodule(layer)).shape
        return d_in, d_out

    @property
    def vocabulary(self) -> int:
        """Tokens that the model has embeddings for."""
        embeddings = self.model.get_input_embeddings().weight
        assert isinstance(embeddings, Tensor)
        return embeddings.shape[0]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        tied = set(self.model.all_tied_weights_keys)
        return sum(value.numel() for name, value in self.model.named_parameters() if name not in tied)

    @property
    def compressible_parameters(self) -> int:
        """Parameters of the compressible layers."""
        shapes = [self.shape(name) for block in self.layers for name in block]
        return sum(d_in * d_out for d_in, d_out in shapes)


def read_config(folder: Path) -> PretrainedConfig:
    """Reads `config.json` and refuses what cannot be compressed.

    Args:
        folder: checkpoint folder.

    Raises:
        ModelNotFoundError: there is no config.json.
        AlreadyQuantizedError: the weights are quantized or already compressed.
        UnsupportedArchitectureError: the installed transformers does not know the architecture.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} has no config.json; give the folder of a transformers checkpoint")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # The latter two where a field is of another type than transformers takes for granted.
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise UnsupportedArchitectureError(
            f"the installed transformers cannot read {folder / 'config.json'}: {_first_line(error)}. "
            "Architectures that bring their own code are not supported"
        ) from error
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise AlreadyQuantizedError(
            f"the checkpoint is already compressed or quantized (quant_method {method!r}); "
            "start from the original floating-point weights"
        )
    return config


def build_architecture(config: PretrainedConfig, dtype: torch.dtype) -> Architecture:
    """Builds the model without its weights and finds its compressible layers.

    Args:
        config: the model's configuration.
        dtype: dtype of the parameters.

    Raises:
        UnsupportedArchitectureError: no causal language model, no single list of repeated blocks, or no plain linear
            layer in them.
    """
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        raise UnsupportedArchitectureError(
            f"model type {config.model_type!r} is no decoder-only language model: {_first_line(error)}"
        ) from error
    model.eval()
    model.requires_grad_(requires_grad=False)
    blocks_name = _find_blocks(model)
    blocks = model.get_submodule(blocks_name)
    assert isinstance(blocks, nn.ModuleList)
    layers = tuple(
        tuple(f"{blocks_name}.{index}.{name}" for name in _linear_names(model, block, f"{blocks_name}.{index}"))
        for index, block in enumerate(blocks)
    )
    if not any(layers):
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} has no nn.Linear or Conv1D layer in {blocks_name} that could be compressed"
        )
    return Architecture(model=model, blocks_name=blocks_name, layers=layers)


def window_length(config: PretrainedConfig, requested: int | None) -> int:
    """Tokens per window of text.

    Args:
        config: the model's configuration.
        requested: what the user asked for; None takes 1024, or what the model attends to if that is less.

    Raises:
        InvalidConfigError: fewer than 2 tokens, or more than the model has positions for.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return inspection.window_length(None if positions is None else int(positions), requested)


def oriented_weight(module: nn.Module) -> Float[Tensor, "d_in d_out"]:
    """A view of a layer's weight as the mathematics has it: `nn.Linear` stores the transpose, `Conv1D` does not."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach() if type(module) is Conv1D else weight.detach().mT


def ignored_layers(names: Sequence[str], patterns: Iterable[str]) -> dict[str, str]:
    """Layers that ignore patterns take out, each with its pattern.

    Args:
        names: names of all compressible layers.
        patterns: glob patterns on the full name, such as `*.down_proj` or `model.layers.0.*`.

    Raises:
        UnmatchedIgnoreError: a pattern matches no layer.
    """
    ignored: dict[str, str] = {}
    for pattern in patterns:
        matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise UnmatchedIgnoreError(
                f"ignore pattern {pattern!r} matches none of the {len(names)} compressible layers"
                f"{_suggestion(names, pattern)}"
            )
        for name in matches:
            ignored.setdefault(name, pattern)
    return ignored


def _find_blocks(model: PreTrainedModel) -> str:
    block_classes = set(model._no_split_modules or ())
    lists: dict[str, nn.ModuleList] = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    found = [name for name, module in lists.items() if any(type(block).__name__ in block_classes for block in module)]
    if not found:
        # Few models name no block class; the outermost list of like modules with linear layers stands in for it.
        alike = [name for name, blocks in lists.items() if len({type(block) for block in blocks}) == 1]
        found = [name for name in alike if any(type(module) in _LINEAR_TYPES for module in lists[name].modules())][:1]
    if len(found) != 1:
        what = f"several lists of blocks ({', '.join(found)})" if found else "no list of repeated blocks"
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} has {what}; only decoder-only models can be compressed"
        )
    return found[0]


_LINEAR_TYPES = (nn.Linear, Conv1D)


def _linear_names(model: PreTrainedModel, block: nn.Module, prefix: str) -> list[str]:
    tied_keys = model.all_tied_weights_keys
    tied = {*tied_keys.keys(), *tied_keys.values()}
    head = model.get_output_embeddings()
    return [
        name
        for name, module in block.named_modules()
        # The exact type: subclasses (routers, non-quantizable projections) are used in ways of their own.
        if type(module) in _LINEAR_TYPES and module is not head and f"{prefix}.{name}.weight" not in tied
    ]


def _suggestion(names: Sequence[str], pattern: str) -> str:
    leaves = sorted({name.rsplit(".", 1)[-1] for name in names})
    close = difflib.get_close_matches(pattern.strip("*."), leaves, n=1)
    return f"; did you mean '*.{close[0]}'?" if close else f"; layers are called like {names[0]!r}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
