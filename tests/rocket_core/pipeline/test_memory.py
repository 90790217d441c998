"""Peak memory of a run, which is that of one block."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.reference.tiny_models import save_tiny_model
from tests.sampling import sweep

MEASURE = """
import resource, sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from rocket_core.config import compression_config
from rocket_core.pipeline import compress

def anonymous():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))

peak, before = 0, anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
# Most layers are ignored to be quick; the weights of every block still pass through memory, and one layer is large
# enough for its Gram matrix, basis and candidates to show if blocks held on to them.
config = compression_config(
    ratio=0.3, preset=sys.argv[4], kinds=("low_rank", "sparse"),
    ignore=("*.q_proj", "*.k_proj", "*.v_proj", "*.mlp.*"),
    calibration={"dataset": sys.argv[3], "samples": 8, "sequence_length": 32},
)
compress(sys.argv[1], Path(sys.argv[2]), config)
print(peak - before)
"""


def save_wide_model(folder, blocks):
    save_tiny_model("llama", folder)  # for its tokenizer
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=6144,
        num_hidden_layers=blocks,
        num_attention_heads=8,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# The pass backwards is measured in `stages/test_sensitivity.py`.
@pytest.mark.parametrize(("few", "many", "preset"), sweep([(2, 6, "paper")], soak=[(4, 16, "fast")]))
def test_memory_hardly_grows_with_the_number_of_blocks(tmp_path, text, few, many, preset):
    peaks = {}
    for blocks in (few, many):
        model = tmp_path / f"model{blocks}"
        save_wide_model(model, blocks)
        size = (model / "model.safetensors").stat().st_size
        assert size / blocks >= 40e6
        measured = subprocess.run(
            [sys.executable, "-c", MEASURE, str(model), str(tmp_path / f"out{blocks}"), str(text), preset],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        )
        peaks[blocks] = int(measured.stdout.splitlines()[-1])
    assert peaks[many] <= 1.2 * peaks[few], peaks
    assert many < 16 or peaks[many] < size / 2, (peaks, size)
