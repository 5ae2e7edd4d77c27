"""Decoding from caches in codes: one layer of latents or of heads, and a whole model.

    python -m benchmarks.coded --json benchmarks/results/coded.json
    python -m benchmarks.coded --models converted-folder other-folder --context 8000

Attention to codes, attention to the same tokens in bfloat16 and the reading of memory are timed in turn. The limit of
each is the time to read its bytes at the rate of that reading.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import Kept, say
from torch import Tensor

import headwise
from headwise.measure.timing.machine import Probes
from headwise.measure.timing.timing import time_call
from headwise.runtime.hf import HeadwiseCache
from headwise.runtime.kernels import attend
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native.abi import TURN
from headwise.runtime.kernels.native.calls import attend_trellis
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.codec import Stored
from headwise.runtime.quantization.formats import parse_format
from headwise.runtime.quantization.transform_code import SINKS, blocks, trellis_layout

LATENT_HEADS, FREQUENCIES = 9, 32
LATENTS = {"191+192": (191, 192), "240+96": (240, 96)}
"""Widths of a latent and a rotary key, of conversions of SmolLM2-135M."""

HEADS = {"9/3/64": (9, 3, 64), "32/8/128": (32, 8, 128)}
"""Query heads, key–value heads and channels."""

FORMATS = ("int4", "int4:32", "int8", "kivi4", "kivi4:32", "3 bits", "4 bits")
"""Formats of heads: those of `HeadwiseCache`, and headwise's own code of so many bits a value."""

BITS = " bits"
"""The end of the names of headwise's own codes."""

COPIES = 4
"""Caches that are read in turn, as the layers of a model are."""

Call = Callable[[int], object]
"""Attends to one of `COPIES` caches, by its number."""


def own_time(call: Callable[[], object]) -> float:
    """Seconds of the processor that a call took of this thread."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def code_of(sections: tuple[int, ...], parts: tuple[int, ...], bits: float) -> TransformCode:
    """A code of about so many bits a value: more for the first channels of each section."""
    counts: list[int] = []
    for width in sections:
        blocks_of = len(list(blocks((width,))))
        counts += [round(bits + 2 - 4 * (i + 0.5) / blocks_of) for i in range(blocks_of)]
    width = sum(sections)
    return TransformCode(torch.zeros(width), torch.ones(width), tuple(counts), sections, parts)


def coded_tokens(code: TransformCode, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[COPIES, 1, 1, tokens, bytes]``, wide values of the first tokens and their slots."""
    codes = torch.randint(0, 256, (COPIES, 1, 1, tokens, code.token_bytes), dtype=torch.uint8)
    codes[..., 0] = 0x55
    wide = torch.zeros(1, SINKS, code.width, dtype=torch.bfloat16)
    return codes, wide, torch.zeros(1, dtype=torch.int64)


def rotation(tokens: int) -> tuple[Tensor, Tensor]:
    """cos and sin ``[tokens, FREQUENCIES]``."""
    angles = torch.arange(tokens)[:, None] * 1e5 ** (-torch.arange(FREQUENCIES) / FREQUENCIES)
    return angles.cos(), angles.sin()


