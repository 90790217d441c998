"""`/metrics`: metrics for Prometheus. Access is checked by the access middleware."""

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from app.api.problems import problems

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    response_class=Response,
    responses=problems() | {200: {"content": {"text/plain": {}}, "description": "Metrics in Prometheus' text format"}},
)
def read_metrics(request: Request) -> Response:
    """Return the counters of this process, and figures of the whole service from the database."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.metrics), headers={"Content-Type": media_type})
