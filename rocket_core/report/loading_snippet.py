"""Python code that loads an artifact."""

import json

from rocket_core.config import ExportKind, InputKind
from rocket_core.report.schema import CompressionReport

# Name and class of the preprocessor, by the kind of input.
_READERS: dict[InputKind, tuple[str, str]] = {
    "text": ("tokenizer", "AutoTokenizer"),
    "images": ("processor", "AutoImageProcessor"),
    "audio": ("processor", "AutoProcessor"),
}


def loading_snippet(report: CompressionReport, kind: ExportKind, folder: str) -> str:
    """Return the code that loads an artifact with plain transformers.

    Args:
        report: report of the compression.
        kind: kind of the artifact.
        folder: folder of the artifact.
    """
    name, reader = _READERS[report.calibration.kind]
    quoted = json.dumps(folder)
    first = ["import rocket_core.hf  # pip install 'rocket-compress[torch]'"] if kind == "factored" else []
    return "\n".join(
        [
            *first,
            f"from transformers import {', '.join(sorted((report.model_class, reader)))}",
            "",
            f"model = {report.model_class}.from_pretrained({quoted})",
            f"{name} = {reader}.from_pretrained({quoted})",
        ]
    )
