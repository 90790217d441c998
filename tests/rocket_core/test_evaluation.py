import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rocket_core.errors import (
    CheckpointError,
    CheckpointFormatError,
    CorruptCheckpointError,
    EmptyCalibrationError,
    InvalidConfigError,
    ModelNotFoundError,
    UnknownDatasetError,
    UnsupportedArchitectureError,
)
from rocket_core.evaluation import evaluate_text, perplexity
from tests.reference.tiny_models import MAX_POSITIONS, VOCAB_SIZE, build_llama, save_tiny_model

STORIES = ("One day a dog ran.", "A cat sat and sat.", "They met at the sea, and it was blue.", "The end of it.") * 8
SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"


class FixedLogits(nn.Module):
    """Answers every window with logits that depend on the token read last."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.eval()

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    return path


def random_windows(count: int, length: int, vocabulary: int = VOCAB_SIZE) -> Tensor:
    return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(1))


def nll_token_by_token(model: nn.Module, window: list[int]) -> list[float]:
    """Each token's surprise given the prefix before it, read from scratch in float64."""
    surprises = []
    for position in range(1, len(window)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([window[:position]])).logits[0, -1]
        scores = [math.exp(value) for value in logits.tolist()]
        surprises.append(math.log(sum(scores)) - logits[window[position]].item())
    return surprises


def test_equals_the_mean_surprise_of_one_token_after_another() -> None:
    model = build_llama().double()
    windows = random_windows(3, 7)
    surprises = [surprise for window in windows.tolist() for surprise in nll_token_by_token(model, window)]

    result = perplexity(model, windows, batch_size=2)

    assert result.negative_log_likelihood == pytest.approx(sum(surprises) / len(surprises), rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(sum(surprises) / len(surprises)), rel=1e-12)
    assert (result.tokens, result.windows) == (3 * 6, 3)


def test_indifferent_model_is_as_perplexed_as_its_vocabulary_is_large() -> None:
    result = perplexity(FixedLogits(torch.zeros(37, 37)), random_windows(5, 9, 37), batch_size=2)

    assert result.perplexity == pytest.approx(37, rel=1e-6)


def test_first_token_of_a_window_is_not_predicted_and_the_last_not_read() -> None:
    sure_of_one = torch.full((3, 3), -50.0)
    sure_of_one[:, 1] = 50.0
    sure_of_one[2] = float("nan")  # row of the token that only stands last

    result = perplexity(FixedLogits(sure_of_one), torch.tensor([[0, 1, 1, 1]]), batch_size=1)
    assert result.perplexity == pytest.approx(1)

    result = perplexity(FixedLogits(sure_of_one), torch.tensor([[1, 1, 2]]), batch_size=1)
    assert result.negative_log_likelihood == pytest.approx(50)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_batch_size_does_not_matter(batch_size: int) -> None:
    model, windows = build_llama(), random_windows(10, 16)

    result = perplexity(model, windows, batch_size=batch_size)

    assert result.perplexity == pytest.approx(perplexity(model, windows, batch_size=3).perplexity, rel=1e-5)


def test_half_precision_logits_are_summed_in_float32() -> None:
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    windows = random_windows(20, 64, 64)

    result = perplexity(FixedLogits(table), windows, batch_size=4)

    exact = perplexity(FixedLogits(table.double()), windows, batch_size=4)
    assert result.negative_log_likelihood == pytest.approx(exact.negative_log_likelihood, rel=1e-6)


def test_hopeless_model_has_infinite_perplexity_but_a_finite_loss() -> None:
    table = torch.zeros(2, 2)
    table[:, 0] = 1000.0

    result = perplexity(FixedLogits(table), torch.tensor([[0, 1, 1]]), batch_size=1)

    assert result.perplexity == math.inf
    assert result.negative_log_likelihood == pytest.approx(1000)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_an_error_that_names_the_window(value: float) -> None:
    table = torch.zeros(4, 4)
    table[3, 2] = value

    with pytest.raises(CheckpointError, match="window 2 "):
        perplexity(FixedLogits(table), torch.tensor([[0, 1], [1, 1], [3, 1]]), batch_size=2)


