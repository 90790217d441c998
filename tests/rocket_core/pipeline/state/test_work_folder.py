from rocket_core.pipeline.state.work_folder import WorkFolder


def test_a_block_is_of_one_process_at_a_time(tmp_path):
    (tmp_path / "turns").mkdir()
    one, other = WorkFolder(tmp_path), WorkFolder(tmp_path)
    with (
        one.turn("profile", 3) as first,
        other.turn("profile", 3) as same,
        other.turn("profile", 4) as next_one,
        other.turn("compress", 3) as later,
    ):
        assert (first, same, next_one, later) == (True, False, True, True)
    with other.turn("profile", 3) as again:
        assert again
