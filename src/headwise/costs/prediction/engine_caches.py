"""The small caches that serving engines have of their own: their options, their bytes, and what is known of them.

This is the one place that holds these facts. Options and layouts were read in the engines' sources (llama.cpp of
2026-11, MLX-LM 0.32, vLLM 0.33, SGLang 0.5.23, transformers 5.23, TensorRT-LLM 1.3).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from headwise.costs.prediction.hardware import Device
from headwise.errors import ArgumentError
from headwise.models.specs import AttentionSpec, GroupedSpec, LatentSpec, ModelSpec, RecurrentSpec

SAFE_LOSS = 0.02
"""The largest rise of perplexity that eight bits cost a model that was measured (docs/prepare.md), rounded up."""


@dataclass(frozen=True, kw_only=True)
class EngineCache:
    """One way in which an engine stores keys and values.

    Attributes:
        name: what a target has behind the engine's name, such as ``q8_0`` of ``llama.cpp:q8_0``.
        options: what is added to the engine's command line.
        words: the options in a table.
        key_bits: of a key's channel, with the scale of its block.
        value_bits: of a value's channel, likewise.
        key_scale: bits that a whole key takes besides.
        value_scale: bits that a whole value takes besides.
        block: the channels that share a scale; they must divide a head.
        rotates: whether it rotates a whole head first, whose channels must then be a power of two, and at least 8.
        wide_ends: layers at each end of a model that the engine leaves as they are.
        is_safe: whether models that were measured lost at most `SAFE_LOSS` in it.
        overflows: whether keys beyond 448 cannot be stored, which some Qwen2 models have.
        stores_latents: whether it also stores the latents of MLA.
        stores_windows: whether it also stores layers whose window slides.
        is_simulated: whether headwise stores keys and values in the same way, so that the loss can be measured and
            `headwise prepare` can fit a model to it.
        needs_gpu: whether a processor computes something else with it.
        needs_peak: the dtype of products that a device must have a peak of; empty where none is asked for.
        limit: what is known to go wrong, in words; empty where nothing is.
    """

    name: str
    options: str
    words: str
    key_bits: float
    value_bits: float
    key_scale: int = 0
    value_scale: int = 0
    block: int = 1
    rotates: bool = False
    wide_ends: int = 0
    is_safe: bool = False
    overflows: bool = False
    stores_latents: bool = False
    stores_windows: bool = True
    is_simulated: bool = False
    needs_gpu: bool = False
    needs_peak: str = ""
    limit: str = ""

    def suits(self, model: ModelSpec) -> bool:
        """Whether a model's keys and values can be stored in it.

        For example ``cache_of("llama.cpp", "q8_0").suits(read_spec("phi-2"))`` is False: blocks of 32 do not divide
        its heads of 80 channels.

        Args:
            model: the model.
        """
        layers = [layer for layer in model.layers if not isinstance(layer, RecurrentSpec)]
        if not self.stores_windows and any(layer.sliding_window is not None for layer in layers):
            return False
        widths: list[int] = []
        for layer in layers:
            if isinstance(layer, GroupedSpec):
                widths += [layer.head_dim, layer.value_dim]
            elif isinstance(layer, LatentSpec) and self.stores_latents:
                widths += [layer.kv_lora_rank, layer.kv_lora_rank + layer.qk_rope_head_dim]
            else:
                return False
        return bool(widths) and all(self.takes(width) for width in widths)

    def runs_on(self, device: Device) -> bool:
        """Whether a device is known to run it.

        For example ``cache_of("vllm", "nvfp4").runs_on(device("rtx-4090"))`` is False.

        Args:
            device: the device.
        """
        has_products = not self.needs_peak or self.needs_peak in device.peaks
        return has_products and not (self.needs_gpu and device.kind == "cpu")

    def takes(self, width: int) -> bool:
        """Whether heads of ``width`` channels can be stored."""
        return width % self.block == 0 and not (self.rotates and (width < 8 or width & (width - 1)))

    def bits(self, model: ModelSpec) -> float:
        """The mean bits of a cached value, scales included, of a model that it `suits`.

        For example ``cache_of("vllm", "int4_per_token_head").bits(read_spec("llama-3-8b"))`` is 4.25.

        Args:
            model: the model.
        """
        taken = values = 0.0
        ends = min(self.wide_ends, model.num_layers // 2)
        for index, layer in enumerate(model.layers):
            found = _sides(layer)
            count = found.heads * (found.key + found.value)
            values += count
            if not ends <= index < model.num_layers - ends:
                taken += 16 * count
                continue
            taken += found.heads * (found.key * self.key_bits + bool(found.key) * self.key_scale)
            taken += found.heads * (found.value * self.value_bits + bool(found.value) * self.value_scale)
        return taken / values

    def is_safe_for(self, model: ModelSpec) -> bool:
        """Whether it is known to be safe, of models like this one.

        For example ``cache_of("vllm", "fp8").is_safe_for(read_spec("llama-3-8b"))`` is True.

        Args:
            model: the model.
        """
        return self.is_safe and not (self.overflows and model.model_type.startswith("qwen2"))


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """What a layer caches for a token: so many heads, of each a key and a value of so many channels."""

    heads: int
    key: int
    value: int


def _sides(layer: AttentionSpec) -> _Sides:
    if isinstance(layer, GroupedSpec) and not layer.shares_kv:
        return _Sides(heads=layer.num_kv_heads, key=layer.head_dim, value=layer.value_dim)
    if isinstance(layer, LatentSpec):
        return _Sides(heads=1, key=layer.kv_lora_rank + layer.qk_rope_head_dim, value=0)
    return _Sides(heads=0, key=0, value=0)


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """A program that serves models.

    Attributes:
        name: as users of headwise spell it.
        title: as its authors do.
        model: what stands for a model in a command line where none is at hand.
        serve: the command line that starts it, with ``{model}``.
        serve_small: the same with ``{options}`` of a cache; None where they stand behind ``serve``.
        sizes: its options for the most tokens of a sequence and the most sequences, with ``{context}``, ``{batch}``
            or ``{tokens}``, those of all sequences together; empty where it has none.
        shares: its option for the number of devices that share the heads; empty where it has none.
        reads_gguf: whether it loads a ``.gguf``.
        caches: the small caches that it has, the usual ones first.
        notes: what is known of all of them, in words.
    """

    name: str
    title: str
    model: str
    serve: str
    serve_small: str | None = None
    sizes: str = ""
    shares: str = ""
    reads_gguf: bool = False
    caches: tuple[EngineCache, ...]
    notes: tuple[str, ...] = ()

    def command(
        self,
        model: str,
        cache: EngineCache | None = None,
        *,
        context: int | None = None,
        batch: int = 1,
        ranks: int = 1,
    ) -> str:
        """The command line that serves a model, with a small cache or without one.

        For example ``SERVING_ENGINES["vllm"].command("MODEL")`` is ``"vllm serve MODEL"``.

        Args:
            model: its path or name, as a shell takes it.
            cache: one of ``caches``; None for a cache as wide as the model.
            context: the most tokens of a sequence; when None the engine chooses them and the sequences.
            batch: the most sequences at once.
            ranks: devices that share the heads.
        """
        if cache is None:
            line = self.serve.format(model=model)
        else:
            line = (self.serve_small or f"{self.serve} {{options}}").format(model=model, options=cache.options)
        sizes = "" if context is None else self.sizes.format(context=context, batch=batch, tokens=batch * context)
        shared = f"{self.shares} {ranks}" if self.shares and ranks > 1 else ""
        return " ".join(filter(None, (line, sizes, shared)))


_DASHED, _UNDERSCORED = "--kv-cache-dtype", "--kv_cache_dtype"
_ON_THE_CPU = "usual CUDA builds compute this type on the processor, without a word"
_STUDY = "up to 20 points lost in long answers, by vLLM's own study"
_AIME = "GPT-OSS-120B kept GSM8K (.92) and lost AIME25 (.75 → .35)"
_BLACKWELL = "needs a Blackwell GPU"
_OVERFLOW = "ends at 448: some Qwen2 models have larger keys, and answer nonsense"


_GGML_BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
}
"""Bits of a value of ggml's types, scales included."""


