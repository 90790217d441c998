from rocket_core.report.schema import CompressionReport
from tests.rocket_cli.fakes import build_report


def test_the_report_is_the_table_of_compress_with_next_commands(remote, service):
    job_id = service.succeeded({})

    out = remote("report", job_id).out

    assert "0.attn.q_proj factored  200" in out
    assert "4.5M of 6M compressible ones kept" in out
    assert f"    rocket download {job_id}" in out.splitlines()
    assert f'from_pretrained("{job_id}/rocket")' in out


def test_json_output_is_the_report(remote, service):
    outcome = remote("report", service.succeeded({}), "--json")

    assert CompressionReport.model_validate_json(outcome.out) == build_report()


def test_a_job_that_has_not_succeeded_has_no_report(remote, service):
    outcome = remote("report", service.submit())

    assert outcome.code == 8
    assert "the job is queued" in outcome.err
