"""What to type to run an artifact, for each program that reads it."""

import json
import shlex
from dataclasses import dataclass
from typing import Literal, assert_never

from rocket_core.config import CalibrationKind
from rocket_core.engines import ExportKind
from rocket_core.report.schema import CompressionReport

GGUF_NAME = "model.gguf"
"""File of a GGUF export."""
PROJECTOR_NAME = "mmproj.gguf"
"""File next to it that reads images."""
MODELFILE_NAME = "Modelfile"
"""File next to it that Ollama reads."""

# Name and class of the preprocessor, by the kind of input.
_READERS: dict[CalibrationKind, tuple[str, str]] = {
    "text": ("tokenizer", "AutoTokenizer"),
    "images": ("processor", "AutoImageProcessor"),
    "audio": ("processor", "AutoProcessor"),
    "text and images": ("processor", "AutoProcessor"),
    "text and audio": ("processor", "AutoProcessor"),
}
# Package that `transformers` needs to read an export.
_PACKAGES: dict[ExportKind, str] = {
    "rocket": "import rocket_core.hf  # pip install 'rocket-compress[torch]'",
    "compressed-tensors": "import compressed_tensors  # pip install compressed-tensors",
}
_GENERATING = (
    'tokens = tokenizer("The first thing", return_tensors="pt")',
    "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=40)[0]))",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCommand:
    """How to run an artifact with one program.

    Attributes:
        program: name of the program.
        text: code or commands, without a line break at the end.
    """

    program: str
    text: str

    @property
    def language(self) -> Literal["python", "sh"]:
        """Language of the text."""
        return "python" if self.program == "transformers" else "sh"

    @property
    def purpose(self) -> str:
        """What the text does."""
        if self.language != "python":
            return f"Run it with {self.program}"
        return "Load it and generate text" if ".generate(" in self.text else "Load it"


def run_commands(report: CompressionReport, kind: ExportKind, folder: str) -> tuple[RunCommand, ...]:
    """Return what to type to run an artifact, the program that it was made for first.

    Args:
        report: report of the compression.
        kind: kind of the artifact.
        folder: folder of the artifact.
    """
    loading = RunCommand(program="transformers", text=_loading_code(report, kind, folder))
    served = report.model_class.endswith("ForCausalLM")
    match kind:
        case "rocket":
            return (loading,)
        case "dense":
            return (loading, _vllm(folder)) if served else (loading,)
        case "compressed-tensors":
            return (_vllm(folder), loading)
        case "mlx":
            return (RunCommand(program="mlx-lm", text=f"mlx_lm.generate --model {shlex.quote(folder)} --prompt Hello"),)
        case "olive":
            return (_onnx(report, folder),)
        case "gguf":
            return _gguf_commands(folder, reads_images="Image" in report.model_class)
        case _:
            assert_never(kind)


def _gguf_commands(folder: str, *, reads_images: bool) -> tuple[RunCommand, ...]:
    names = (GGUF_NAME, PROJECTOR_NAME, MODELFILE_NAME)
    file, projector, modelfile = (shlex.quote(f"{folder}/{name}") for name in names)
    files = f"-m {file} --mmproj {projector}" if reads_images else f"-m {file}"
    talk = f"llama-mtmd-cli {files} --image IMAGE -p Hello" if reads_images else f"llama-cli {files}"
    return (
        RunCommand(program="llama.cpp", text=f"{talk}\nllama-server {files}  # an OpenAI-compatible API"),
        RunCommand(program="Ollama", text=f"ollama create compressed -f {modelfile}\nollama run compressed"),
        RunCommand(program="LM Studio", text=f"lms import {file}"),
    )


def _onnx(report: CompressionReport, folder: str) -> RunCommand:
    options = ["fuse_qkv=false", "nodes_to_exclude=/lm_head/MatMul,/model/embed_tokens/Gather"]
    if all(tensors.name != "lm_head.weight" for tensors in report.tensors):
        options.append("shared_embeddings=true")
    build = f"python -m onnxruntime_genai.models.builder -i {shlex.quote(folder)} -o onnx -p int4 -e cuda"
    text = f"{build} --extra_options {' '.join(options)}  # or -e webgpu, -e cpu"
    return RunCommand(program="ONNX Runtime GenAI", text=text)


def _vllm(folder: str) -> RunCommand:
    return RunCommand(program="vLLM", text=f"vllm serve {shlex.quote(folder)}")


def _loading_code(report: CompressionReport, kind: ExportKind, folder: str) -> str:
    name, reader = _READERS[report.calibration.kind]
    quoted = json.dumps(folder)
    return "\n".join(
        [
            *([_PACKAGES[kind]] if kind in _PACKAGES else []),
            f"from transformers import {', '.join(sorted((report.model_class, reader)))}",
            "",
            f"model = {report.model_class}.from_pretrained({quoted})",
            f"{name} = {reader}.from_pretrained({quoted})",
            *(_GENERATING if report.model_class.endswith("ForCausalLM") and reader == "AutoTokenizer" else ()),
        ]
    )
