"""Capturing without torch: one line; and nothing imports torch before it is used."""

import subprocess
import sys

import pytest

import simlab.capture
from simlab.errors import UsageError


def test_without_torch_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"needs torch: pip install 'simlab\[capture\]'$"):
        simlab.capture.attach(object())
    with pytest.raises(UsageError, match="needs torch"), simlab.capture.tracing(object()):
        pass


def test_importing_does_not_import_torch():
    code = "import sys, simlab.capture as c; c.attach, c.tracing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_unknown_names():
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = simlab.capture.nothing_like_this
