import json
import subprocess
import sys

import pytest
import torch

from tests.reference.factored_models import INPUT_IDS, load, logits
from tests.sampling import sweep


def run_python(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WITHOUT_ROCKET = """
import json, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from transformers import AutoModelForCausalLM
root, ids = Path(sys.argv[1]), torch.load(sys.argv[1] + "/ids.pt", weights_only=True)
answer = {}
for family in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(root / family / "dense")
    with torch.no_grad():
        torch.save(model(ids).logits, root / family / "logits.pt")
    try:
        AutoModelForCausalLM.from_pretrained(root / family / "rocket")
    except RuntimeError as error:
        answer[family] = str(error)
assert "rocket_core" not in sys.modules
print(json.dumps(answer))
"""


def test_without_the_import_only_factored_models_fail(artifacts, tmp_path):
    torch.save(INPUT_IDS, tmp_path / "ids.pt")
    expected = {}
    for family, (model, folder) in artifacts.items():
        model.save_pretrained(tmp_path / family / "rocket")
        dense = load(folder).dequantize()
        dense.save_pretrained(tmp_path / family / "dense")
        expected[family] = logits(dense)
    errors = run_python(WITHOUT_ROCKET, tmp_path, *artifacts)
    assert errors.keys() == artifacts.keys()
    assert all("size" in message or "shape" in message for message in errors.values())
    for family, wanted in expected.items():
        assert torch.equal(torch.load(tmp_path / family / "logits.pt", weights_only=True), wanted)


# In a separate process: reloading creates new classes, and run-time type checks cannot be compiled.
RELOAD_AND_COMPILE = """
import importlib, json, sys, torch
torch.set_num_threads(1)
import rocket_core.hf
importlib.reload(importlib.reload(rocket_core.hf))
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
models = [AutoModelForCausalLM.from_pretrained(sys.argv[1])]
assert type(models[0].hf_quantizer) is rocket_core.hf.RocketHfQuantizer
for keep_packed in (False, True):
    config.quantization_config["keep_packed"] = keep_packed
    models.append(AutoModelForCausalLM.from_pretrained(sys.argv[1], config=config))
answer, ids = [], torch.arange(10)[None]
for model in models:
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model.model.layers[0].mlp, fullgraph=True, backend="eager")
        x = torch.ones(1, 2, model.config.hidden_size)
        answer.append(torch.equal(compiled(x), model.model.layers[0].mlp(x)))
print(json.dumps(answer))
"""


@pytest.mark.parametrize("name", sweep(["llama, all kinds"], soak=["llama", "llama, quantized"]))
def test_artifacts_can_be_reloaded_and_compiled(artifacts, name):
    assert run_python(RELOAD_AND_COMPILE, artifacts[name][1]) == [True, True, True]


EVALUATION_ALONE = """
import json, sys
import rocket_core.evaluation
from transformers import AutoModelForCausalLM
print(json.dumps(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__))
"""


def test_evaluation_loads_artifacts_without_another_import(artifacts):
    assert run_python(EVALUATION_ALONE, artifacts["llama, all kinds"][1]) == "LlamaForCausalLM"
