"""Links that show a finished job to people without a key."""

from app.services import outputs
from app.services.context import Context
from app.shared.errors import LinkNotFoundError
from app.shared.models import Job, Link
from app.shared.repositories import audit, jobs, links, tenants
from app.shared.repositories.audit import Action, Actor


def create_link(context: Context, actor: Actor, job_id: str, *, with_files: bool) -> tuple[Link, str]:
    """Create a link to a finished job, and end the one that it has.

    Args:
        context: the service.
        actor: who creates it.
        job_id: the job.
        with_files: whether the link also gives the job's files.

    Returns:
        The link, and its token, which cannot be shown again.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
        ReportNotReadyError: the job has nothing to show.
    """
    outputs.get_report(context, actor.tenant, job_id)
    with context.database.transaction() as session:
        tenants.lock_tenant(session, actor.tenant)
        jobs.get_job(session, job_id, actor.tenant)
        if links.delete_link(session, job_id):
            audit.record(session, actor, Action.LINK_DELETE, subject=job_id)
        row, token = links.create_link(session, job_id, with_files=with_files)
        audit.record(session, actor, Action.LINK_CREATE, subject=job_id, detail={"with_files": int(with_files)})
    return row, token


def find_link(context: Context, owner: str, job_id: str) -> Link | None:
    """Return the link to a job; None if it has none.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return links.find_link(session, jobs.get_job(session, job_id, owner).id)


def end_link(context: Context, actor: Actor, job_id: str) -> None:
    """End the link to a job.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
        LinkNotFoundError: the job has no link.
    """
    with context.database.transaction() as session:
        jobs.get_job(session, job_id, actor.tenant)
        if not links.delete_link(session, job_id):
            raise no_link()
        audit.record(session, actor, Action.LINK_DELETE, subject=job_id)


def open_link(context: Context, token: str) -> tuple[Link, Job]:
    """Return the link with a token, and its job.

    Raises:
        LinkNotFoundError: the token is wrong, or its link has ended.
    """
    with context.database.snapshot() as session:
        row = links.find_by_token(session, token)
        job = None if row is None else session.get(Job, row.job_id)
    if row is None or job is None:
        raise LinkNotFoundError("this link does not exist, or was ended; ask whoever sent it for another one")
    return row, job


def no_link() -> LinkNotFoundError:
    """Return the error for a job without a link."""
    return LinkNotFoundError("the job has no link, or it was ended already")
