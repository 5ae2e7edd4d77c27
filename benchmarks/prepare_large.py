"""How long preparing a GGUF of the shape of Qwen2.5-7B takes, and how much memory; it runs no model.

    python -m benchmarks.prepare_large --folder FOLDER         # writes benchmarks/results/prepare-large.json

The file has random weights of one type, which only their blocks' sizes and scales depend on. FOLDER needs room for
two such files; they are removed at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from benchmarks.kept import Kept, say
from benchmarks.large import peak_rss_gb

SHAPE = {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128, "feed_forward": 18944}
VOCABULARY = 152_064
TYPES = ("Q4_0", "Q8_0", "Q4_K")
ROWS = 512
"""Random rows of each width; those of a tensor repeat them, each time moved by one."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the files are made")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=[*TYPES])
    parser.add_argument("--for", dest="cache", default="llama.cpp:q4_0", metavar="ENGINE:FORMAT")
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/prepare-large.json"))
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {**SHAPE, "layers": options.layers, "for": options.cache})
    options.folder.mkdir(parents=True, exist_ok=True)
    source, output = options.folder / "large.gguf", options.folder / "prepared.gguf"
    for kind in options.types:
        if kind in kept.rows:
            continue
        try:
            write(source, gguf.GGMLQuantizationType[kind], options.layers)
            command = [sys.executable, "-m", "headwise", "prepare", str(source), str(output), "--for", options.cache]
            start, peak = time.perf_counter(), 0.0
            with subprocess.Popen([*command, "--overwrite"]) as process:
                while process.poll() is None:
                    peak = max(peak, peak_rss_gb(process.pid))
                    time.sleep(0.2)
            if process.returncode:
                raise SystemExit(process.returncode)
            row = {
                "seconds": time.perf_counter() - start,
                "peak_rss_gb": peak,
                "file_bytes": source.stat().st_size,
            }
        finally:
            for file in (source, output):
                file.unlink(missing_ok=True)
        kept.add(kind, row)
        say(f"{kind}: {row['seconds']:.0f} s, {row['peak_rss_gb']:.2f} GB at most")


def write(path: Path, kind: gguf.GGMLQuantizationType, layers: int) -> None:
    """Write a Qwen2 model of random weights, all its matrices of one type."""
    E, D, F = SHAPE["hidden"], SHAPE["head_dim"], SHAPE["feed_forward"]
    queries, keys = SHAPE["heads"] * D, SHAPE["kv_heads"] * D
    rng = np.random.default_rng(0)
    blocks = {width: random_rows(width, kind, rng) for width in (E, F)}
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(E)
    writer.add_feed_forward_length(F)
    writer.add_head_count(SHAPE["heads"])
    writer.add_head_count_kv(SHAPE["kv_heads"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"token{index}" for index in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges([])
    writer.add_eos_token_id(0)

    def matrix(name: str, rows: int, width: int) -> None:
        repeated = blocks[width][(np.arange(rows) + np.arange(rows) // ROWS) % ROWS]
        writer.add_tensor(name, repeated, raw_dtype=kind)

    def vector(name: str, size: int, *, around: float = 0.0) -> None:
        writer.add_tensor(name, (around + rng.normal(0, 0.1, size)).astype(np.float32))

    matrix("token_embd.weight", VOCABULARY, E)
    matrix("output.weight", VOCABULARY, E)
    vector("output_norm.weight", E, around=1.0)
    for index in range(layers):
        block = f"blk.{index}."
        for name, rows in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
            matrix(f"{block}{name}.weight", rows, E)
            vector(f"{block}{name}.bias", rows)
        matrix(f"{block}attn_output.weight", E, E)
        matrix(f"{block}ffn_gate.weight", F, E)
        matrix(f"{block}ffn_up.weight", F, E)
        matrix(f"{block}ffn_down.weight", E, F)
        for name in ("attn_norm", "ffn_norm"):
            vector(f"{block}{name}.weight", E, around=1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_rows(width: int, kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Bytes of random rows; of a type that gguf does not quantise to, random codes with plausible scales."""
    try:
        return gguf.quants.quantize(rng.normal(0, 0.02, (ROWS, width)).astype(np.float32), kind)
    except NotImplementedError:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        made = rng.integers(0, 256, (ROWS, width // elements, size), dtype=np.uint8)
        # Q4_K begins with two float16 scales.
        made[..., :4] = rng.uniform(1e-5, 3e-5, (*made.shape[:2], 2)).astype(np.float16).view(np.uint8)
        return made.reshape(ROWS, -1)


if __name__ == "__main__":
    main()
