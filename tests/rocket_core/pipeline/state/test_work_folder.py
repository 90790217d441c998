from rocket_core.pipeline.state.work_folder import WorkFolder


def test_a_block_is_of_one_process_at_a_time(tmp_path):
    (tmp_path / "locks").mkdir()
    one, other = WorkFolder(tmp_path), WorkFolder(tmp_path)
    with (
        one.lock_block("profile", 3) as first,
        other.lock_block("profile", 3) as same,
        other.lock_block("profile", 4) as next_one,
        other.lock_block("compress", 3) as later,
    ):
        assert (first, same, next_one, later) == (True, False, True, True)
    with other.lock_block("profile", 3) as again:
        assert again
