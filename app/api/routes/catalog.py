"""`/models`: models that this server offers by name."""

from fastapi import APIRouter

from app.api.dependencies import ContextDep
from app.api.problems import problems
from app.api.resources import NamedList, NamedView
from app.shared import catalog

router = APIRouter(tags=["catalog"])


@router.get("/models", responses=problems())
def list_models(context: ContextDep) -> NamedList:
    """List the local models that `model_id` accepts; Hub models can be used as well."""
    return NamedList(data=[NamedView(id=name) for name in catalog.list_models(context.settings)])
