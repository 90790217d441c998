"""Rows as released versions wrote them, in plain SQL: models change, rows in existing databases do not."""

import json

from sqlalchemy import Connection

CREATED = "2026-03-01 10:00:00.123456"
LATER = "2026-03-01 11:30:00.000000"
EXPIRES = "2026-03-08 11:30:00.000000"
OTHER_EXPIRES = "2026-03-09 00:00:00.000000"

_REQUEST = {"model_id": "local/tiny", "ratio": 0.3, "metadata": {"team": 'it\'s "b" ünï: 100%'}}
_CANDIDATES = [{"kind": "dense", "kept_parameters": 64}, {"kind": "factored", "rank": 2, "nnz": 10}]


_NULLABLE = (
    *("stage", "started_at", "finished_at", "estimated_finish_at", "fence", "claimed_by", "lease_until", "rung_at"),
    *("work_key", "retry_of", "error", "result"),
)


def _job(job_id, status, **changes):
    nothing = dict.fromkeys(_NULLABLE)
    return {
        "id": job_id,
        "owner": "local",
        "request": _REQUEST,
        "status": status,
        "progress": 0.0,
        "created_at": CREATED,
        "attempt": 0,
        "max_attempts": 5,
        "available_at": CREATED,
        "last_event": 1,
        **nothing,
        **changes,
    }


def _artifact(job_id, name, key, expires_at):
    file = {"size": 3_000_000_000, "sha256": "0" * 64, "media_type": "application/json", "created_at": LATER}
    return {"job_id": job_id, "name": name, "storage_key": key, "expires_at": expires_at, **file}


_HELD = {"fence": "f" * 32, "claimed_by": "host:1", "lease_until": LATER, "attempt": 1, "started_at": CREATED}

AT_0001 = {
    "jobs": [
        _job("job_1", "succeeded", finished_at=LATER, progress=1.0, attempt=2, result={"achieved_ratio": 0.3}),
        _job("job_2", "failed", finished_at=LATER, work_key="b" * 32, error={"code": "disk_full"}),
        _job("job_3", "queued", retry_of="job_2", work_key="c" * 32, rung_at=LATER),
        _job("job_4", "running", stage="calibrating", progress=0.5, estimated_finish_at=LATER, **_HELD),
        _job("job_5", "cancelling", **{**_HELD, "fence": "e" * 32}),
        _job("job_6", "succeeded", owner="other", finished_at=LATER, progress=1.0, attempt=1),
    ],
    "job_events": [
        {"job_id": "job_1", "sequence": 1, "created_at": CREATED, "level": "info", "type": "status"}
        | {"message": "queued", "data": {"status": "queued"}},
    ],
    "layer_profiles": [
        {"job_id": "job_1", "name": "model.layers.0.q", "position": 0, "d_in": 8, "d_out": 8, "input_group": "g"}
        | {"tokens": 5_000_000_000, "candidates": _CANDIDATES, "created_at": LATER},
    ],
    "allocations": [
        {"job_id": "job_1", "name": name, "position": position, "kind": kind, "rank": rank, "nnz": nnz}
        | {"kept_parameters": 5_000_000_000, "stored_bytes": 120, "reconstruction_error": 0.1, "weight_error": 0.2}
        | {"created_at": LATER}
        for position, (name, kind, rank, nnz) in enumerate([("q", "factored", 2, 10), ("k", "dense", None, None)])
    ],
    "reports": [{"job_id": "job_1", "body": {"rocket_version": "0.1.0"}, "created_at": LATER}],
    "artifacts": [
        _artifact("job_1", "report.json", "a" * 32, EXPIRES),
        _artifact("job_1", "factored/model.safetensors", "d" * 32, EXPIRES),
        # Its file has been removed, its row stays.
        _artifact("job_6", "report.json", None, OTHER_EXPIRES),
    ],
    "outbox": [{"id": 7, "job_id": "job_3", "created_at": LATER}],
    "idempotency_keys": [
        {"owner": "local", "key": "k", "fingerprint": "1" * 64, "job_id": "job_1", "created_at": CREATED}
        | {"expires_at": LATER},
    ],
}
"""Every table of revision 0001 with rows, parents first."""


def fill(connection: Connection, rows_of: dict[str, list[dict[str, object]]]) -> None:
    """Insert rows as literal SQL, which both databases read alike."""
    for table, rows in rows_of.items():
        for row in rows:
            values = ", ".join(_literal(value, connection.dialect.name) for value in row.values())
            _execute(connection, f"INSERT INTO {table} ({', '.join(row)}) VALUES ({values})")  # noqa: S608


def read(connection: Connection, rows_of: dict[str, list[dict[str, object]]]) -> dict[str, list[str]]:
    """Return all rows of the tables, in the columns in which they were filled."""
    found = {}
    for table, rows in rows_of.items():
        answer = _execute(connection, f"SELECT {', '.join(rows[0])} FROM {table}")  # noqa: S608
        found[table] = sorted(map(str, answer))
    return found


def _execute(connection, statement):
    # A colon in a value must not be taken for a parameter.
    return connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def _literal(value: object, dialect: str) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, (dict, list)):
        return _literal(json.dumps(value), dialect)
    if not isinstance(value, str):
        return str(value)
    zone = "+00" if dialect == "postgresql" and value in {CREATED, LATER, EXPIRES, OTHER_EXPIRES} else ""
    return "'" + (value + zone).replace("'", "''") + "'"
