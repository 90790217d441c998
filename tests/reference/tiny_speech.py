"""One tiny model of each tested family that reads text and audio, made on demand; as in `tiny_vision`."""

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    GraniteSpeechConfig,
    GraniteSpeechForConditionalGeneration,
    PreTrainedModel,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    VibeVoiceAsrConfig,
    VibeVoiceAsrForConditionalGeneration,
    VibeVoiceConfig,
    VibeVoiceForConditionalGeneration,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    WhisperFeatureExtractor,
)

from tests.reference.tiny_mixtures import CHOSEN, EXPERT_SIZE, EXPERTS
from tests.reference.tiny_models import HIDDEN_SIZE, byte_tokenizer
from tests.reference.tiny_vision import _DEEP_TOWER, _INTERLEAVED, _QWEN_PIXELS, _TEXT, _build

AUDIO_TOKEN = 264
RATE = 16000
_WHISPER: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 16,
    "max_source_positions": 32,
}
_VOXTRAL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 16,
    "max_source_positions": 32,
}
_OMNI: dict[str, Any] = _WHISPER | {
    # Processors count with this one.
    "n_window": 50,
    "n_window_infer": 100,
    "output_dim": HIDDEN_SIZE,
    "downsample_hidden_size": 8,
    "conv_chunksize": 8,
}
_CODEC: dict[str, Any] = {
    "n_filters": 2,
    "num_filters": 2,
    "downsampling_ratios": [2, 2],
    "depths": [1, 1, 1],
    "hidden_size": 8,
}


def build_qwen2_audio() -> PreTrainedModel:
    """Return Qwen2 with an encoder of audio like Whisper's."""
    config = Qwen2AudioConfig(
        text_config=_TEXT | {"model_type": "qwen2"}, audio_config=_WHISPER, audio_token_index=AUDIO_TOKEN
    )
    return _build(Qwen2AudioForConditionalGeneration, config)


def build_voxtral() -> PreTrainedModel:
    """Return Llama with an encoder of audio like Whisper's."""
    config = VoxtralConfig(text_config=_TEXT | {"head_dim": 8}, audio_config=_VOXTRAL, audio_token_id=AUDIO_TOKEN)
    return _build(VoxtralForConditionalGeneration, config)


def build_qwen3_omni_thinker() -> PreTrainedModel:
    """Return a mixture with a tower of images and one of audio."""
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": EXPERT_SIZE}
    config = Qwen3OmniMoeThinkerConfig(
        text_config=_TEXT | _INTERLEAVED | experts,
        vision_config=_DEEP_TOWER | {"deepstack_visual_indexes": [0]},
        audio_config=_OMNI,
        audio_token_id=AUDIO_TOKEN,
        image_token_id=260,
        video_token_id=261,
        vision_start_token_id=262,
        audio_start_token_id=263,
    )
    return _build(Qwen3OmniMoeThinkerForConditionalGeneration, config)


def build_qwen3_asr() -> PreTrainedModel:
    """Return Qwen3 with an encoder of audio."""
    config = Qwen3ASRConfig(text_config=_TEXT | {"head_dim": 8}, audio_config=_OMNI, audio_token_id=AUDIO_TOKEN)
    return _build(Qwen3ASRForConditionalGeneration, config)


def build_granite_speech() -> PreTrainedModel:
    """Return Granite with a conformer."""
    encoder = {
        "input_dim": 16,
        "num_layers": 2,
        "hidden_dim": 16,
        "feedforward_mult": 2,
        "num_heads": 2,
        "dim_head": 8,
        "output_dim": 8,
        "context_size": 8,
        "max_pos_emb": 8,
        "conv_kernel_size": 3,
    }
    projector = {
        "model_type": "blip_2_qformer",
        "hidden_size": 16,
        "encoder_hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 8,
    }
    config = GraniteSpeechConfig(
        text_config=_TEXT | {"model_type": "granite"},
        encoder_config=encoder,
        projector_config=projector,
        audio_token_index=AUDIO_TOKEN,
        has_lora_adapter=False,
        window_size=4,
        downsample_rate=2,
    )
    return _build(GraniteSpeechForConditionalGeneration, config)


