"""Calls of the compiled kernels with hostile tensors, by the Python that users come to them by.

`benchmarks.trust.sanitizers` runs this module in a process of its own, whose kernels are compiled with sanitizers. It
writes a line of JSON for each case, so that the case is known in which a process ends.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.trust.hostile import Draw, Guarded
from benchmarks.trust.lying_codes import lie
from tests.tiny_families import tiny_family
from torch import Tensor, nn

import headwise
from headwise.errors import HeadwiseError
from headwise.models.checkpoints import open_checkpoint
from headwise.runtime.hf import HeadwiseCache
from headwise.runtime.hf.codes import set_codes
from headwise.runtime.kernels import attend, attend_quantized
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native import build, built, linear
from headwise.runtime.kernels.native.abi import KERNELS, MOST_ROWS, TURN
from headwise.runtime.kernels.native.calls import attend_fused, choose_gains, decode_trellis, moved_steps
from headwise.runtime.kernels.pages import Pages
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.codec import Codec, Stored
from headwise.runtime.quantization.formats import ENGINE_FORMATS, EngineFormat, Int8Format, parse_format
from headwise.runtime.quantization.transform_code import FILE, SINKS, blocks, heads_shape, latent_shape, read_codes
from headwise.runtime.quantization.trellis import encode
from headwise.runtime.quantization.trellis_format import KeyRotation, TrellisFormat

_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
_TOKENS = (0, 1, 1, 2, 2, 3, 3, 5, 7, 9, 15, 16, 17, 31, 33, 63, 64, 65, 130)
_WIDTHS = (1, 2, 3, 7, 8, 8, 15, 16, 16, 17, 20, 20, 31, 32, 32, 33, 48, 64, 64, 65, 80, 130)
SANITIZERS = (
    *("-O1", "-g1", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
    # Less is compiled: AddressSanitizer checks by calls, and finds null pointers and ends of objects by itself.
    *("-fno-sanitize=null,object-size,vptr", "--param=asan-instrumentation-with-call-threshold=0"),
)
"""GCC's options, behind those of every library."""

_HANGS = 120
"""Seconds after which a case is held for one that never ends."""

FOLDERS = {"latents": {"to": "mla", "kv_lora_rank": 20, "qk_rope_head_dim": 8}, "heads": {"to": "same"}}
"""Options of the conversions whose files of codes are made to lie."""


class Problem(NamedTuple):
    """Sizes of a call of attention, by their letters."""

    B: int
    K: int
    G: int
    S: int
    T: int
    dtype: torch.dtype


def problem(draw: Draw) -> Problem:
    """Draw sizes: mostly small ones, some of which are 0; and a few large enough for several threads."""
    pick = draw.pick.choice
    B, K, G, S = pick((1, 1, 2, 3)), pick((1, 1, 2, 3)), pick((1, 1, 2, 3, 4, 5, 8, 14)), pick((1, 1, 1, 2, 3, 8))
    T, dtype = pick(_TOKENS), pick(_DTYPES)
    if draw.is_interpreted:
        return Problem(1, pick((1, 2)), pick((1, 2)), pick((1, 2)), pick((1, 2, 15, 16, 17, 33)), dtype)
    match draw.pick.randrange(200):
        case 0:
            B = 0
        case 1:
            S = 0
        case 2:
            B, S, T = 1, 2, 1500
        case 3:
            B, K, S, T = 1, 1, 150, 170  # a prompt, which is taken in parts
    return Problem(B, K, G, S, T, dtype)


def scoring(draw: Draw, sizes: Problem, T: int) -> Scoring:
    """Draw which tokens are seen, and a factor."""
    is_causal = draw.chance(0.6)
    window = draw.pick.choice((None, None, 1, 3, 50)) if is_causal else None
    mask = draw.mask(sizes.B, sizes.K * sizes.G, sizes.S, T)
    return Scoring(mask, is_causal, draw.pick.choice((0.1, 1.0, 0.0, -0.2, 1e30, float("nan"))), window)


# --- attention to keys and values -------------------------------------------------------------------------------


