"""Arguments and options of the commands, each declared once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rocket_core import config


class ExportChoice(StrEnum):
    """The values of `ExportKind`: typer takes a list of an enumeration, but not of a Literal."""

    FACTORED = "factored"
    DENSE = "dense"


_WINDOW_DEFAULT = "1024, or less if the model takes less"

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, or a repository of the Hugging Face hub.", show_default=False)
]
Output = Annotated[
    Path, typer.Argument(metavar="OUT", help="Folder for the result: each export gets a folder of its own in it.")
]
Ratio = Annotated[
    float, typer.Option(metavar="R", help="Fraction of the compressible parameters to remove, from 0 to below 1.")
]
Calibration = Annotated[
    str,
    typer.Option(
        metavar="NAME_OR_FILE",
        help=f"Calibration text: {config.BUILTIN_DATASET} (CPython's documentation, offline), "
        f"{', '.join(config.HUB_DATASETS)}, or a .txt or .jsonl file.",
    ),
]
Samples = Annotated[int, typer.Option(metavar="N", help="Windows of calibration text.")]
SequenceLength = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens per window.", show_default=_WINDOW_DEFAULT)
]
Seed = Annotated[int, typer.Option(metavar="N", help="Which windows are drawn.")]
Objective = Annotated[
    config.Objective,
    typer.Option(
        metavar="NAME",
        help="What to minimise: weight (error of the weights, with a cap on each layer) or whitened (error of the "
        "layers' output).",
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Layers to leave alone, like '*.down_proj'; repeatable."),
]
Export = Annotated[
    list[ExportChoice] | None,
    typer.Option(metavar="KIND", help="What to write: factored or dense; repeatable.", show_default="both"),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    config.StorageDtype,
    typer.Option(
        metavar="DTYPE",
        help="In which the model runs and is stored: auto (the checkpoint's own), float32, float16 or bfloat16.",
    ),
]
Precision = Annotated[
    config.Precision,
    typer.Option(metavar="DTYPE", help="Of the factorization: float32, or float64, which is slower."),
]
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of the repository.", show_default="main")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")]
Json = Annotated[bool, typer.Option("--json", help="Write the report to stdout as JSON, errors too.")]

Text = Annotated[Path, typer.Option(metavar="FILE", help='A .txt file, or a .jsonl file of {"text": ...} documents.')]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Windows to read.", show_default="all")]
JsonErrors = Annotated[
    bool, typer.Option("--json", help="Write errors to stdout as JSON too; the result is JSON in any case.")
]
