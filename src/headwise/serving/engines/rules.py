"""Which engines load a model: what decides it, the conditions of each loader, and the verdict.

What decides is the model's config, and which tensors it has. Every rule names where it was read, conditions of a
loader as well as what it computes in silence; `docs/engines.md` has a table of what was run. Each function returns
the reason for which an engine does not serve a model, and what to write instead; None where it does.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headwise.base.documents import as_document
from headwise.base.type_checks import checked_types
from headwise.costs.prediction import OLLAMA, SERVING_ENGINES, ServingEngine
from headwise.errors import ArgumentError, HeadwiseError
from headwise.models.checkpoints import Checkpoint, GgufCheckpoint, GgufFile, dtype_name, open_checkpoint
from headwise.models.families import Family, family_of, has_family
from headwise.models.specs import HOSTED_PREFIX, GroupedSpec, LatentSpec, ModelSpec, RopeSpec, locate, read_config
from headwise.models.specs.sources import INDEX
from headwise.runtime.hf import auto_class, tensors_of
from headwise.runtime.quantization.transform_code import FILE
from headwise.serving.exports.gguf import engine_config


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """A model on disk as an engine sees it.

    Attributes:
        checkpoint: the model.
        source: it, as the user named it.
        tensor_parallel: devices that share out its heads.
    """

    checkpoint: Checkpoint
    source: str
    tensor_parallel: int = 1

    @classmethod
    def of(cls, source: str | Path, tensor_parallel: int = 1) -> ModelFacts:
        """Open a model.

        Raises:
            HeadwiseError: the model cannot be read.
        """
        return cls(open_checkpoint(source), str(source), tensor_parallel)

    @property
    def path(self) -> Path:
        """The folder or the ``.gguf`` file."""
        return self.checkpoint.path

    @property
    def is_gguf(self) -> bool:
        """Whether it is a ``.gguf`` file."""
        return isinstance(self.checkpoint, GgufCheckpoint)

    @property
    def is_split(self) -> bool:
        """Whether it is split over several ``.gguf`` files."""
        return self.is_gguf and len(self.checkpoint.files) > 1

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of its ``config.json``, or what GGUF's metadata amount to."""
        return self.checkpoint.config

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture."""
        return str(self.config.get("model_type"))

    @property
    def family(self) -> Family | None:
        """The model's family; None where headwise converts no model of the architecture."""
        return family_of(self.model_type) if has_family(self.model_type) else None

    @property
    def is_own(self) -> bool:
        """Whether the model has headwise's own layers."""
        return self.model_type.startswith(HOSTED_PREFIX)

    @property
    def is_deepseek(self) -> bool:
        """Whether the model is MLA in DeepSeek's classes."""
        return self.model_type in ("deepseek_v2", "deepseek_v3")

    @cached_property
    def spec(self) -> ModelSpec:
        """The spec of the model's layers."""
        return self.checkpoint.spec

    @cached_property
    def rope(self) -> RopeSpec | None:
        """RoPE of the original layers where all have the same; None otherwise."""
        original = {**self.config, "model_type": self.model_type.removeprefix(HOSTED_PREFIX)}
        ropes = {layer.rope for layer in read_config(original).layers}
        return ropes.pop() if len(ropes) == 1 else None

    @property
    def rope_type(self) -> str:
        """The kind of scaling of RoPE."""
        return "default" if self.rope is None else self.rope.rope_type

    @property
    def attention_biases(self) -> list[str]:
        """The projections of attention that have a bias in some layer."""
        names = {
            name.split(".")[-2]
            for name in self.checkpoint.tensors
            if name.endswith(".bias") and ("self_attn." in name or "attention." in name)
        }
        return sorted(names)

    @property
    def has_codes(self) -> bool:
        """Whether the folder says how its cache is coded."""
        return (self.path / FILE).is_file()

    @property
    def has_index(self) -> bool:
        """Whether the folder says which files hold weights."""
        return (self.path / INDEX).is_file()

    @property
    def has_head(self) -> bool:
        """Whether the output head is a tensor of its own."""
        return "lm_head.weight" in self.checkpoint.tensors


DEEPSEEK = "with --format deepseek"
BIAS_FREE = "with --format deepseek --bias-free"
FOLDER = "convert without --format gguf, or give the folder that it was made of"
MERGE = "one file of its parts, by llama.cpp's llama-gguf-split --merge"