def _ggml(keys: str, values: str | None = None, *, limit: str = "") -> EngineCache:
    """A cache of ggml's types, of one for keys and values or of two."""
    words = f"-ctk {keys} -ctv {values or keys}"
    return EngineCache(
        name=keys if values is None else f"{keys}/{values}",
        options=f"-fa on {words}",
        words=words,
        key_bits=_GGML_BITS[keys],
        value_bits=_GGML_BITS[values or keys],
        block=32,
        is_safe=keys == "q8_0" and values is None,
        stores_latents=values is None,
        is_simulated=True,
        limit=limit,
    )


def _flagged(flag: str, name: str, bits: float) -> EngineCache:
    """A cache that one option of a command line names."""
    words = f"{flag} {name}"
    return EngineCache(name=name, options=words, words=words, key_bits=bits, value_bits=bits)


def _fp8(flag: str, name: str) -> EngineCache:
    """A cache of float8_e4m3, with one scale for a tensor."""
    cache = _flagged(flag, name, 8)
    return replace(
        cache, is_safe=True, overflows=True, stores_latents=True, is_simulated=flag == _DASHED, limit=_OVERFLOW
    )


def _by_head(name: str, bits: float, *, key_scale: int = 32) -> EngineCache:
    """A cache of vLLM's with scales for each token's head."""
    return replace(_flagged(_DASHED, name, bits), key_scale=key_scale, value_scale=32, is_simulated=True)


