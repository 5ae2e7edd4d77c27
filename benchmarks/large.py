"""Convert a 7B-shaped llama of random weights, one layer in memory at a time: peak memory, and seconds a layer.

    python -m benchmarks.large --folder FOLDER                   # writes benchmarks/results/large.json
    python -m benchmarks.large --folder FOLDER --layers 2 --json build/large.json      # a first look

It makes the checkpoint (13 GB of bf16 shards at 32 layers), then converts it three times to MLA at half the cache,
each time in a separate process: from given statistics; calibrated on 8 windows of 512 tokens, without the stage
spread; and with that stage, for which a layer takes several times as long, so that the model has only 4 layers. Each
row is saved as soon as it is measured, and not measured again. A killed conversion is continued, and the time before
the kill counts. FOLDER needs room for about three such models; the models are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch
from benchmarks.kept import Kept, say
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headwise.conversion.calibration.saved import save_layer, write_statistics
from headwise.conversion.calibration.windows import plain_windows
from headwise.conversion.solvers.statistics import Statistics
from headwise.conversion.storage import LayerFiles
from headwise.models.checkpoints import FolderWriter, TensorInfo, open_checkpoint
from headwise.runtime.hf import expected_tensors

SHAPE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
WINDOWS, WINDOW = 8, 512
ROWS = ("statistics", "text", "spread")
SPREAD = 4
"""Layers of the model whose cache is spread over layers."""

ROPE = 64
"""Width of the rotary key, as in DeepSeek's models."""


