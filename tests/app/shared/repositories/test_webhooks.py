"""Turns of tenants and webhooks, and what several workers do at once."""

from datetime import timedelta

import pytest

from app.shared.models import Webhook, WebhookDelivery
from app.shared.repositories import tenants, webhooks

pytestmark = pytest.mark.databases("sqlite", "postgres")


@pytest.fixture
def do(database):
    def do(function, *arguments, **options):
        with database.transaction() as session:
            return function(session, *arguments, **options)

    return do


@pytest.fixture
def make(do):
    """Create a webhook of a tenant, with a delivery that is due."""

    def made(session, tenant):
        tenants.ensure_tenant(session, tenant)
        hook = webhooks.create_webhook(session, tenant, "https://example.org", ["job.failed"], "s")
        webhooks.queue_test(session, hook)
        return hook.id

    return lambda tenant: do(made, tenant)


@pytest.fixture
def queue(do, clock):
    """Queue a report to a webhook, which unlike a test is repeated."""

    def queued(session, hook_id):
        at = webhooks.now(session)
        number = session.query(WebhookDelivery).count()
        row = {"id": f"d{number}", "webhook_id": hook_id, "event": "job.failed", "body": {}}
        session.add(WebhookDelivery(**row, created_at=at, available_at=at))

    return lambda hook_id: do(queued, hook_id)


@pytest.fixture
def claim(do):
    return lambda: do(webhooks.claim_delivery)


@pytest.fixture
def finish(do):
    return lambda due, error=None, **options: do(webhooks.finish_delivery, due, error, **options)


def test_a_tenant_has_one_delivery_at_a_time(make, claim, finish, do):
    make("a"), make("a")
    first = claim()
    assert not do(webhooks.is_delivery_due)
    assert claim() is None
    finish(first)
    assert claim().id != first.id


def test_the_tenant_that_has_waited_longest_is_next(make, claim, finish, clock):
    for tenant in "aabbcc":
        make(tenant)
    order = []
    for _ in range(6):
        clock.advance(1)
        due = claim()
        order.append(due.owner)
        finish(due)
    assert order == [*"abcabc"]


def test_webhooks_of_a_tenant_take_turns(make, queue, claim, finish, clock):
    hooks = [make("a") for _ in range(3)]
    for _ in range(2):
        queue(hooks[0])
    order = []
    for _ in range(5):
        clock.advance(1)
        due = claim()
        order.append(hooks.index(due.webhook_id))
        finish(due)
    assert sorted(order[:3]) == [0, 1, 2]
    assert order[3:] == [0, 0]


def test_a_webhook_that_fails_slowly_rests_ever_longer(make, queue, claim, finish, clock):
    slow, good = make("a"), make("a")
    rests = []
    for _ in range(7):
        queue(slow)
        rested = 0
        while (due := claim()) is None or due.webhook_id == good:
            if due:
                finish(due)
            clock.advance(10)
            rested += 10
        rests.append(rested)
        finish(due, "no answer", is_slow=True)
    assert rests == [0, 30, 60, 120, 240, 480, 480]


def test_a_resting_webhook_does_not_delay_its_neighbour(make, queue, claim, finish):
    slow = make("a")
    finish(claim(), "no answer", is_slow=True)
    queue(slow)
    good = make("a")
    assert claim().webhook_id == good


@pytest.mark.parametrize("error", [None, "status 500"])
def test_an_answer_ends_a_rest(make, queue, claim, finish, clock, error):
    slow = make("a")
    for number, outcome in enumerate(("no answer", "no answer", error)):
        if number:
            queue(slow)
        clock.advance(60)
        finish(claim(), outcome, is_slow=outcome == "no answer")
    queue(slow)
    assert claim() is not None


def test_a_test_delivery_ends_a_rest_and_goes_first(make, queue, claim, finish, do, clock):
    hook = make("a")
    finish(claim(), "no answer", is_slow=True)
    queue(hook)
    assert claim() is None
    clock.advance(1)
    test = do(lambda session: webhooks.queue_test(session, session.get(Webhook, hook)).id)
    assert claim().id == test


def test_an_attempt_that_counts_as_lost_ends_nothing(make, claim, finish, do, clock):
    make("a"), make("a")
    late = claim()
    clock.advance(61)
    repeated = claim()
    finish(late)
    assert claim() is None, "the tenant's turn is that of another worker"
    finish(repeated)
    # Whichever came first, both are attempted again, and none is lost.
    assert claim() is not None


def test_a_deleted_webhook_gives_up_its_tenants_turn(make, claim, finish, do):
    hook, other = make("a"), make("a")
    due = claim()
    do(webhooks.delete_webhook, "a", due.webhook_id)
    finish(due)
    assert claim().webhook_id == ({hook, other} - {due.webhook_id}).pop()


def test_what_waits_too_long_for_a_resting_webhook_is_given_up(make, queue, claim, finish, do, clock):
    slow, idle = make("a"), make("b")
    while due := claim():
        finish(due, "no answer", is_slow=due.webhook_id == slow)
    queue(slow), queue(idle)
    clock.advance(4 * 24 * 3600)
    do(webhooks.forget_deliveries, retention=timedelta(days=30))
    waiting = do(
        lambda session: {row.webhook_id: row for row in session.query(WebhookDelivery) if row.event != "webhook.test"}
    )
    assert waiting[slow].available_at is None
    assert "too long" in waiting[slow].error
    # No worker was running.
    assert waiting[idle].available_at is not None


@pytest.mark.databases("postgres")  # on SQLite, the second transaction waits for the first
def test_claims_that_overlap_share_no_tenant(make, database):
    for tenant in "aabb":
        make(tenant)
    with database.transaction() as first, database.transaction() as second, database.transaction() as third:
        claims = [webhooks.claim_delivery(session) for session in (first, second, third)]
    assert [due and due.owner for due in claims] == ["a", "b", None]