def attention(draw: Draw) -> None:
    """Keys and values as they are, or in int8 with a scale for each token; some calls fit nothing."""
    B, K, G, S, T, dtype = sizes = problem(draw)
    pick, (D, V) = draw.pick.choice, draw.pick.choices(_WIDTHS, k=2)
    mask, is_causal, scale, window = scoring(draw, sizes, T)
    if draw.chance(0.05):  # shapes that do not fit
        T, K, D = pick(((T + 1, K, D), (T, K + 1, D), (T, K, D + 1)))
        window = pick((window, 0, -1))
    query = draw.placed(draw.numbers(B, sizes.K * G, S, draw.pick.choice((D, D, D, D + 1)), dtype=dtype))
    if draw.chance(0.4):
        key, value = (
            (draw.placed(draw.bits(B, K, T, width, dtype=torch.int8)), draw.placed(draw.numbers(B, K, T)))
            for width in (D, V)
        )
        attend_quantized(query, key, value, mask, is_causal, scale, window=window)
        return
    key = draw.placed(draw.numbers(B, K, T, D, dtype=dtype))
    value = key[..., :V] if V <= D and draw.chance(0.3) else draw.placed(draw.numbers(B, K, T, V, dtype=dtype))
    attend(query, key, value, mask, 0.0, is_causal, scale, window=window, backend="fused")


_INTEGERS = ("int8", "int4", "int3", "int2", "int8/int4", "int4:16", "int3:32/int2:16", "int4+hadamard", "int2:128")
_KIVI = ("kivi4", "kivi3", "kivi2", "kivi4:16", "kivi2:32:20", "kivi3:128")
_ENGINES = tuple(f"{engine}:{name}" for engine, formats in ENGINE_FORMATS.items() for name in formats)


def integers(draw: Draw) -> None:
    """Caches in integers, whose rows are those of hostile numbers, or any bytes."""
    B, K, G, S, T, dtype = sizes = problem(draw)
    spelling = draw.pick.choice((*_INTEGERS * 3, *_KIVI * 4, "fp8", draw.pick.choice(_ENGINES)))
    D, V = draw.pick.choices((16, 32, 64, 64, 128, *_WIDTHS), k=2)
    codec: Codec = Int8Format() if draw.chance(0.05) else parse_format(spelling)
    keys, values = (draw.numbers(B, K, T, width, dtype=dtype) for width in (D, V))
    count = codec.coded(T) if codec.block > 1 else T
    stored = list(codec.encode(keys[:, :, :count], values[:, :, :count]))
    if draw.chance(0.5):
        stored = [draw.bits(*x.shape, dtype=x.dtype) for x in stored]
    stored = [draw.placed(x, is_dense=isinstance(codec, Int8Format | EngineFormat)) for x in stored]
    if codec.block > 1:
        stored += [draw.placed(keys[:, :, count:]), draw.placed(values[:, :, count:])]
    mask, is_causal, scale, _ = scoring(draw, sizes, T)
    query = draw.placed(draw.numbers(B, K * G, S, D, dtype=dtype))
    if codec.can_attend(keys[:, :, :1], values[:, :, :1]):
        codec.attend(query, Stored(tuple(stored), (D, V), dtype), Scoring(mask, is_causal, scale))
    else:
        codec.decode(Stored(tuple(stored), (D, V), dtype))


# --- trellis codes ----------------------------------------------------------------------------------------------


def random_code(draw: Draw, shape: tuple[tuple[int, ...], tuple[int, ...]], most: int = 8) -> TransformCode:
    """Draw a code that a file may hold: any finite offsets, positive scales and bits."""
    sections = shape[0]
    bits = tuple(draw.pick.randint(1, most) for _ in blocks(sections))
    offset, scale = draw.finite(sum(sections)), draw.positive(sum(sections))
    if draw.chance(0.5):
        offset, scale = (random(len(scale), generator=draw.noise) for random in (torch.randn, torch.rand))
        scale = scale + 0.05
    return TransformCode(draw.placed(offset, is_dense=True), draw.placed(scale, is_dense=True), bits, *shape)


