"""`rocket migrate`: migration of the database's schema to this version."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli import options
from rocket_cli.service.server import check_schema, service_settings
from rocket_core.errors import InvalidConfigError

if TYPE_CHECKING:
    from app.shared.settings import Settings


Revision = Annotated[
    str | None,
    options.argument(
        "REVISION", "Revision to migrate to; an older one loses data that only later ones store.", "the newest"
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Change nothing; fail unless the schema is current.")]


def migrate(*, revision: Revision = None, check: Check = False, as_json: options.JsonResult = False) -> None:
    """Create the database's tables, or upgrade them; `rocket serve` does this automatically.

    Uses the database of ROCKET_DATABASE_URL.
    """
    with service_settings(as_json=as_json) as settings:
        if check:
            check_schema(settings)
        reached = None if check else _migrate(settings, revision)
    if as_json:
        typer.echo(json.dumps({"is_newest": True} if reached is None else {"revision": reached}))
    else:
        typer.echo("the schema is that of this version" if reached is None else f"the schema is at revision {reached}")


def _migrate(settings: "Settings", revision: str | None) -> str:
    from app.shared.database import downgrade, list_revisions, upgrade

    known = list_revisions()
    target = known[-1] if revision is None else revision
    if target not in known:
        raise InvalidConfigError(f"there is no such revision; known are {', '.join(known)}")
    # One of the two is a no-op.
    upgrade(settings.database, target)
    downgrade(settings.database, target)
    return target
