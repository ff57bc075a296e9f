"""A share of ``make fuzz``: the audit against plain ``torch.compile`` over random programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.compiles
def test_the_audit_says_of_random_programs_what_plain_compile_does() -> None:
    command = [sys.executable, str(FUZZ), "--first", "0", "--count", "4"]
    env = os.environ | {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "seeds 0 to 3 done, 0 problems" in done.stdout
