"""The web application, and what its OpenAPI document says of itself."""

from operator import attrgetter
from typing import Any

from fastapi import FastAPI
from starlette.types import Lifespan

from app.api.problems import Problem
from rocket_core.version import __version__


class Application(FastAPI):
    """The application, without routes."""

    def __init__(self, *, lifespan: Lifespan["Application"]) -> None:
        """Create it.

        Args:
            lifespan: what is active while it serves.
        """
        # The framework's own documentation pages load scripts from third-party servers. Generated clients call their
        # functions as operations are called.
        super().__init__(
            title="Rocket",
            version=__version__,
            lifespan=lifespan,
            docs_url=None,
            redoc_url=None,
            generate_unique_id_function=attrgetter("name"),
        )

    def openapi(self) -> dict[str, Any]:
        """Return the document, with the schema that the responses of `problems` refer to."""
        document = super().openapi()
        document["components"]["schemas"].setdefault(Problem.__name__, Problem.model_json_schema())
        return document