def latent_calls(
    shape: str, bits: float, tokens: int, dtype: torch.dtype, *, content: bool
) -> tuple[Call, Call, int]:
    """Attention to latents in codes and in bfloat16, and the bytes of the codes."""
    rank, rotary = LATENTS[shape]
    code = code_of((rank, rotary // 2, rotary // 2), (rank, rotary), bits)
    codes, wide, first = coded_tokens(code, tokens)
    tables, frequency = rotation(tokens), torch.randint(0, FREQUENCIES, (rotary // 2,))
    layout = trellis_layout(code, (tables[0][:TURN, frequency], tables[1][:TURN, frequency]))
    query = torch.randn(1, LATENT_HEADS, 1, code.width if content else rotary) / 10
    latents = torch.randn(COPIES, 1, 1, tokens, code.width).to(torch.bfloat16)
    own, narrow = query.to(dtype), query.to(torch.bfloat16)

    def coded(i: int) -> Tensor:
        return attend_trellis(own, codes[i], wide, first, layout, tables, frequency, Scoring(None, True, 0.1))

    def plain(i: int) -> Tensor:
        keys = latents[i] if content else latents[i, ..., rank:]
        return attend(narrow, keys, latents[i, ..., :rank], scale=0.1, is_causal=True)

    return coded, plain, codes[0].numel()


def heads_calls(shape: str, form: str, tokens: int, dtype: torch.dtype) -> tuple[Call, Call, int]:
    """Attention to heads in codes and in bfloat16, and the bytes of the codes."""
    H, K, D = HEADS[shape]
    query = torch.randn(1, H, 1, D)
    own, narrow = query.to(dtype), query.to(torch.bfloat16)
    keys, values = torch.randn(2, COPIES, 1, K, tokens, D).to(torch.bfloat16)

    def plain(i: int) -> Tensor:
        return attend(narrow, keys[i], values[i], is_causal=True)

    if not form.endswith(BITS):
        codec, caches = parse_format(form), stored_caches(form, (K, D), tokens)
        nbytes = sum(part.nbytes for part in caches[0].tensors)
        return (lambda i: codec.attend(own, caches[i], Scoring(None, True, D**-0.5))), plain, nbytes
    code = code_of((D,) * (2 * K), (K * D, K * D), float(form.removesuffix(BITS)))
    codes, wide, first = coded_tokens(code, tokens)
    tables, frequency = rotation(tokens), torch.arange(D // 2) % FREQUENCIES
    layout = trellis_layout(code, (tables[0][:TURN, frequency], tables[1][:TURN, frequency]))

    def coded(i: int) -> Tensor:
        return attend_trellis(own, codes[i], wide, first, layout, tables, frequency, Scoring(None, True, D**-0.5))

    return coded, plain, codes[0].numel()


def stored_caches(form: str, heads: tuple[int, int], tokens: int) -> list[Stored]:
    """`COPIES` caches of a format."""
    (K, D), codec, few = heads, parse_format(form), 256  # tokens that are coded; the others repeat them
    caches = []
    for _ in range(COPIES):
        keys, values = torch.randn(2, 1, K, few, D)
        rows = tuple(part.repeat(1, 1, tokens // few, 1) for part in codec.encode(keys, values))
        late = (torch.empty(1, K, 0, D),) * (len(codec.tensors) - len(rows))
        caches.append(Stored((*rows, *late), (D, D), torch.float32))
    return caches


@torch.inference_mode()
def time_case(
    coded: Call,
    plain: Call,
    nbytes: int,
    plain_bytes: int,
    rounds: int,
    clock: Callable[[Callable[[], object]], float] = time_call,
) -> dict[str, Any]:
    """Time one query's attention in one layer: medians, and medians of ratios within a round."""
    read = Probes(torch.float32).calls()["read"]
    calls: dict[str, Call] = {"codes": coded, "bfloat16": plain, "read": lambda _: read()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(clock(lambda call=calls[name], i=turn % COPIES: call(i)))
    rate = 256 * 1024**2 / statistics.median(times["read"][2:])
    result = medians({name: times[name] for name in ("codes", "bfloat16")})
    for name, size in (("codes", nbytes), ("bfloat16", plain_bytes)):
        result[name] |= {"bytes": size, "of_limit": result[name]["ms"] / 1e3 * rate / size}
    return {**result, "read_bytes_per_second": rate}


def medians(times: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of each way, and the median of its ratios to the first, round by round."""
    first = next(iter(times.values()))[2:]
    result: dict[str, Any] = {}
    for name, values in times.items():
        kept = values[2:]
        ratios = [one / other for one, other in zip(first, kept, strict=True)]
        result[name] = {"ms": statistics.median(kept) * 1e3, "first_over_this": statistics.median(ratios)}
    return result


OWN = "its own numbers"


@torch.inference_mode()
def models(options: argparse.Namespace) -> dict[str, Any]:
    """Time a token of whole models, all in turn: the source with its own cache and with formats, and conversions."""
    sources: dict[str, tuple[str, str | None]] = {OWN: (options.source, None)}
    sources |= {name: (options.source, name) for name in options.formats}
    for folder in options.models:
        assert Path(folder).name not in sources, f"two caches are called {Path(folder).name}"
        sources[Path(folder).name] = folder, None
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    nbytes: dict[str, int] = {}
    for dtype in ("float32", "bfloat16"):
        for name, (where, form) in sources.items():
            model = headwise.optimize(headwise.load(where, dtype=dtype).eval())
            cache = HeadwiseCache(model, max_length=options.context + options.rounds + 8, quantize=form)
            for begin in range(0, options.context, 1000):
                ids = torch.randint(5, model.config.vocab_size, (1, min(1000, options.context - begin)))
                model(ids, past_key_values=cache, logits_to_keep=1)
            calls[name, dtype] = lambda m=model, c=cache: m(torch.tensor([[5]]), past_key_values=c)
            nbytes[name] = cache.nbytes  # at last that of bfloat16
    times: dict[tuple[str, str], list[float]] = {call: [] for call in calls}
    for _ in range(options.rounds + 2):
        for call in random.sample(list(calls), len(calls)):
            times[call].append(time_call(calls[call]))
    ways: dict[str, Any] = {name: {"cache_fraction": nbytes[name] / nbytes[OWN]} for name in sources}
    for dtype in ("float32", "bfloat16"):
        for name, measured in medians({name: times[name, dtype] for name in sources}).items():
            ways[name][dtype] = measured
    return {"context": options.context, "ways": ways}


def cases(
    rounds: int, clock: Callable[[Callable[[], object]], float]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The name of each row, and what measures it."""
    for tokens in (8192, 32768):
        for dtype in ("float32", "bfloat16"):
            kind = getattr(torch, dtype)
            for shape, (rank, rotary) in LATENTS.items():
                for bits in (3, 4):
                    for content in (False, True):
                        yield (
                            f"latents {shape}, {bits} bits, {tokens}, {dtype}, {'content' if content else 'rotary'}",
                            lambda at=(shape, bits, tokens, kind), content=content, width=rank + rotary: time_case(
                                *latent_calls(*at, content=content), 2 * at[2] * width, rounds, clock
                            ),
                        )
            for shape, (_, K, D) in HEADS.items():
                for form in FORMATS:
                    yield (
                        f"heads {shape}, {form}, {tokens}, {dtype}",
                        lambda at=(shape, form, tokens, kind), width=2 * K * D: time_case(
                            *heads_calls(*at), 2 * at[2] * width, rounds, clock
                        ),
                    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments name, and print each row; layers that the file has are left as they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/coded.json"))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default="", help="measure rows whose name has this")
    parser.add_argument("--models", nargs="*", metavar="FOLDER", help="time whole models: these and the source")
    parser.add_argument("--formats", nargs="*", default=["kivi4", "kivi3:32", "int4"], help="of the source's cache")
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--own-time", action="store_true", help="of one thread, what other programs take is not counted"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    kept = Kept(options.json, {"rounds": options.rounds, "threads": options.threads})
    if options.models is not None:
        row = models(options)
        kept.add(f"models, {Path(options.source).name}, {options.context}", row)
        say(row)
        return
    for name, measure in cases(options.rounds, own_time if options.own_time else time_call):
        if name in kept.rows or options.only not in name:
            continue
        row = measure()
        kept.add(name, row)
        codes, plain = row["codes"], row["bfloat16"]
        over = plain["first_over_this"]
        say(f"{name}: {codes['ms']:.3f} ms, × bf16 {over:.2f}, × limit {codes['of_limit']:.2f}")


if __name__ == "__main__":
    main()
