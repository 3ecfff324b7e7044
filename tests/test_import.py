"""``import linformers`` needs torch, numpy and safetensors, and nothing else."""

import subprocess
import sys

SCRIPT = """
import sys
import torch, numpy, safetensors, safetensors.torch
before = {name.partition(".")[0] for name in sys.modules}
import linformers
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(after - before - sys.stdlib_module_names - {"linformers"}))
"""


def test_import_brings_in_nothing_else():
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_public_names_exist():
    import linformers

    for name in linformers.__all__:
        assert getattr(linformers, name).__doc__
