"""`/metrics`: what Prometheus collects. Who may read it is decided where every request is admitted."""

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
    """Counters of this process, and what the database tells of the whole service."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.metrics), headers={"Content-Type": media_type})
