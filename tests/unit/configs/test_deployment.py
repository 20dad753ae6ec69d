"""Configuration is checked at start-up (I13)."""

from pathlib import Path

import pytest

from configs import load_deployment, parse_setting, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    assert load_deployment(name).cluster.num_workers >= 1


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_num_tokenz"):
        load_deployment("local-cpu", {"scheduler": {"max_num_tokenz": 1}})


def test_an_unknown_source_names_the_presets() -> None:
    with pytest.raises(FileNotFoundError, match="local-cpu"):
        load_deployment("no-such-preset")


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load_deployment(str(path))


def test_a_batch_larger_than_the_index_slots_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_batch_size=64 exceeds cache\.max_sequences=8"):
        load_deployment("local-cpu", {"cache": {"max_sequences": 8}})


def test_one_role_without_the_other_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one of each"):
        load_deployment("local-cpu", {"cluster": {"generation_workers": 0}})


def test_tiers_out_of_order_are_refused() -> None:
    tiers = [{"tier": "host", "quota_bytes": 1}, {"tier": "device", "quota_bytes": 1}]
    with pytest.raises(ValueError, match="device, then host, then disk"):
        load_deployment("local-cpu", {"cache": {"tiers": tiers}})


def test_an_override_wins_over_the_preset() -> None:
    config = load_deployment("local-cpu", {"server": {"port": 9}})
    assert config.server.port == 9


def test_a_setting_of_the_command_line_is_read_as_yaml() -> None:
    assert parse_setting("scheduler.max_num_tokens=128") == ("scheduler", "max_num_tokens", 128)
    assert parse_setting("cache.tiers=[{tier: device, quota_bytes: 5}]")[2] == [{"tier": "device", "quota_bytes": 5}]


@pytest.mark.parametrize("text", ["", "scheduler", "scheduler=1", ".key=1", "scheduler.=1", "scheduler.a=[1"])
def test_a_setting_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="setting"):
        parse_setting(text)