def config(layers: int, hidden: int) -> dict[str, Any]:
    scale = hidden / SHAPE["hidden_size"]
    sizes = {name: int(size * scale) if name != "vocab_size" else size for name, size in SHAPE.items()}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **sizes,
        "num_key_value_heads": sizes["num_attention_heads"],
        "num_hidden_layers": layers,
        "max_position_embeddings": WINDOW,  # which limits the windows that are calibrated on
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def make_checkpoint(folder: Path, values: dict[str, Any], device: str | None = None) -> None:
    """Write a model folder of random weights, drawn on a device, one tensor at a time."""
    shapes = {name: TensorInfo(shape, torch.bfloat16) for name, shape in expected_tensors(values).items()}
    generator = torch.Generator(device or "cpu").manual_seed(0)
    with FolderWriter(folder, shapes) as writer:
        for name, info in shapes.items():
            tensor = torch.ones(info.shape, dtype=info.dtype, device=device)
            if len(info.shape) == 2:
                tensor.normal_(0, info.shape[1] ** -0.5, generator=generator)
            writer.add(name, tensor.cpu())
        vocabulary = {"<unk>": 0} | {chr(32 + index): index for index in range(1, 95)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(writer.folder)
        writer.write_json("config.json", values)


def make_statistics(source: Path, folder: Path) -> None:
    """Write random statistics that resemble a text's, with moments of full rank; all layers share one file."""
    checkpoint = open_checkpoint(source)
    spec = checkpoint.spec.layers[0]
    E, H = spec.hidden_size, spec.num_heads
    generator = torch.Generator().manual_seed(1)
    grams = []
    for _ in range(2):
        gram = torch.zeros(E + 1, E + 1, dtype=torch.float64)
        spread = 0.5 + torch.rand(E, generator=generator)
        for _ in range(0, 2 * E, 256):
            inputs = torch.randn(256, E, generator=generator) * spread
            extended = torch.cat((inputs, torch.ones(256, 1)), dim=1).double()
            gram.addmm_(extended.mT, extended)
        grams.append(gram / gram[-1, -1])
    distances = torch.rand(H, WINDOW, generator=generator, dtype=torch.float64)
    weight = torch.rand(H, generator=generator, dtype=torch.float64)
    statistics = Statistics(grams[0], grams[1], weight, distances / distances.sum(-1, keepdim=True), weight[0])
    gradients = torch.randn(2 * E, E, generator=generator)
    results = LayerFiles(folder.with_name(f"{folder.name}-layers"))
    save_layer(results, 0, statistics, gradients.mT @ gradients / (2 * E))
    for index in range(1, checkpoint.spec.num_layers):
        os.link(results.file(0), results.file(index))
    folder.mkdir()
    write_statistics(folder, results, checkpoint, [], plain_windows(torch.zeros(WINDOWS, WINDOW)))
    shutil.rmtree(results.folder)


def convert(source: Path, out: Path, *options: object) -> dict[str, Any]:
    """Convert by the command line, in a separate process, and return a row of results.

    ``spent.json`` beside the output has the seconds and the peak memory of earlier runs that were killed. The seconds
    of reading, solving and writing are those of the last run, over the layers that it converted.
    """
    checkpoint = open_checkpoint(source)
    values = checkpoint.spec.hidden_size  # half of the keys and values of an MHA
    sizes = ("--kv-lora-rank", values - ROPE, "--qk-rope-head-dim", ROPE)
    command = ["-m", "headwise", "convert", source, out, "--to", "mla", *sizes, *options, "--no-evaluate", "--json"]
    spent, output = out.with_name("spent.json"), out.with_name("report.json")
    before = json.loads(spent.read_text()) if spent.exists() else {"runs": 0, "seconds": 0.0, "peak_rss_gb": 0.0}
    results = out.with_name(f".{out.name}.headwise-partial") / "work" / "layers"
    layers = checkpoint.spec.num_layers - len(list(results.glob("*.safetensors")))
    start, peak = time.perf_counter(), before["peak_rss_gb"]
    with output.open("w") as file, Popen([sys.executable, *map(str, command)], stdout=file) as process:
        while process.poll() is None:
            time.sleep(1)
            peak = max(peak, peak_rss_gb(process.pid))
            now = {"seconds": before["seconds"] + time.perf_counter() - start, "peak_rss_gb": peak}
            spent.write_text(json.dumps({"runs": before["runs"] + 1, **now}))
    if process.returncode:
        raise SystemExit(process.returncode)
    report: dict[str, Any] = json.loads(output.read_text())
    solving = report["seconds"] - report["seconds_reading"] - report["seconds_writing"]
    split = {"reading": report["seconds_reading"], "solving": solving, "writing": report["seconds_writing"]}
    return {
        "label": report["label"],
        "layers": checkpoint.spec.num_layers,
        "runs": before["runs"] + 1,
        "peak_rss_gb": max(peak, report["peak_rss_bytes"] / 1e9),
        "peak_device_gb": (report["peak_device_bytes"] or 0) / 1e9,
        "seconds": before["seconds"] + report["seconds"],
        "seconds_a_layer": {name: seconds / max(layers, 1) for name, seconds in split.items()},
        "source_gb": sum(info.nbytes for info in checkpoint.tensors.values()) / 1e9,
        "output_gb": report["disk_bytes"] / 1e9,
        "calibration_tokens": report["calibration_tokens"],
    }


def peak_rss_gb(process: int) -> float:
    """The peak resident memory of another process so far; 0 if the system does not report it."""
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    except OSError:  # the process has just ended, or the system has no such file
        return 0.0
    return int(match[1]) * 1024 / 1e9 if match else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--hidden-size", type=int, default=SHAPE["hidden_size"], help="a smaller one tries the script"
    )
    parser.add_argument("--device", help="such as cuda; the CPU when left out")
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS, help="what the conversion gets")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/large.json"))
    options = parser.parse_args(arguments)
    values = config(options.layers, options.hidden_size)
    kept = Kept(options.json, {"source": values, "windows": [WINDOWS, WINDOW], "device": options.device})
    if not (wanted := [row for row in options.rows if row not in kept.rows]):
        return
    work = options.folder / "headwise-large"
    work.mkdir(parents=True, exist_ok=True)
    for row in wanted:
        layers = min(options.layers, SPREAD) if row == "spread" else options.layers
        source, place = work / f"source-{layers}", work / row
        if not (source / "config.json").is_file():
            make_checkpoint(source, config(layers, options.hidden_size), options.device)
        arguments_of_row: tuple[object, ...]
        if row == "statistics":
            arguments_of_row = "--statistics", place / "statistics"
            if not (place / "spent.json").exists():  # otherwise an earlier run has made them
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                make_statistics(source, place / "statistics")
        else:
            place.mkdir(exist_ok=True)
            draw = torch.randint(33, 127, (WINDOWS * WINDOW * 2,), generator=torch.Generator().manual_seed(2))
            (place / "text.txt").write_text("".join(map(chr, draw.tolist())))
            arguments_of_row = "--calibrate", place / "text.txt", "--calibration-tokens", WINDOWS * WINDOW
            arguments_of_row += ("--spread",) if row == "spread" else ()
        arguments_of_row += ("--device", options.device) if options.device else ()
        result = convert(source, place / "out", *arguments_of_row)
        kept.add(row, result)
        say(json.dumps({row: result}, indent=2))
        shutil.rmtree(place)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
