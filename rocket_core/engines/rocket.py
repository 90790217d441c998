"""This library with `transformers`, which reads every kind."""

from typing import get_args

from rocket_core.code_format import formats_for
from rocket_core.engines.engine import Engine, Kind

ROCKET = Engine(
    name="rocket",
    title="transformers with rocket_core.hf",
    exports=("factored", "dense"),
    readable=("factored", "dense"),
    kinds=get_args(Kind),
    formats=formats_for,
    tables=True,
)