def with_first(draw: Draw, code: TransformCode) -> TransformCode:
    """The code, or one with another code of first tokens, of no more bytes."""
    most = min(code.bits)
    if draw.chance(0.4):
        return code
    own = random_code(draw, (code.sections, code.parts), most)
    return TransformCode(code.offset, code.scale, code.bits, code.sections, code.parts, own)


def rotation_of(draw: Draw, P: int, slots: int) -> KeyRotation | None:
    """Draw how keys are rotated; angles are hostile numbers in some cases."""
    if not P:
        return None
    F = draw.pick.choice((1, P // 2, 8))
    angles = torch.arange(max(slots, TURN))[:, None] * torch.rand(F, generator=draw.noise)
    if draw.chance(0.1):
        angles = draw.numbers(*angles.shape)
    cos, sin = (draw.placed(table, is_dense=True) for table in (angles.cos(), angles.sin()))
    frequency = draw.placed(torch.randint(0, F, (P // 2,), generator=draw.noise), is_dense=True)
    return KeyRotation(cos, sin, frequency, (cos[:TURN, frequency] / cos[:1, frequency], sin[:TURN, frequency]))


def trellis(draw: Draw) -> None:
    """Codes of latents or of heads, in rows or in pages: of hostile numbers, or any bytes; read and decoded."""
    sizes, pick = problem(draw), draw.pick.choice
    sizes = sizes._replace(T=max(1, sizes.T))
    B, K, G, S, T, dtype = sizes
    is_latent, widths = draw.chance(0.5), (1, 2, 7, 8, 16, 17, 20, 33, 48, 64, 64)
    if is_latent:
        D, P = pick(widths), pick((0, 2, 6, 16, 32, 34, 64))
        shape, width = latent_shape(D, P), D + P if not P or draw.chance(0.6) else P
    else:
        D = width = pick((2, 8, 16, 20, 34, 48, 64))
        P, shape = pick((D, D, 0, min(D, 6), min(D, 32))), heads_shape(K, D, pick(widths))
    codec = TrellisFormat(with_first(draw, random_code(draw, shape)))
    rotation = rotation_of(draw, P, T)
    # A window may have left a sequence's first token behind, and padding may fill all of it.
    first = draw.placed(torch.randint(-SINKS - 1, T + 2, (B,), generator=draw.noise))
    wide = draw.placed(draw.numbers(B, codec.code.wide_tokens, codec.code.width, dtype=torch.bfloat16))
    pages = None
    if draw.chance(0.35):
        rows, pages, first = in_pages(draw, codec.code, T, first)
    elif T < 40 and draw.chance(0.2):
        states = draw.placed(draw.numbers(B, 1, T, codec.code.width, dtype=dtype))
        rows = draw.placed(codec.encode(states, states[..., :0], first)[0])
    else:
        rows = draw.placed(draw.bits(B, 1, T, codec.code.token_bytes))
    stored = Stored((rows, rows[..., :0], wide, first), (0, 0), dtype)
    for _ in range(3):  # which draws less than three codes
        query = draw.placed(draw.numbers(B, K * G, S, width, dtype=dtype))
        seen = scoring(draw, sizes, T)
        seen = seen if pages is None else seen._replace(mask=None)
        if codec.can_attend_to(query[:, 0, :1], stored.tensors, seen.mask, needs_grad=False):
            codec.attend(query, stored, seen, rotation, has_sums=is_latent and draw.chance(0.3), pages=pages)
    if pages is None:
        codec.decode(stored)


def in_pages(draw: Draw, code: TransformCode, T: int, first: Tensor) -> tuple[Tensor, Pages, Tensor]:
    """Pages of codes of up to T tokens a sequence, some written by the encoder, and where a text's first one lies."""
    tokens = draw.pick.choice((16,) if draw.is_interpreted else (1, 5, 16, 64))
    count, B = -(-T // tokens), len(first)
    total = B * count + draw.pick.randint(0, 2)
    pages = draw.placed(draw.bits(total, 1, tokens, code.token_bytes))
    order = torch.randperm(total, generator=draw.noise)[: B * count].view(B, count)
    lengths = torch.randint(1, T + 1, (B,), generator=draw.noise)
    order[torch.arange(count) * tokens >= lengths[:, None]] = draw.pick.choice((-1, 0, 2**31 - 1))  # are not read
    order[:, 0].clamp_(0, total - 1)
    if not pages.numel() or draw.chance(0.4):
        states = draw.placed(draw.numbers(draw.pick.choice((0, 1, 9)), code.width))
        slots = torch.randint(-2, total * tokens, (len(states),), generator=draw.noise)
        code.write(states, pages[:, 0], draw.placed(slots), torch.rand(len(states), generator=draw.noise) < 0.3)
    table = Pages(draw.placed(order.int()), draw.placed(lengths.int()))
    return pages, table, torch.zeros_like(first) if code.first is not None else first


def coding(draw: Draw) -> None:
    """Gains and codes of hostile values, by a code and by tables alone; and what they are decoded as."""
    pick, rows = draw.pick.choice, 40 if draw.chance(0.01) else draw.pick.choice((0, 1, 1, 1, 2, 3))
    shapes = latent_shape(pick(_WIDTHS), pick((0, 2, 34))), heads_shape(2, pick((2, 20)), pick(_WIDTHS))
    code = random_code(draw, pick(shapes))
    states = draw.placed(draw.numbers(rows, code.width, dtype=pick(_DTYPES)))
    is_first = torch.rand(rows, generator=draw.noise) < 0.3
    code = with_first(draw, code)
    code.rounded(states, is_first)
    written = draw.placed(code.encode(states, is_first))
    if draw.chance(0.5):
        written = draw.placed(draw.bits(*written.shape))
    code.decode(written, pick((torch.float32, torch.bfloat16)), is_first)
    W = pick(_WIDTHS)
    bits = draw.placed(torch.randint(1, 9, (W,), generator=draw.noise, dtype=torch.uint8), is_dense=True)
    values, weights = draw.placed(draw.numbers(rows, W)), draw.placed(draw.numbers(W))
    gains = draw.placed(draw.numbers(rows, W)) if draw.chance(0.5) else None
    encode(values, weights, bits, draw.placed(draw.bits(rows), is_dense=True), gains, pack=draw.chance(0.5))


# --- products and layers ----------------------------------------------------------------------------------------


def products(draw: Draw) -> None:
    """A linear layer of a few rows, with and without a bias; some do not fit together."""
    pick, dtype = draw.pick.choice, draw.pick.choice(_DTYPES)
    inputs, outputs = pick((0, *_WIDTHS, 300)), pick((0, *_WIDTHS, 300))
    rows = draw.pick.randint(0, MOST_ROWS + 1)
    weight = draw.placed(draw.numbers(outputs, inputs + (draw.chance(0.03)), dtype=dtype))
    bias = draw.placed(draw.numbers(outputs, dtype=dtype)) if draw.chance(0.5) else None
    x = draw.placed(draw.numbers(rows, inputs, dtype=dtype))
    try:
        linear(x, weight, bias)
    except RuntimeError:
        assert weight.shape[1] != inputs  # left to torch, which reports it
        raise HeadwiseError("weight", tuple(weight.shape), "does not fit") from None


def moves(draw: Draw) -> None:
    """The steps of an engine's codes after moves of keys."""
    pick = draw.pick.choice
    block, count, channels = pick((1, 2, 16, 32)), pick((1, 2, 3)), pick((1, 2))
    K, T, many = pick((1, 2)), pick((1, 3, 15, 16, 17, 65)), pick((1, 2, 7))
    rows = draw.numbers(channels, block * count)
    rows = rows.sign() / 8 if draw.chance(0.5) else rows
    tensors = (
        draw.numbers(K, block * count, T),
        draw.numbers(K, channels, T),
        draw.numbers(many, channels, channels),
    )
    moved_steps(*map(draw.placed, tensors), draw.placed(rows), block=block, spread=pick(("size", "range")))


@cache
def layers(kind: str, dtype: torch.dtype, folder: Path) -> Any:
    """An optimised tiny model of a family, or a converted one; parameters end where memory ends."""
    if kind in FOLDERS:
        model = headwise.load(folder / kind, dtype=dtype)
    else:
        model = tiny_family(kind, **({"sliding_window": None} if kind == "mistral" else {})).to(dtype)
    model = headwise.optimize(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # each in an allocation of its own
    return model


def decoding(folder: Path, draw: Draw) -> None:
    """A few steps of a tiny model's layers, some of whose weights are hostile numbers."""
    kind = draw.pick.choice(("llama", "mistral", "qwen2", "qwen3", *FOLDERS, *FOLDERS))
    dtype = draw.pick.choice((torch.float32, torch.bfloat16, torch.float16))
    run(draw, layers(kind, dtype, folder))


@torch.inference_mode()
def run(draw: Draw, model: nn.Module) -> None:
    """Give a model a prompt and a few tokens after it; one of its tensors is hostile in some cases."""
    B, total = draw.pick.choice((1, 1, 2)), 0
    parameters = dict(model.named_parameters())
    changed = parameters[draw.pick.choice(list(parameters))] if draw.chance(0.4) else None
    before = None if changed is None else changed.clone()
    if changed is not None:
        changed.copy_(draw.numbers(*changed.shape, dtype=changed.dtype))
    given: Any = HeadwiseCache(model, max_length=draw.pick.choice((None, 40)))
    is_padded = draw.chance(0.4)
    pad = torch.randint(0, 4, (B, 1), generator=draw.noise)
    for S in (draw.pick.choice((1, 4, 9)), *draw.pick.choices((1, 1, 1, 2, 3, 4), k=8)):
        total += S
        if total > 40:
            break
        ids = torch.randint(3, 30, (B, S), generator=draw.noise)
        mask = (torch.arange(total) >= pad).long() if is_padded else None
        model(ids, attention_mask=mask, past_key_values=given)
    if changed is not None and before is not None:
        changed.copy_(before)


# --- files that lie ---------------------------------------------------------------------------------------------


@cache
def uncoded(folder: Path, kind: str) -> tuple[Any, Any, bytes]:
    """A converted model without codes, its checkpoint, and the file of its codes."""
    content = (folder / kind / FILE).read_bytes()
    model = headwise.load(folder / f"{kind}-plain", dtype=torch.float32)
    return model, open_checkpoint(folder / f"{kind}-plain"), content


def files(folder: Path, draw: Draw) -> None:
    """A file of codes that lies, read and given to the model that it is of, which runs if nobody objects."""
    model, checkpoint, content = uncoded(folder, draw.pick.choice(list(FOLDERS)))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / FILE).write_bytes(lie(content, draw))
        codes = read_codes(Path(name), checkpoint.spec.num_layers if draw.chance(0.8) else None)
    model = copy.deepcopy(model)
    set_codes(model, codes, checkpoint)
    run(draw, headwise.optimize(model) if draw.chance(0.5) else model)


# --- the campaign's own process ---------------------------------------------------------------------------------


class Part(NamedTuple):
    """Cases of one kind, and the kernels of which they are to call enough."""

    case: Callable[[Draw], None]
    kernels: tuple[str, ...]
    is_interpreted: bool = False


def parts(folder: Path) -> dict[str, Part]:
    """Cases by name; those of files call no kernel that others do not."""
    return {
        "attention": Part(attention, ("headwise_attention",)),
        "integers": Part(integers, ("headwise_affine",)),
        "trellis": Part(trellis, ("headwise_coded", "headwise_heads")),
        "coding": Part(coding, ("headwise_gains", "headwise_trellis", "headwise_code", "headwise_decode")),
        "products": Part(products, ("headwise_linear",)),
        "moves": Part(moves, ("headwise_moved",)),
        "decoding": Part(partial(decoding, folder), ("headwise_step",)),
        "files": Part(partial(files, folder), ()),
    }


def count_calls() -> Counter[str]:
    """Calls of each kernel from now on."""
    library, calls = built().library, Counter[str]()
    if library is None:
        raise SystemExit(built().reason)

    def counted(name: str, kernel: Any, *arguments: Any) -> int:
        calls[name] += 1
        return int(kernel(*arguments))

    for name in KERNELS:
        setattr(library, name, partial(counted, name, getattr(library, name)))
    return calls


def attempt(case: Callable[[Draw], None], draw: Draw) -> str:
    """Run a case; returns "done", "refused" after one clean error, or else what came, in one line."""
    try:
        with torch.no_grad():
            case(draw)
    except HeadwiseError as error:
        return "refused" if "\n" not in str(error) else f"{type(error).__name__} of several lines"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {error}".replace("\n", " ")[
            :300
        ]
    return "done"


def run_part(part: Part, calls: Counter[str], start: int, wanted: int, so_far: Counter[str]) -> None:
    """Run cases from a seed on until each of the part's kernels was called so often, or without kernels so many.

    Args:
        part: what to run.
        calls: calls of kernels, which are counted as they come.
        start: the first seed.
        wanted: calls.
        so_far: calls of kernels by the part's earlier processes.
    """
    guarded, seed = Guarded(), start
    while any((calls + so_far)[name] < wanted for name in part.kernels) if part.kernels else seed < wanted:
        draw, before = Draw(seed, guarded, is_interpreted=part.is_interpreted), calls.copy()
        torch.set_num_threads(draw.pick.choice((1,) * 8 + (2, 3)))
        faulthandler.dump_traceback_later(_HANGS, exit=True)
        outcome = attempt(part.case, draw)
        print(json.dumps({"seed": seed, "outcome": outcome, "calls": calls - before}), flush=True)
        seed += 1


# --- whether a fault would be seen ------------------------------------------------------------------------------


def read_behind_rows() -> None:
    """A row of codes is one byte short, and the byte behind the last one that of no allocation."""
    code = TransformCode(torch.zeros(16), torch.ones(16), (4,), (16,), (16,))
    decode_trellis(torch.zeros(3, code.token_bytes - 1, dtype=torch.uint8), code._layout, torch.float32, 16, 16)


def read_behind_pages() -> None:
    """A mask is one byte short, behind which pages may not be touched; wide vectors read it by a mask of lanes."""
    mask = Draw(0, Guarded(), is_interpreted=True)._memory(64, torch.bool).fill_(True)
    query, key = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 65, 16)
    attend_fused(query, key, key, Scoring(mask.as_strided((1, 2, 1, 64), (0, 0, 0, 1)), False, 1.0))


def round_infinity() -> None:
    """Gains with no step between them, by whose logarithm a kernel divides before it rounds to a whole number."""
    channels = (torch.zeros(2), *(torch.ones(2) for _ in range(3)))
    choose_gains(torch.full((1, 2), 3.0), channels, (2,), torch.ones(16), tried=6, zero=5, step=1.0)


FAULTS: dict[str, Callable[[], None]] = {
    "heap": read_behind_rows,
    "pages": read_behind_pages,
    "arithmetic": round_infinity,
}
"""What the sanitizers must report."""


def arguments_of(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Those of a process that runs a part, or one of the faults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--wanted", type=int, default=1)
    parser.add_argument("--so-far", type=json.loads, default={})
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = arguments_of(arguments, __doc__)
    build._FLAGS = (*build._FLAGS, *SANITIZERS)
    build._COMPILE_TIMEOUT = 3600  # which takes several times as long
    if options.what == "build":
        print(json.dumps({"reason": built().reason, "is_built": built().library is not None}))
    elif options.what in FAULTS:
        torch.set_num_threads(1)
        FAULTS[options.what]()
    else:
        part = parts(options.folder)[options.what]
        run_part(part, count_calls(), options.start, options.wanted, Counter(options.so_far))


if __name__ == "__main__":
    main()
