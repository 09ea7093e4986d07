from demo import new_name


def test_new_name_is_of_no_earlier_run_or_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new_name() == "demo"
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "exported/demo-2").mkdir(parents=True)
    assert new_name() == "demo-3"
