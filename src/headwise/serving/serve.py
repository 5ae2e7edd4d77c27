"""``headwise serve``: OpenAI's HTTP interface to one model, whose cache is kept in its codes.

The server is transformers' own (``transformers serve``). Left to itself it loads a folder by the class that its
config names, which refuses MLA and ignores the codes of a cache; here it gets the model that `headwise.load` reads.
Requests are answered one after another: continuous batching keeps a cache of its own, without codes.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from pathlib import Path

from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError, MissingExtraError

_NEEDED = ("fastapi", "openai", "uvicorn")


@checked_types
def serve(
    source: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str | None = None,
    device: str | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Answer OpenAI's completions, chat completions and responses over HTTP until the process is interrupted.

    For example ``serve("./smollm2-mla")``, and in another process
    ``openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-")``.

    Args:
        source: a model folder (converted or not), a ``.gguf`` or another source with weights; requests name the
            model as it is named here, or not at all.
        host: the address to listen at; the default is reached from this machine alone.
        port: the port to listen at, 1 to 65535, or 0 for any that is free.
        dtype: the dtype of the weights and the arithmetic; the stored dtype when None.
        device: the device to run on, such as ``cuda``; the CPU when None.
        ready: called with the interface's address, such as ``http://127.0.0.1:8000/v1``, once the model is loaded.

    Raises:
        ArgumentError: the host or the port cannot be listened at, or the source or the device does not exist.
        MissingExtraError: a package of the extra ``serve`` is not installed.
        SpecError: the model is no text decoder.
        CheckpointError: the model or its tokenizer cannot be read.
    """
    if not 0 <= port <= 65535:
        raise ArgumentError("port", port, "must be 0 to 65535")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise MissingExtraError("package", missing[0], "is needed to serve: pip install 'headwise[serve]'")
    try:
        # Before the model is loaded, which may take minutes.
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ArgumentError("host and port", f"{host}:{port}", f"cannot be listened at: {error.strerror}") from None
    with listener:
        import uvicorn

        from headwise.models.checkpoints import load_tokenizer, model_path
        from headwise.runtime.hf.load import load, open_decoder
        from headwise.serving.http import LOGS, application

        path = model_path(source)
        open_decoder(path)  # before the tokenizer, whose errors say less about what is wrong with a folder
        tokenizer = load_tokenizer(path)
        app = application(str(source), load(path, dtype=dtype, device=device), tokenizer)
        if ready is not None:
            name = f"[{host}]" if ":" in host else host
            ready(f"http://{name}:{listener.getsockname()[1]}/v1")
        uvicorn.Server(uvicorn.Config(app, log_level="warning", log_config=LOGS)).run(sockets=[listener])
