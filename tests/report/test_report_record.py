from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import sample_report
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.errors import ConfigError, DataError
from fedgist.report.record import read_json, versions, write_json
from fedgist.whole import write_whole

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["inf", "-inf", "nan", "\\inf", "\\\\nan", "\udc80"]),
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_any_report_comes_back_as_it_was(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any-report.json"
    write_json(path, data)
    assert read_json(path) == data


def test_the_file_is_strict_json_with_inf_as_text(tmp_path):
    path = tmp_path / "report.json"
    write_json(path, {"epsilon": math.inf, "low": -math.inf, "gone": math.nan, "class": "inf"})
    raw = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert raw == {"epsilon": "inf", "low": "-inf", "gone": "nan", "class": "\\inf"}
    back = read_json(path)
    assert back["epsilon"] == math.inf and back["low"] == -math.inf and math.isnan(back["gone"])
    assert back["class"] == "inf"


def test_a_whole_report_survives(tmp_path):
    path = tmp_path / "report.json"
    data = sample_report.report(claim_record=sample_report.claim(math.inf))
    write_json(path, data)
    back = read_json(path)
    data["claim"]["notes"] = list(data["claim"]["notes"])  # JSON knows no tuples
    assert back == data
    assert max(len(line) for line in path.read_text().splitlines() if "released" not in line) < 4000
    assert len(path.read_text().splitlines()) < 350  # lists of numbers stay on one line


@pytest.mark.parametrize("bad", [np.float32(1), {1, 2}, Path("x"), b"bytes"])
def test_a_value_that_is_not_json_is_named(tmp_path, bad):
    with pytest.raises(DataError, match=r"report\.details\.counts\[1\] must be a plain JSON value"):
        write_json(tmp_path / "report.json", {"details": {"counts": [1, bad]}})
    assert not list(tmp_path.iterdir())


def test_keys_must_be_text(tmp_path):
    with pytest.raises(DataError, match="keys of report must be text"):
        write_json(tmp_path / "report.json", {3: "x"})


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": NaN}', '{"a": Infinity}', "\xff"])
def test_a_damaged_report_is_one_line(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="report must be a JSON"):
        read_json(path)


def test_a_missing_report_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.json"):
        read_json(tmp_path / "nothing.json")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_whole(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConfigError, match=r"report\.json.*No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"file/report\.json"):
        write_json(tmp_path / "file" / "report.json", {})


def test_versions_name_what_results_depend_on():
    found = versions()
    assert {"python", "fedgist", "torch", "numpy", "system"} <= set(found)
    assert all(isinstance(v, str) for v in found.values())
