"""Print what vLLM reserves for a context on a CPU as JSON, with nothing of Rocket installed.

python run_vllm_memory.py FOLDER CONTEXT TOKENS_AT_ONCE
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config


def main() -> None:
    """Load the model, and divide the blocks by the requests that vLLM says they have room for."""
    folder, context, at_once = sys.argv[1:]
    llm = LLM(model=folder, max_model_len=int(context), max_num_batched_tokens=int(at_once), enforce_eager=True)
    core = llm.llm_engine.engine_core.engine_core
    cache = core.model_executor.driver_worker.worker.model_runner.kv_cache_config
    requests = get_max_concurrency_for_kv_cache_config(llm.llm_engine.vllm_config, cache)
    layers = max(len(group.layer_names) for group in cache.kv_cache_groups)
    spec = cache.kv_cache_groups[0].kv_cache_spec
    found = {"bytes": round(cache.num_blocks / requests) * layers * spec.page_size_bytes, "block": spec.block_size}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