Refusal = tuple[str, str]
"""Why an engine does not serve a model, and what to write instead."""

_SHOWN = 40
"""The most characters of a value that a reason shows; a list of a layer's channels is longer."""

_LATENT_ON_CPU = (512, 64)
"""R and P of the one MLA that vLLM decodes on a CPU (its csrc/cpu/mla_decode.cpp: head_dim 576, v_head_dim 512)."""


PLUGIN_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE that it computes: frequencies that do not depend on the length of the text."""

PLUGIN_CODED = ("llama", "mistral", "qwen2", "qwen3")
"""Types of stock folders whose heads it stores in codes."""

_WITHOUT_CODES = f"move {FILE} out of the folder: the cache is then in the model's dtype"


@dataclass(frozen=True)
class Engine:
    """What decides whether an engine serves a model.

    Attributes:
        served: the engine.
        rule: the reason for which it does not serve a model, beside what the table of engines says.
        caution: what must be known of a model that it serves; None where nothing is.
        command: what starts it with a model, where that is more than the engine's own command line.
    """

    served: ServingEngine
    rule: Callable[[ModelFacts], Refusal | None]
    caution: Callable[[ModelFacts], str | None] = lambda facts: None
    command: Callable[[ModelFacts], str] | None = None

    def refusal(self, facts: ModelFacts) -> Refusal | None:
        """The reason for which it does not serve a model, and what to do instead; None where it serves it."""
        if facts.is_gguf and not self.served.reads_gguf:
            return "reads folders of safetensors", FOLDER
        return self.rule(facts)

    def typed(self, facts: ModelFacts) -> str:
        """The command line, or the Python expression, that starts it with a model."""
        if self.command is not None:
            return self.command(facts)
        return self.served.command(shlex.quote(str(facts.path)), ranks=facts.tensor_parallel)

    @property
    def installed(self) -> str | None:
        """The version of an installed engine, or ``yes`` where only its program is found."""
        for package in (self.served.package, f"{self.served.package}-cpu"):
            try:
                return version(package)
            except (PackageNotFoundError, ValueError):
                continue
        return "yes" if self.served.program and shutil.which(self.served.program) else None


def _convert(facts: ModelFacts, how: str) -> str:
    """What to write: of a converted model, the original converted in another way."""
    return f"convert {'the original model ' if facts.is_own or facts.is_deepseek else ''}{how}"


def _transformers(facts: ModelFacts) -> Refusal | None:
    if facts.is_gguf and facts.is_deepseek:  # integrations/ggml.py, GGUF_CONFIG_MAPPING
        return "its GGUF reader has no deepseek2", FOLDER
    if facts.is_split:  # modeling_gguf_pytorch_utils.py, load_gguf_checkpoint
        return "its GGUF reader takes one part of a split model for the whole, in silence", MERGE
    return None


def _transformers_command(facts: ModelFacts) -> str:
    first = "import headwise.hf; " if facts.is_own else ""
    if facts.is_gguf:
        return f"AutoModelForCausalLM.from_pretrained({str(facts.path.parent)!r}, gguf_file={facts.path.name!r})"
    return f"{first}{auto_class(dict(facts.config))}.from_pretrained({str(facts.path)!r})"


def _transformers_caution(facts: ModelFacts) -> str | None:
    if facts.has_codes:
        return (
            "here its cache is stored in codes by headwise.load and headwise serve alone; from_pretrained keeps it "
            "in 16 or 32 bits, and so does transformers serve, in silence"
        )
    if facts.is_own:  # cli/serving/model_manager.py, _load_model
        return "transformers serve looks for its class in transformers itself; headwise serve serves it"
    return None


def _llama_cpp(facts: ModelFacts) -> Refusal | None:
    if facts.is_gguf:
        return None
    export = f"headwise export {shlex.quote(facts.source)} model.gguf"
    try:
        config = engine_config({**facts.config, "dtype": dtype_name(facts.checkpoint.dtype)})
        GgufFile(config, tensors_of(config, facts.checkpoint.dtype), "f32")
    except HeadwiseError as error:
        is_latent = any(isinstance(layer, LatentSpec) for layer in facts.spec.layers)
        shown = str(error) if len(repr(error.value)) <= _SHOWN else f"{error.field}: {error.rule}"
        return f"reads GGUF, and this has no place there: {shown}", (
            _convert(facts, "with --format gguf") if is_latent or facts.is_own else "nothing that headwise writes"
        )
    return "reads GGUF", export


def _llama_cpp_caution(facts: ModelFacts) -> str | None:
    if not facts.is_gguf or not facts.is_deepseek:
        return None
    # src/llama-kv-cache.cpp, build_rope_shift: it turns every quantised cache back; build_attn of MLA never turns it.
    return "a quantised cache needs --no-context-shift: a shift undoes a rotation that MLA's cache never had"


def _mlx(facts: ModelFacts) -> Refusal | None:
    if facts.is_own:  # utils.py, _get_classes
        return f"has no model of type {facts.model_type}", _convert(facts, DEEPSEEK)
    if facts.is_deepseek:  # models/deepseek_v3.py, ModelArgs
        if facts.rope_type not in ("default", "yarn"):
            rule = f"takes rope_type {facts.rope_type} for plain RoPE, in silence"
            return rule, _convert(facts, DEEPSEEK)
        if not facts.config.get("rope_interleave", True):
            return "rotates neighbouring pairs, and these are in halves, in silence", _convert(facts, DEEPSEEK)
        if not facts.has_head:
            return "asks for lm_head.weight", _convert(facts, DEEPSEEK)
    if facts.model_type not in SERVING_ENGINES["mlx"].model_types:
        return f"has no model of type {facts.model_type} that headwise knows the conditions of", "nothing yet"
    reads_base = facts.is_deepseek or (facts.family is not None and facts.family.former_rope)
    read = {name: value for name, value in facts.config.items() if name != "rope_parameters"}
    if reads_base and read_config(read).layers != facts.spec.layers:  # models/rope_utils.py
        rule = "reads rope_theta and rope_scaling alone, which mean another RoPE here, in silence"
        return rule, "write what rope_parameters says in these two keys, as headwise does in what it converts"
    return None


def _shares(facts: ModelFacts) -> Refusal | None:
    """Why devices cannot share a model out: vLLM's and SGLang's layers/linear.py and models/llama.py."""
    devices = facts.tensor_parallel
    whole = {"intermediate_size": facts.config.get("intermediate_size"), "vocab_size": facts.config.get("vocab_size")}
    if whole["vocab_size"]:
        whole["vocab_size"] = -(-whole["vocab_size"] // 64) * 64  # vLLM pads it so
    for name, size in whole.items():
        if size and size % devices:
            return f"shares {name} out evenly: {size} over {devices} devices", "start it on another number of devices"
    for layer in facts.spec.layers:
        if not isinstance(layer, GroupedSpec | LatentSpec):
            continue
        if layer.num_heads % devices:
            rule = f"shares heads out evenly: {layer.num_heads} heads over {devices} devices"
            return rule, f"start it on a number of devices that divides {layer.num_heads}"
        heads = layer.num_kv_heads if isinstance(layer, GroupedSpec) else devices
        if heads % devices and devices % heads:
            rule = f"shares key–value heads out evenly, or copies them so: {heads} over {devices} devices"
            return (
                rule,
                f"start it with a tensor_parallel that divides {heads}, or convert to another number of heads",
            )
    return None


def _instead_of_own(facts: ModelFacts) -> str:
    """What to write for vLLM and SGLang in place of headwise's own folder, where there is such a layout."""
    is_plain = facts.rope_type == "default" and all(
        isinstance(layer, LatentSpec) and layer.qk_norm is None and layer.sliding_window is None
        for layer in facts.spec.layers
    )
    return _convert(facts, BIAS_FREE) if is_plain else "nothing yet"