def test_model_in_training_mode_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="eval"):
        perplexity(build_llama().train(), random_windows(1, 4), batch_size=1)


@pytest.mark.parametrize(("count", "length", "batch_size"), [(0, 8, 1), (2, 1, 1), (2, 8, 0)])
def test_nothing_to_predict_is_refused(count: int, length: int, batch_size: int) -> None:
    with pytest.raises(InvalidConfigError):
        perplexity(build_llama(), torch.zeros(count, length, dtype=torch.int64), batch_size=batch_size)


def test_progress_counts_windows_to_the_end() -> None:
    seen: list[tuple[int, int]] = []

    perplexity(
        build_llama(), random_windows(5, 4), batch_size=2, on_progress=lambda done, total: seen.append((done, total))
    )

    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_text_is_cut_into_windows_of_documents_that_begin_with_bos(model_folder: Path, text: Path) -> None:
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
    """Id of an ASCII character after 3 special tokens: printable ones stand for themselves and come first."""
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    others = [byte for byte in range(256) if byte not in printable]
    return 3 + [*printable, *others].index(ord(character))


def test_without_a_limit_all_whole_windows_are_read(model_folder: Path, text: Path) -> None:
    tokens = sum(1 + len(story) for story in STORIES)

    result = evaluate_text(model_folder, text, sequence_length=10)

    assert result.windows == tokens // 10


def test_sequence_length_defaults_to_the_positions_of_a_small_model(model_folder: Path, text: Path) -> None:
    assert evaluate_text(model_folder, text, limit=1).sequence_length == MAX_POSITIONS


@pytest.mark.parametrize("sequence_length", [1, MAX_POSITIONS + 1])
def test_sequence_length_that_the_model_cannot_read_is_refused(
    model_folder: Path, text: Path, sequence_length: int
) -> None:
    with pytest.raises(InvalidConfigError, match="sequence length"):
        evaluate_text(model_folder, text, sequence_length=sequence_length)


def test_nonsense_settings_are_refused(model_folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="limit"):
        evaluate_text(model_folder, text, limit=0)
    with pytest.raises(InvalidConfigError, match="device"):
        evaluate_text(model_folder, text, device="abacus")
    with pytest.raises(InvalidConfigError, match=r"\.jsonl"):
        evaluate_text(model_folder, tmp_path / "stories.csv")
    with pytest.raises(UnknownDatasetError):
        evaluate_text(model_folder, tmp_path / "missing.txt")


def test_text_shorter_than_a_window_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("short")

    with pytest.raises(EmptyCalibrationError):
        evaluate_text(model_folder, short, sequence_length=32)


def test_folder_without_a_model_is_an_error(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        evaluate_text(tmp_path / "nowhere", text)


def test_missing_weights_are_an_error_and_not_random_numbers(text: Path, tmp_path: Path) -> None:
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


def test_cut_off_weights_are_an_error(text: Path, tmp_path: Path) -> None:
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


def test_model_that_is_no_causal_language_model_is_an_error(text: Path, tmp_path: Path) -> None:
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


def test_result_is_frozen(model_folder: Path, text: Path) -> None:
    result = evaluate_text(model_folder, text, sequence_length=8, limit=1)

    with pytest.raises(ValidationError):
        result.perplexity = 1.0


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the data beside the repository")
def test_trained_model_has_the_perplexity_measured_elsewhere() -> None:
    result = evaluate_text(
        SHARED_DATA / "models" / "stories260K-hf",
        SHARED_DATA / "text" / "tinystories_val.jsonl",
        sequence_length=256,
        limit=96,
    )

    assert result.perplexity == pytest.approx(3.805, abs=5e-4)
