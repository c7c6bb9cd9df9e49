"""One engine in a process of its own: prompts in, tokens and cached-token counts out, as JSON.

argv: a file with {"model", "root", "prompts", "tokens", "extra", "dump"}; answers beside it.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
}


def empty(folder):
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def watched():
    """Digests of the rows that were captured and filled, by layer and position."""
    from blake3 import blake3

    from kvplane.integrations.vllm.planning import parts
    from kvplane.integrations.vllm.working import WorkerSide

    seen = {"captured": {}, "filled": {}, "blocks": {}}
    capture, fill = WorkerSide._capture, WorkerSide._fill

    def note(kind, layer, first, key, value):
        for row in range(key.shape[0]):
            both = torch.cat([key[row].reshape(-1), value[row].reshape(-1)]).view(torch.uint8)
            seen[kind][f"{layer}.{first + row}"] = blake3(both.numpy().tobytes()).hexdigest()

    def noted_capture(self, job, cut):
        found = capture(self, job, cut)
        for item in found:
            for layer, (key, value) in item.rows.items():
                note("captured", layer, item.first, key, value)
        return found

    def noted_fill(self, job, rows):
        fill(self, job, rows)
        for item in rows.values():
            for layer in item.rows:
                at = self._table_of[layer]
                size = self._paged[at].block_size
                where = list(parts(job.tables[at], size, item.first, job.cut.state.position))
                note("filled", layer, item.first, *self._layers[layer].read(where))
                seen["blocks"][str(layer)] = sum(1 for block in job.tables[at] if block)

    WorkerSide._capture, WorkerSide._fill = noted_capture, noted_fill
    return seen


def main(file):
    import time

    from vllm.config import KVTransferConfig

    from vllm import LLM, SamplingParams

    asked = json.loads(Path(file).read_text())
    seen = watched()
    transfer = None
    if asked["root"] is not None:
        transfer = KVTransferConfig(
            kv_connector="KVPlaneConnector",
            kv_connector_module_path="kvplane.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"root": asked["root"]} | asked.get("extra", {}),
        )
    llm = LLM(
        model=asked["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=asked.get("max_model_len", 8192),
        kv_transfer_config=transfer,
        enable_prefix_caching=asked.get("local_prefixes", True),
        disable_hybrid_kv_cache_manager=False,
        seed=0,
        **asked.get("engine", {}),
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False
    )
    answers = []
    for prompt in asked["prompts"]:
        if isinstance(prompt, dict):
            # something that happens between two prompts
            empty(Path(prompt["empty"]))
            continue
        begun = time.perf_counter()
        (out,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        answers.append(
            {
                "tokens": list(out.outputs[0].token_ids),
                "cached": out.num_cached_tokens,
                "seconds": time.perf_counter() - begun,
            }
        )
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        get_kv_transfer_group().shutdown()
    Path(file + ".out").write_text(json.dumps({"answers": answers} | seen))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