def _grouped(name: str, bits: int, options: str, words: str) -> EngineCache:
    """A cache of integers with two 16-bit numbers for each group of 64 channels."""
    return EngineCache(
        name=name,
        options=options,
        words=words,
        key_bits=bits + 0.5,
        value_bits=bits + 0.5,
        block=64,
        is_safe=bits == 8,
        stores_windows=False,
        is_simulated=True,
    )


def _quantised(backend: str, bits: int) -> EngineCache:
    """A QuantizedCache of transformers."""
    options = f'cache_implementation="quantized", cache_config={{"backend": "{backend}", "nbits": {bits}}}'
    limit = "Qwen2.5-7B answered nothing right in 4 bits (transformers#35185)" if bits == 4 else ""
    cache = _grouped(f"{backend}{bits}", bits, options, f"quantized, {backend}, {bits} bits")
    return replace(cache, is_simulated=backend == "quanto", limit=limit)


def _mlx(bits: int) -> EngineCache:
    words = f"--kv-bits {bits}"
    return _grouped(str(bits), bits, f"{words} --quantized-kv-start 0", words)  # by default from the 5,000th token on


_ALL = (
    ServingEngine(
        name="llama.cpp",
        title="llama.cpp",
        model="model.gguf",
        serve="llama-server -m {model}",
        sizes="-c {tokens} -np {batch}",  # the context is shared out among the sequences
        reads_gguf=True,
        caches=(
            _ggml("q8_0"),
            _ggml("q4_0"),
            _ggml("q8_0", "q4_0", limit=_ON_THE_CPU),
            *(_ggml(name, limit=_ON_THE_CPU) for name in ("q5_1", "q5_0", "q4_1", "iq4_nl")),
        ),
        notes=("quantised values need flash attention (-fa on)",),
    ),
    ServingEngine(
        name="vllm",
        title="vLLM",
        model="MODEL",
        serve="vllm serve {model}",
        sizes="--max-model-len {context} --max-num-seqs {batch}",
        shares="--tensor-parallel-size",
        caches=(
            _fp8(_DASHED, "fp8"),
            replace(
                _by_head("int8_per_token_head", 8),
                is_safe=True,
                needs_gpu=True,
                limit="the CPU build computes nonsense with it",
            ),
            replace(_by_head("int4_per_token_head", 4), block=2),
            replace(
                _flagged(_DASHED, "nvfp4", 4.5),
                block=16,
                needs_peak="float4",
                limit=f"{_BLACKWELL}, and not one of RTX 50 (vllm#49011)",
            ),
            replace(_by_head("turboquant_k8v4", 8, key_scale=0), value_bits=4, overflows=True, wide_ends=2),
            replace(_by_head("turboquant_4bit_nc", 4, key_scale=16), rotates=True, wide_ends=2),
            replace(_by_head("turboquant_k3v4_nc", 3, key_scale=16), value_bits=4, rotates=True, wide_ends=2),
            replace(_by_head("turboquant_3bit_nc", 3, key_scale=16), rotates=True, wide_ends=2, limit=_STUDY),
        ),
        notes=("--kv-cache-dtype-skip-layers keeps the layers that it names in 16 bits",),
    ),
    ServingEngine(
        name="sglang",
        title="SGLang",
        model="MODEL",
        serve="python -m sglang.launch_server --model-path {model}",
        sizes="--context-length {context} --max-running-requests {batch}",
        shares="--tp",
        reads_gguf=True,
        caches=(
            replace(_fp8(_DASHED, "fp8_e4m3"), name="fp8"),
            replace(_flagged(_DASHED, "fp8_e5m2", 8), stores_latents=True),
            replace(
                _flagged(_DASHED, "fp4_mx_block16", 4.5),
                name="fp4",
                block=16,
                stores_latents=True,
                is_simulated=True,
                limit=_AIME,
            ),
        ),
    ),
    ServingEngine(
        name="mlx",
        title="MLX-LM",
        model="MODEL",
        serve="mlx_lm.server --model {model}",
        serve_small="mlx_lm.generate --model {model} {options}",
        caches=(_mlx(8), _mlx(4)),
        notes=("mlx_lm.server has no --kv-bits: mlx_lm.generate and mlx_lm.chat do",),
    ),
    ServingEngine(
        name="transformers",
        title="transformers",
        model="MODEL",
        serve='AutoModelForCausalLM.from_pretrained("{model}")',
        serve_small="model.generate(**inputs, {options})",
        reads_gguf=True,
        caches=(_quantised("hqq", 8), _quantised("quanto", 4), _quantised("quanto", 2)),
        notes=("the latest 128 tokens stay as they are",),
    ),
    ServingEngine(
        name="tensorrt-llm",
        title="TensorRT-LLM",
        model="MODEL",
        serve="trtllm-serve {model}",
        sizes="--max_seq_len {context} --max_batch_size {batch}",
        shares="--tp_size",
        caches=(
            _fp8(_UNDERSCORED, "fp8"),
            replace(_flagged(_UNDERSCORED, "nvfp4", 4.5), block=16, needs_peak="float4", limit=_BLACKWELL),
        ),
    ),
)

