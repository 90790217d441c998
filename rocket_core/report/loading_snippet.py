"""The lines of Python that load an artifact."""

from rocket_core.config import ExportKind, InputKind
from rocket_core.report.schema import CompressionReport

# What makes a model's inputs, by what it reads.
_READERS: dict[InputKind, tuple[str, str]] = {
    "text": ("tokenizer", "AutoTokenizer"),
    "images": ("processor", "AutoImageProcessor"),
    "audio": ("processor", "AutoProcessor"),
}


def loading_snippet(report: CompressionReport, kind: ExportKind, folder: str) -> str:
    """What loads an artifact with plain transformers.

    Args:
        report: of the compression.
        kind: which artifact.
        folder: where it is.
    """
    name, reader = _READERS[report.calibration.kind]
    first = ["import rocket_core.hf  # pip install 'rocket-compress[worker]'"] if kind == "factored" else []
    return "\n".join(
        [
            *first,
            f"from transformers import {', '.join(sorted((report.model_class, reader)))}",
            "",
            f'model = {report.model_class}.from_pretrained("{folder}")',
            f'{name} = {reader}.from_pretrained("{folder}")',
        ]
    )
