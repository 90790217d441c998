"""Masked language models whose size can only be reached by quantizing the token embedding."""

import pytest
import torch

from rocket_core.layers import QuantizedEmbedding
from rocket_core.pipeline import compress
from tests.reference.factored_models import file_bytes, logits
from tests.reference.masked_models import MASKED, build_masked, load_masked
from tests.reference.tiny_models import byte_tokenizer


@pytest.mark.parametrize("family", MASKED)
def test_a_size_below_the_embedding_is_reached(family, settings, tmp_path):
    model = build_masked(family).half()
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    size = round(0.45 * sum(len(data) for data in file_bytes(tmp_path / "model").values()))
    chosen = settings(ratio=None, target_bytes=size, preset="fast", sensitivity_samples=4)
    compress(str(tmp_path / "model"), tmp_path / "out", chosen)
    folder = tmp_path / "out" / "rocket"
    assert 0.9 * size < sum(len(data) for data in file_bytes(folder).values()) <= size
    loaded = load_masked(folder, dtype=torch.float32)
    assert type(loaded.get_input_embeddings()) is QuantizedEmbedding
    dense = load_masked(folder, dtype=torch.float32).dequantize()
    torch.testing.assert_close(logits(loaded), logits(dense), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(loaded), logits(model.float()), rtol=1, atol=4)