def _plugin(facts: ModelFacts) -> Refusal | None:
    """Why vLLM with headwise's plugin does not serve a folder of headwise's own (plugins/vllm/headwise_vllm)."""
    if facts.family is None or not facts.family.deepseek_blocks:
        return f"headwise's plugin for it has no model of type {facts.model_type}", _instead_of_own(facts)
    if not all(isinstance(layer, LatentSpec) for layer in facts.spec.layers):
        return "headwise's plugin for it has MLA alone", _instead_of_own(facts)
    if facts.rope_type not in PLUGIN_ROPES:
        return f"headwise's plugin for it has no rope_type {facts.rope_type}", _instead_of_own(facts)
    return None


def _coded(facts: ModelFacts) -> Refusal | None:
    """Why vLLM does not serve a stock folder whose heads are in codes, which headwise's plugin reads."""
    if not facts.has_index:
        return f"takes {FILE} for weights in a folder without {INDEX}", _WITHOUT_CODES
    if facts.model_type not in PLUGIN_CODED:
        return None  # the plugin leaves it to the stock class
    if facts.rope_type not in PLUGIN_ROPES:
        return f"headwise's plugin for it has no rope_type {facts.rope_type}", _WITHOUT_CODES
    if facts.tensor_parallel > 1:
        return "headwise's plugin for it does not share codes of heads out over devices", "start it on one device"
    return None


