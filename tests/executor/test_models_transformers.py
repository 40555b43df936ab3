"""transformers looks for a package named `kernels`; finding ours must not stop its model classes from importing."""

import subprocess
import sys
from pathlib import Path

from octavo.kernels import choice

IMPORTS = """
from octavo.kernels import choice
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
print(choice.__file__)
"""


def test_model_classes_import_beside_our_kernels() -> None:
    root = Path(choice.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == choice.__file__
