"""This library with `transformers`, which reads every kind."""

from typing import get_args

from rocket_core.code_format import ANY_CODES
from rocket_core.engines.engine import Engine, Kind

ROCKET = Engine(
    name="rocket",
    title="transformers with rocket_core.hf",
    exports=("factored",),
    readable=("factored", "dense"),
    kinds=get_args(Kind),
    codes=ANY_CODES,
    tables=True,
)