def _vllm(facts: ModelFacts) -> Refusal | None:
    if facts.is_own:
        return _plugin(facts) or _shares(facts)
    return (_coded(facts) if facts.has_codes else None) or _stock_vllm(facts)


def _no_stock_folder(facts: ModelFacts) -> Refusal | None:
    """Why a model is no folder of a stock decoder, which alone vLLM without plugins and TensorRT-LLM load."""
    if not facts.spec.is_causal or facts.spec.cross_layers:
        return "headwise knows its conditions of decoders alone", "nothing yet"
    if facts.is_own:  # vLLM's model_executor/models/registry.py
        return f"has no model of type {facts.model_type}", _instead_of_own(facts)
    return None


def _stock_vllm(facts: ModelFacts) -> Refusal | None:
    """vLLM without plugins; SGLang's classes have the same conditions."""
    if (refusal := _no_stock_folder(facts)) is not None:
        return refusal
    if facts.is_deepseek:  # model_executor/models/deepseek_v2.py
        if facts.rope_type not in ("default", "yarn"):
            rule = f"takes rope_type {facts.rope_type} for yarn, and fails because yarn's numbers are missing"
            return rule, _convert(facts, BIAS_FREE)
        if biases := facts.attention_biases:
            return f"skips the biases of {', '.join(biases)} in silence", _convert(facts, BIAS_FREE)
        if not facts.config.get("rope_interleave", True):
            return "rotates neighbouring pairs, and these are in halves, in silence", _convert(facts, BIAS_FREE)
    if facts.family is not None and facts.family.written and not facts.checkpoint.joined:
        rule = f"asks for the experts of a {facts.model_type} one by one, and skips joined ones in silence"
        return rule, "load it with transformers, and save it with save_pretrained"
    return _shares(facts)


def _vllm_command(facts: ModelFacts) -> str:
    # Its compiled rotary embedding takes the wrong stride of MLA's tensors on a CPU.
    native = ' --compilation-config \'{"custom_ops": ["none"]}\'' if facts.is_deepseek else ""
    line = SERVING_ENGINES["vllm"].command(shlex.quote(str(facts.path)), ranks=facts.tensor_parallel)
    return line + (f"  (on a CPU with{native})" if native else "")


def _vllm_caution(facts: ModelFacts) -> str | None:
    if facts.has_codes and not facts.is_own and facts.model_type not in PLUGIN_CODED:
        return (
            f"its cache is in the model's dtype: headwise's plugin for it reads no codes of type {facts.model_type}"
        )
    if facts.has_codes:
        stock = "" if facts.is_own else "; without them its cache is in the model's dtype"
        return (
            f"with headwise and its plugin beside it: pip install --no-deps . ./plugins/vllm in its repository{stock}"
        )
    if facts.is_own:
        return "with headwise's plugin installed beside it: pip install ./plugins/vllm of headwise's repository"
    first = facts.spec.layers[0]
    if not isinstance(first, LatentSpec) or (first.kv_lora_rank, first.qk_rope_head_dim) == _LATENT_ON_CPU:
        return None
    return "on a CPU it decodes MLA of 512 + 64 alone (v1/attention/backends/mla/cpu_mla.py)"


def _sglang(facts: ModelFacts) -> Refusal | None:
    if facts.is_gguf:  # srt/utils/hf_transformers_utils.py, get_config: transformers reads what the model is
        return _transformers(facts) or _shares(facts)
    return _stock_vllm(facts)  # its deepseek_v2.py has the same conditions


