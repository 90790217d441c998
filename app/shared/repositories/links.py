"""Links that show a finished job to people without a key. Only a token's id and a hash of its secret are stored."""

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.models import Link
from app.shared.repositories.tokens import Tokens

_TOKENS = Tokens("rl")


def create_link(session: Session, job_id: str, *, with_files: bool) -> tuple[Link, str]:
    """Create the link of a job that has none.

    Returns:
        Its row, and the token, which cannot be shown again.
    """
    token = _TOKENS.make()
    row = Link(
        id=token.id,
        job_id=job_id,
        secret_sha256=token.secret_sha256,
        with_files=with_files,
        created_at=now(session),
    )
    session.add(row)
    session.flush()
    return row, token.text


def find_link(session: Session, job_id: str) -> Link | None:
    """Return the link of a job; None if it has none."""
    return session.scalars(select(Link).where(Link.job_id == job_id)).one_or_none()


def find_by_token(session: Session, text: str) -> Link | None:
    """Return the link with a token; None if the token is wrong, or its link has ended."""
    token = _TOKENS.parse(text)
    row = None if token is None else session.get(Link, token.id)
    return row if token is not None and row is not None and token.is_of(row.secret_sha256) else None


def delete_link(session: Session, job_id: str) -> bool:
    """End the link of a job; return whether it had one."""
    ended = delete(Link).where(Link.job_id == job_id).returning(Link.id)
    return session.execute(ended).one_or_none() is not None
