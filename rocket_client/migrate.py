"""`rocket migrate`: brings the database's schema to that of this version."""

from typing import TYPE_CHECKING, Annotated

import typer

from rocket_client.serving import require_schema, service_settings
from rocket_core.errors import InvalidConfigError

if TYPE_CHECKING:
    from app.shared.settings import Settings

NAME = "migrate"

Revision = Annotated[
    str | None,
    typer.Argument(
        metavar="REVISION",
        help="Where to bring the schema; back to an older one loses what only later ones know.",
        show_default="the newest",
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Change nothing; fail unless the schema is the newest.")]


def migrate(*, revision: Revision = None, check: Check = False) -> None:
    """Create the database's tables, or bring them up to date; `rocket serve` does so by itself.

    The database is that of ROCKET_DATABASE_URL.
    """
    with service_settings() as settings:
        if check:
            require_schema(settings)
            typer.echo("the schema is that of this version")
        else:
            _migrate(settings, revision)


def _migrate(settings: "Settings", revision: str | None) -> None:
    from app.shared.database import downgrade, list_revisions, upgrade

    known = list_revisions()
    target = known[-1] if revision is None else revision
    if target not in known:
        raise InvalidConfigError(f"there is no such revision; known are {', '.join(known)}")
    # Each does nothing where the schema is on the other side.
    upgrade(settings.database, target)
    downgrade(settings.database, target)
    typer.echo(f"the schema is at revision {target}")
