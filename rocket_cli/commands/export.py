"""`rocket export`: an artifact in another format, made after the compression."""

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli import options
from rocket_cli.exit_codes import reported_failures
from rocket_cli.progress_view import hide_library_bars, progress_view
from rocket_cli.report_table import print_export
from rocket_core.system.gc_pause import no_collection
from rocket_core.system.torch_environment import set_torch_defaults

if TYPE_CHECKING:
    from rocket_core.report.schema import CompressionReport, ExportReport


class Format(StrEnum):
    """Formats that a finished artifact can be written in."""

    DENSE = "dense"
    GGUF = "gguf"
    COMPRESSED_TENSORS = "compressed-tensors"


_Artifact = Annotated[Path, options.argument("ARTIFACT", "Folder `rocket` of a compression.", shown=False)]
_Output = Annotated[Path, options.argument("OUT", "New folder for the export.", shown=False)]
To = Annotated[
    Format,
    options.option(
        "FORMAT",
        "dense (stock names and shapes, as large as the original, for any tool that reads the original), gguf "
        "(llama.cpp, Ollama, LM Studio) or compressed-tensors (vLLM).",
        shown=False,
    ),
]


def export(*, artifact: _Artifact, output: _Output, to: To, as_json: options.Json = False) -> None:
    """Write ARTIFACT in another format into OUT, with exactly the same weights.

    Every artifact can be written as dense. The other formats cannot hold every kind of layer; where they cannot, the
    error says how to compress for them instead.
    """
    with reported_failures(as_json=as_json):
        made, report = _run(artifact, output, to, quiet=as_json)
    if as_json:
        typer.echo(made.model_dump_json(indent=2))
    else:
        print_export(made, output, report)


def _run(artifact: Path, output: Path, to: Format, *, quiet: bool) -> tuple["ExportReport", "CompressionReport | None"]:
    set_torch_defaults(os.environ)
    with no_collection(lasting=True):
        from rocket_core.exports.artifact_folder import read_report
        from rocket_core.exports.conversion import export_artifact

    hide_library_bars()
    with progress_view(quiet=quiet) as view:
        made = export_artifact(
            artifact, output, to.value, on_step=lambda share, tensor: view.show("exporting", tensor, share, None)
        )
    return made, read_report(output)
