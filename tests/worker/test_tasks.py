from app.shared.queue import RUN_JOB, create_celery
from worker.runner import Runner
from worker.tasks import register_tasks


def task_of(settings, database, program):
    celery = create_celery(settings)
    register_tasks(celery, Runner(settings, database, program))
    return celery.tasks[RUN_JOB]


def test_a_message_runs_only_its_job(settings, database, program, diary, submit, look):
    older, notified = submit(max_attempts=1), submit(max_attempts=1)
    task_of(settings, database, program(diary.note("sys.argv[1]")))(notified)
    assert diary.read() == [notified]
    assert look(older).status == "queued"


def test_a_repeated_message_runs_its_job_once(settings, database, program, diary, submit):
    job_id = submit(max_attempts=1)
    task = task_of(settings, database, program(diary.note("sys.argv[1]")))
    for _ in range(3):
        task(job_id)
    assert diary.read() == [job_id]


def test_each_application_has_its_own_runner(settings, database, program, diary, submit):
    job_id = submit(max_attempts=1)
    stopped = Runner(settings, database, program("sys.exit(1)"))
    stopped.stop()
    register_tasks(create_celery(settings), stopped)
    task_of(settings, database, program(diary.note("sys.argv[1]")))(job_id)
    assert diary.read() == [job_id]


def test_a_message_of_an_unknown_job_does_nothing(settings, database, program):
    task_of(settings, database, program("sys.exit(1)"))("job_unknown")


def test_a_message_during_a_database_outage_is_dropped(settings, database, outage, program, submit, look, caplog):
    job_id = submit()
    task = task_of(settings, database, program("sys.exit(1)"))
    outage.begin(database)
    task(job_id)
    outage.end()
    assert "running a job" in caplog.text
    assert look(job_id).status == "queued"