SERVING_ENGINES: Mapping[str, ServingEngine] = MappingProxyType({engine.name: engine for engine in _ALL})
"""All engines whose caches headwise knows, by name."""


def check_engine(name: str, *, field: str = "engine") -> ServingEngine:
    """The engine of a name.

    For example ``check_engine("vllm").title`` is ``"vLLM"``.

    Args:
        name: of the engine, as `SERVING_ENGINES` spells it.
        field: what an error calls the argument.

    Raises:
        ArgumentError: there is none.
    """
    if name not in SERVING_ENGINES:
        raise ArgumentError(field, name, f"must be one of {', '.join(SERVING_ENGINES)}")
    return SERVING_ENGINES[name]


def cache_of(engine: str, name: str) -> EngineCache:
    """One of an engine's small caches.

    For example ``cache_of("mlx", "8").words`` is ``"--kv-bits 8"``.

    Args:
        engine: its name.
        name: of the cache.

    Raises:
        ArgumentError: the engine is not known, or has no such cache.
    """
    found = {cache.name: cache for cache in check_engine(engine).caches}
    if name in found:
        return found[name]
    keys, _, values = name.partition("/")
    if engine == "llama.cpp" and keys in _GGML_BITS and values in _GGML_BITS:  # it takes any two types
        return _ggml(keys, values, limit=_ON_THE_CPU)
    raise ArgumentError("cache", f"{engine}:{name}", f"must be one of {', '.join(found)}")


def engine_caches(model: ModelSpec, engine: str | None = None) -> dict[str, tuple[ServingEngine, EngineCache]]:
    """The small caches that suit a model, by their target: an engine and a cache, such as ``llama.cpp:q8_0``.

    For example ``list(engine_caches(read_spec("llama-3-8b"), "mlx"))`` is ``["mlx:8", "mlx:4"]``.

    Args:
        model: the model.
        engine: whose caches are listed, all of them; when None, of each engine one of 8 bits and one of 4, the safe
            and usual ones.
    """
    found: dict[str, tuple[ServingEngine, EngineCache]] = {}
    for each in SERVING_ENGINES.values() if engine is None else [check_engine(engine)]:
        suiting = [cache for cache in each.caches if cache.suits(model)]
        if engine is None:
            by_size: dict[int, EngineCache] = {}
            for cache in sorted(suiting, key=lambda cache: not cache.is_safe_for(model)):
                by_size.setdefault(int(cache.bits(model)), cache)
            suiting = [by_size[size] for size in (8, 4) if size in by_size]
        found |= {f"{each.name}:{cache.name}": (each, cache) for cache in suiting}
    return found


def named_caches(model: ModelSpec, names: Container[str]) -> dict[str, tuple[ServingEngine, EngineCache]]:
    """Those of all engines' small caches that suit a model and are named, by their target.

    For example ``list(named_caches(read_spec("llama-3-8b"), ["mlx:4", "int8"]))`` is ``["mlx:4"]``.

    Args:
        model: the model.
        names: targets, of which others than engines' caches are left out.
    """
    every = (found for engine in SERVING_ENGINES for found in engine_caches(model, engine).items())
    return {name: found for name, found in every if name in names}


def caches_of_bits(engine: str, model: ModelSpec, bits: float) -> list[EngineCache]:
    """The caches of an engine that store a model's values in so many bits.

    For example ``[cache.name for cache in caches_of_bits("mlx", read_spec("llama-3-8b"), 8.5)]`` is ``["8"]``.

    Args:
        engine: its name.
        model: the model.
        bits: of one cached value, scales included.
    """
    suiting = (cache for cache in check_engine(engine).caches if cache.suits(model))
    return [cache for cache in suiting if abs(cache.bits(model) - bits) < 0.01]
