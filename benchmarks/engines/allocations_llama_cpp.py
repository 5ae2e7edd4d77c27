"""What llama.cpp's log says that it allocates for the cache of a GGUF file, for several contexts and sequences.

python allocations_llama_cpp.py model.gguf '[[1000, 1], [9000, 3]]'    # JSON on the last line of stdout
"""

from __future__ import annotations

import json
import re
import sys

import llama_cpp
from benchmarks.engines.logged import logged

SIZE = re.compile(r"(?:llama_kv_cache|llama_memory_recurrent): +size = +([\d.]+) MiB")


def main() -> None:
    file, contexts = sys.argv[1], json.loads(sys.argv[2])
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"{file} could not be loaded")
    found = []
    for context, sequences in contexts:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = context * sequences, sequences
        settings.n_batch, settings.n_ubatch = 2048, 512
        settings.swa_full, settings.kv_unified = False, False  # llama-server's, where a number of slots is named
        with logged() as log:
            made = llama_cpp.llama_init_from_model(model, settings)
            if not made:
                raise SystemExit(f"{file} has no context of {context} × {sequences}")
            llama_cpp.llama_free(made)
        found.append([float(size) for size in SIZE.findall(log[0])])
    print(json.dumps({"mib": found, "version": f"llama-cpp-python {llama_cpp.__version__}"}))


main()
