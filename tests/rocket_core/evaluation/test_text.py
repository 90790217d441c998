import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from rocket_core.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    EmptyCalibrationError,
    InvalidConfigError,
    ModelNotFoundError,
    UnknownDatasetError,
    UnsupportedArchitectureError,
)
from rocket_core.evaluation import evaluate_text, perplexity
from tests.reference.tiny_models import MAX_POSITIONS, build_llama, save_tiny_model

STORIES = ("One day a dog ran.", "A cat sat and sat.", "They met at the sea, and it was blue.", "The end of it.") * 8
SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    return path


def test_documents_start_with_bos_and_are_cut_into_windows(model_folder: Path, text: Path) -> None:
    model = build_llama()
    stream: list[int] = []
    for story in STORIES:
        stream += [1, *(token_of(character) for character in story)]
    windows = torch.tensor(stream[: 5 * 20]).reshape(5, 20)

    result = evaluate_text(model_folder, text, sequence_length=20, limit=5)

    assert result.perplexity == pytest.approx(perplexity(model, windows, batch_size=5).perplexity, rel=1e-5)
    assert (result.windows, result.tokens, result.sequence_length) == (5, 5 * 19, 20)
    assert (result.model, result.text) == (str(model_folder), str(text))
    assert (result.device, result.dtype) == ("cpu", "float32")


def token_of(character: str) -> int:
    """Return the id of an ASCII character, after 3 special tokens: printable characters come first."""
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    others = [byte for byte in range(256) if byte not in printable]
    return 3 + [*printable, *others].index(ord(character))


def test_without_a_limit_all_whole_windows_are_read(model_folder: Path, text: Path) -> None:
    tokens = sum(1 + len(story) for story in STORIES)

    result = evaluate_text(model_folder, text, sequence_length=10)

    assert result.windows == tokens // 10


def test_sequence_length_defaults_to_a_small_models_positions(model_folder: Path, text: Path) -> None:
    assert evaluate_text(model_folder, text, limit=1).sequence_length == MAX_POSITIONS


@pytest.mark.parametrize("sequence_length", [1, MAX_POSITIONS + 1])
def test_an_impossible_sequence_length_is_refused(model_folder: Path, text: Path, sequence_length: int) -> None:
    with pytest.raises(InvalidConfigError, match="sequence length"):
        evaluate_text(model_folder, text, sequence_length=sequence_length)


def test_invalid_settings_are_refused(model_folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="limit"):
        evaluate_text(model_folder, text, limit=0)
    with pytest.raises(InvalidConfigError, match="device"):
        evaluate_text(model_folder, text, device="abacus")
    with pytest.raises(InvalidConfigError, match=r"\.jsonl"):
        evaluate_text(model_folder, tmp_path / "stories.pdf")
    with pytest.raises(UnknownDatasetError):
        evaluate_text(model_folder, tmp_path / "missing.txt")


def test_a_text_shorter_than_a_window_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("short")

    with pytest.raises(EmptyCalibrationError):
        evaluate_text(model_folder, short, sequence_length=32)


def test_a_folder_without_a_model_is_an_error(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        evaluate_text(tmp_path / "nowhere", text)


def test_missing_weights_are_an_error(text: Path, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(CorruptCheckpointError, match="up_proj"):
        evaluate_text(folder, text, limit=1)


def test_weights_of_another_shape_are_an_error(text: Path, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(CorruptCheckpointError):
        evaluate_text(folder, text, limit=1)


def test_truncated_weights_are_an_error(text: Path, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(CorruptCheckpointError):
        evaluate_text(folder, text, limit=1)


def test_pickled_weights_are_not_read(text: Path, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()

    with pytest.raises(CheckpointFormatError, match="safetensors"):
        evaluate_text(folder, text, limit=1)


def test_a_model_that_is_not_a_language_model_is_an_error(text: Path, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))

    with pytest.raises(UnsupportedArchitectureError):
        evaluate_text(folder, text, sequence_length=8, limit=1)


def test_tokens_beyond_the_embeddings_are_an_error(text: Path, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:40].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 40}))

    with pytest.raises(CheckpointFormatError, match="40 embeddings"):
        evaluate_text(folder, text, limit=1)


def test_the_result_is_frozen(model_folder: Path, text: Path) -> None:
    result = evaluate_text(model_folder, text, sequence_length=8, limit=1)

    with pytest.raises(ValidationError):
        result.perplexity = 1.0


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the data beside the repository")
def test_a_trained_model_has_the_known_perplexity() -> None:
    result = evaluate_text(
        SHARED_DATA / "models" / "stories260K-hf",
        SHARED_DATA / "text" / "tinystories_val.jsonl",
        sequence_length=256,
        limit=96,
    )

    assert result.perplexity == pytest.approx(3.805, abs=5e-4)