def build_vibevoice() -> PreTrainedModel:
    """Return Qwen2 that predicts what a diffusion head makes audio of."""
    config = VibeVoiceConfig(
        text_config=_TEXT | {"model_type": "qwen2"},
        audio_config=_CODEC,
        semantic_model_config=_CODEC,
        diffusion_head_config={
            "hidden_size": HIDDEN_SIZE,
            "num_head_layers": 1,
            "intermediate_size": 32,
            "latent_size": 8,
        },
    )
    return _build(VibeVoiceForConditionalGeneration, config)


def build_vibevoice_asr() -> PreTrainedModel:
    """Return Qwen2 with two encoders of audio."""
    config = VibeVoiceAsrConfig(
        text_config=_TEXT | {"model_type": "qwen2"},
        acoustic_tokenizer_encoder_config=_CODEC,
        semantic_tokenizer_encoder_config=_CODEC,
        audio_token_id=AUDIO_TOKEN,
    )
    return _build(VibeVoiceAsrForConditionalGeneration, config)


SPEECH: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2_audio": build_qwen2_audio,
    "voxtral": build_voxtral,
    "qwen3_omni_moe_thinker": build_qwen3_omni_thinker,
    "qwen3_asr": build_qwen3_asr,
    "granite_speech": build_granite_speech,
    "vibevoice": build_vibevoice,
    "vibevoice_asr": build_vibevoice_asr,
}


def save_tiny_speech(family: str, folder: Path) -> Path:
    """Write a complete checkpoint of a family, without a processor of audio."""
    SPEECH[family]().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


# From token 259 on, by the attributes that processors read.
_TOKENS = {
    "unused_token": "<unused>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_token": "<|AUDIO|>",
    "audio_eos_token": "<|audio_end|>",
    "vision_eos_token": "<|vision_end|>",
}
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<|AUDIO|>' if part['type'] == 'audio' else part['text'] }}{% endfor %}{% endfor %}"
)
# Settings of the processor; by family, of its feature extractor.
_PROCESSOR = {"qwen3_omni_moe_thinker": {"processor_class": "Qwen3OmniMoeProcessor"}}
_EXTRACTORS: dict[str, dict[str, Any]] = {
    # As many frames as the encoder reads.
    "qwen2_audio": {"chunk_length": 1, "hop_length": 250},
    "qwen3_omni_moe_thinker": {"chunk_length": 30},
    "qwen3_asr": {"chunk_length": 30},
}


def save_tiny_speech_processor(family: str, folder: Path) -> Path:
    """Add the processor of text and audio to a checkpoint: that of Qwen2-Audio with a short template for chats."""
    extractor = Qwen3ASRFeatureExtractor if family == "qwen3_asr" else WhisperFeatureExtractor
    extractor(feature_size=16, sampling_rate=RATE, **_EXTRACTORS[family]).save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    if family == "qwen3_omni_moe_thinker":
        settings |= _QWEN_PIXELS
    file.write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps(_PROCESSOR.get(family, {})))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = _TEMPLATE if family == "qwen2_audio" else None
    tokenizer.add_tokens(list(_TOKENS.values()), special_tokens=True)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | _TOKENS))
    return folder


def write_recording(file: Path, *, seconds: float = 0.5, rate: int = RATE, seed: int = 0) -> Path:
    """Write a `.wav` file: a tone and noise, PCM, one channel of 16 bits."""
    length = int(seconds * rate)
    noise = np.random.default_rng(seed).normal(size=length)
    sound = 0.5 * np.sin(np.arange(length) * (0.05 + 0.02 * seed)) + 0.05 * noise
    with wave.open(str(file), "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(rate)
        recording.writeframes((sound.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file
