"""Ask `headwise serve` fifty times with OpenAI's client: texts beside ``generate``'s, and the process's memory.

    python -m benchmarks.served ./mla ./same

Each folder is served by a process of its own. Its prompts are pieces of WikiText-2 test of 4 to 400 words; every
second answer is streamed, and two requests for more tokens than the rest, one of each kind, are given up by their
client after a second. Kept in benchmarks/results/served.json.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.models.checkpoints import load_tokenizer

REQUESTS, GIVEN_UP = 50, {11: False, 30: True}
"""Requests a folder, and those that are given up: by their number, whether they are streamed."""
NEW = 24


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/served.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {"requests": REQUESTS, "new": NEW})
    words = data.wikitext("test", options.cache).read_text().split()
    counts = [4 + at * 17 % REQUESTS * 8 for at in range(REQUESTS)]  # in no order, so that memory says nothing of it
    prompts = [" ".join(words[400 * at : 400 * at + count]) for at, count in enumerate(counts)]
    for folder in options.folders:
        if folder.name not in kept.rows:
            with serving(folder) as (process, url):
                row = ask(process, openai.OpenAI(base_url=url, api_key="-", max_retries=0), folder, prompts)
            kept.add(folder.name, row)
        say(f"{folder.name}: {kept.rows[folder.name]}")


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, str]]:
    """The process of `headwise serve` and its address."""
    command = [sys.executable, "-m", "headwise", "serve", str(folder), "--port", "0", "--dtype", "float32", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(4))
        try:
            yield process.pid, json.loads(said)["url"]
        finally:
            process.terminate()


def ask(process: int, client: openai.OpenAI, folder: Path, prompts: Sequence[str]) -> dict[str, Any]:
    """Every request in turn, and what ``generate`` continues each prompt with."""
    texts: dict[int, str] = {}
    memory = []
    for at, prompt in enumerate(prompts):
        streamed = GIVEN_UP.get(at, at % 2 == 1)
        asked = {"model": str(folder), "prompt": prompt, "temperature": 0, "stream": streamed}
        if at in GIVEN_UP:
            give_up(client, asked)
        elif streamed:
            texts[at] = "".join(part.choices[0].text for part in client.completions.create(max_tokens=NEW, **asked))
        else:
            texts[at] = client.completions.create(max_tokens=NEW, **asked).choices[0].text
        memory.append(resident(process))
    model, tokenizer = headwise.load(folder, dtype="float32"), load_tokenizer(folder)
    different = []
    for at, text in texts.items():
        ids = tokenizer(prompts[at], return_tensors="pt").input_ids
        whole = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        wanted = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
        if text != wanted:
            different.append({"request": at, "answered": text, "generated": wanted})
    return {"answered": len(texts), "equal": len(texts) - len(different), "different": different, "mib": memory}


def give_up(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    begin = time.monotonic()
    if not asked["stream"]:
        try:
            client.with_options(timeout=1).completions.create(max_tokens=8192, **asked)
        except openai.APITimeoutError:
            return
        raise AssertionError("8,192 tokens within a second")
    with client.completions.create(max_tokens=8192, **asked) as stream:
        for _ in stream:
            if time.monotonic() > begin + 1:
                return


def resident(process: int) -> int:
    """Memory of a process, MiB."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert match is not None
    return int(match[1]) // 1024


if __name__ == "__main__":
    main()