def _ollama(facts: ModelFacts) -> Refusal | None:
    if facts.is_split:  # server/create.go
        return "imports one file, and this model is split over several", MERGE
    return _llama_cpp(facts)


def _ollama_caution(facts: ModelFacts) -> str | None:
    return "keeps MLA's keys and values expanded in some versions" if facts.is_deepseek else None


def _tensorrt(facts: ModelFacts) -> Refusal | None:
    if (refusal := _no_stock_folder(facts)) is not None:
        return refusal
    if facts.is_deepseek and facts.attention_biases:
        return f"has no biases of {', '.join(facts.attention_biases)}", _convert(facts, BIAS_FREE)
    if facts.is_deepseek and facts.rope_type not in ("default", "yarn"):
        return f"has no rope_type {facts.rope_type} beside MLA", _convert(facts, BIAS_FREE)
    return _shares(facts)


ENGINE_RULES = (
    Engine(SERVING_ENGINES["transformers"], _transformers, _transformers_caution, _transformers_command),
    Engine(SERVING_ENGINES["llama.cpp"], _llama_cpp, _llama_cpp_caution),
    Engine(SERVING_ENGINES["mlx"], _mlx),
    Engine(SERVING_ENGINES["vllm"], _vllm, _vllm_caution, _vllm_command),
    Engine(SERVING_ENGINES["sglang"], _sglang),
    Engine(OLLAMA, _ollama, _ollama_caution),
    Engine(SERVING_ENGINES["tensorrt-llm"], _tensorrt),
)
"""All engines that headwise knows conditions of, in the order of reports."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one engine does with a model.

    Attributes:
        engine: the name of the engine.
        installed: the version of the engine that is installed here; None where it is not installed.
        serves: whether it loads the model and computes what the model is.
        why: the decisive condition where it does not.
        instead: what to write for it where it does not.
        command: the command line, or the Python expression, that starts it.
        caution: what must be known besides.
        checked: what the engine's conditions were checked against.
        caches: the options of the engine's own small caches that suit a model that it serves.
    """

    engine: str
    installed: str | None
    serves: bool
    why: str | None = None
    instead: str | None = None
    command: str | None = None
    caution: str | None = None
    checked: str
    caches: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What every engine does with a model.

    Attributes:
        source: the model, as the user named it.
        model_type: transformers' name of its architecture.
        label: the name of the model's attention.
        verdicts: the verdict on each engine.
    """

    source: str
    model_type: str
    label: str
    verdicts: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return as_document(self)


@checked_types
def engines(source: str | Path, *, tensor_parallel: int = 1) -> EngineReport:
    """Say which engines serve a model, why others do not, and what to write for them instead.

    For example ``engines("./half").verdicts[0].serves``. Nothing is run: the conditions are those of the engines'
    loaders, of the versions that `Verdict.checked` names.

    Args:
        source: a model folder, a ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``.
        tensor_parallel: devices that are to share out the heads of the model.

    Raises:
        HeadwiseError: the model cannot be read, or ``tensor_parallel`` is below 1.
    """
    if locate(source).kind in ("catalog", "config"):
        rule = (
            "has no tensors, on which it depends who serves a model: give its folder, a .gguf or hf://…; "
            f"headwise advise {source} --engine NAME reads a config alone"
        )
        raise ArgumentError("source", str(source), rule)
    if tensor_parallel < 1:
        raise ArgumentError("tensor_parallel", tensor_parallel, "must be at least 1")
    facts = ModelFacts.of(source, tensor_parallel)
    return EngineReport(
        source=str(source),
        model_type=facts.model_type,
        label=facts.spec.label,
        verdicts=tuple(_verdict(engine, facts) for engine in ENGINE_RULES),
    )


def _verdict(engine: Engine, facts: ModelFacts) -> Verdict:
    why, instead = engine.refusal(facts) or (None, None)
    serves = why is None
    # None of headwise's layers is stored in them.
    suiting = engine.served.caches if serves and not facts.is_own else ()
    return Verdict(
        engine=engine.served.title,
        installed=engine.installed,
        serves=serves,
        why=why,
        instead=instead,
        command=engine.typed(facts) if serves else None,
        caution=engine.caution(facts) if serves else None,
        checked=engine.served.checked,
        caches=tuple(cache.words for cache in suiting if cache.suits(facts.spec)),
    )
