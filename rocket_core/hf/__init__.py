"""Loading and saving compressed models through transformers.

Importing this package registers the quantization method `rocket` with transformers, for the current process:

    import rocket_core.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("path/to/artifact")

The artifact's `config.json` lists its stored layers by their names in the files, since in some families these differ
from the names of transformers' modules.

On a CPU, quantized layers compute from their codes; other layers are unpacked. To keep
coefficients and codes packed in memory (smaller, slower), set `config.quantization_config["keep_packed"] = True` and
pass `config=config`; `False` unpacks all layers, which then compute as dense ones do.
"""

from rocket_core.hf.attach import attach_factors
from rocket_core.hf.names import disk_names
from rocket_core.hf.quantizer import RocketConfig, RocketHfQuantizer

__all__ = ["RocketConfig", "RocketHfQuantizer", "attach_factors", "disk_names"]
