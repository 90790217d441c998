"""The transformers class that a configuration describes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSpeechSeq2Seq,
    PretrainedConfig,
    PreTrainedModel,
)

from rocket_core.inspection.headers.model_fields import predicts_tokens

_CREATING = frozenset({torch.empty, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros})
# More numbers than any buffer has.
_LARGE = 2**26


def named_classes(config: PretrainedConfig) -> list[str]:
    """Return the class names in a configuration's `architectures`, without invalid entries."""
    declared = config.architectures if isinstance(config.architectures, list) else []
    return [name for name in declared if isinstance(name, str) and name.isidentifier()]


def named_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the transformers class that a configuration names first; None if it does not exist or does not fit."""
    name = next(iter(named_classes(config)), "")
    named = getattr(transformers, name, None)
    fits = isinstance(named, type) and issubclass(named, PreTrainedModel) and named.config_class is type(config)
    return named if fits else None


def reads_images_and_text(config: PretrainedConfig) -> bool:
    """Return whether a model continues text that may contain images, which a tower encodes."""
    has_tower = getattr(config, "vision_config", None) is not None
    return has_tower and not config.is_encoder_decoder and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def reads_audio_and_text(config: PretrainedConfig) -> bool:
    """Return whether a model continues text that may contain audio, and reads no images."""
    has_parts = getattr(config, "text_config", None) is not None and not config.is_encoder_decoder
    known = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING or type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    return has_parts and known and getattr(config, "vision_config", None) is None


def decodes_several_kinds(config: PretrainedConfig) -> bool:
    """Return whether a model's decoder is one of several parts, of which others encode images or audio for it."""
    return reads_images_and_text(config) or reads_audio_and_text(config)


def reads_in_order(config: PretrainedConfig) -> bool:
    """Return whether a model of text is a decoder, whatever its head: a token's state depends on those before it."""
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    # Some encoders can be configured as decoders.
    return type(config) not in MODEL_FOR_MASKED_LM_MAPPING or bool(getattr(config, "is_decoder", False))


def is_causal(config: PretrainedConfig) -> bool:
    """Return whether a model predicts each token only from those before it."""
    return decodes_several_kinds(config) or (reads_in_order(config) and predicts_tokens(config.to_dict()))


def generating_class(config: PretrainedConfig) -> Any:
    """Return the Auto class that loads a model which predicts tokens."""
    if reads_images_and_text(config):
        return AutoModelForImageTextToText
    if not reads_audio_and_text(config):
        return AutoModelForCausalLM
    return AutoModelForMultimodalLM if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING else AutoModelForSpeechSeq2Seq


@contextmanager
def without_weights() -> Iterator[None]:
    """Build models with parameters on the meta device, and real buffers, while the context is active."""
    with init_empty_weights(include_buffers=False), _LargeTensorsOnMeta():
        yield


class _LargeTensorsOnMeta(TorchFunctionMode):
    """Creates large tensors on the meta device: a parameter is a real tensor until its module has it.

    Some models fill them, such as Llama 4 the weights of its experts with zeros: gigabytes in every block. Weights that
    are there already are not initialized.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        tensor = options.get("tensor")
        if (
            getattr(func, "__module__", "") == torch.nn.init.__name__
            and isinstance(tensor, torch.Tensor)
            and tensor.is_meta
        ):
            return tensor
        if func in _CREATING and _numbers(options.get("size", args)) > _LARGE:
            options["device"] = "meta"
        return func(*args, **options)


def _numbers(sizes: Any) -> int:
    """Return the numbers in a tensor of the given sizes, which may be separate arguments or one."""
    if isinstance(sizes, tuple | list) and sizes and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    return math.prod(size for size in sizes if isinstance(size, int)) if isinstance(sizes, tuple | list) else 0


def build_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with new weights: of the class that predicts tokens, else of the class that its config names.

    Args:
        config: the model's configuration.
        dtype: dtype of the parameters.
    """
    causal = is_causal(config)
    named = None if causal else named_class(config)
    model: PreTrainedModel
    if named is not None:
        model = named._from_config(config, dtype=dtype)
    else:
        loader = generating_class(config) if causal else AutoModel
        model = loader.from_config(config, dtype=dtype, trust_remote_code=False)
    return model
