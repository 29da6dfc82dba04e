"""The README's example prints what the README says, the name of the instruction set aside."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("native")
def test_the_screen_of_use_prints_what_is_shown():
    code = re.search(r"```python\n(.*?)```", README, re.S)
    shown = re.search(r"prints\n\n```\n(.*?)```", README, re.S)
    assert code is not None
    assert shown is not None
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code.group(1), {})
    finally:
        torch.set_printoptions(profile="default")
    any_isa = re.compile(r"cpu \(\w+\)")
    assert any_isa.sub("cpu", printed.getvalue()) == any_isa.sub("cpu", shown.group(1))


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README
